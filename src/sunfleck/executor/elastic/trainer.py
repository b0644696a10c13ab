"""The user's side of elastic training: `init`, `Run.prepare`, `Run.epochs`, `Run.report`, `Run.evaluate`.

A step is what happens between two `next` calls on the training loader. Its samples are fetched, gradients are summed
over the ranks, and a small control sum (how many samples, which, and whether everybody has been told of a new round)
goes the same way. An optimizer steps only when all of that has succeeded on this rank; otherwise the step is void: it
changes nothing, and the loader serves the same samples again to whoever forms the next round ("compute all, then
commit"). If some ranks committed it and others could not, the others take their state from those.
"""

from __future__ import annotations

import atexit
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # DDP needs it; loading it here keeps it out of the first rescale, as it does
import torch.utils.serialization.config  # for saving and sending state

from sunfleck.core.errors import InvalidRequest
from sunfleck.executor.launch.wire import Done, Raised

from . import outputs
from .evaluation import Evaluator
from .lineage import Lineage
from .link import Link
from .loader import ElasticLoader, is_loader
from .progress import number
from .rounds import Rounds
from .session import Session
from .wrap import ElasticModel, guard_optimizer, guard_scheduler

__all__ = ["InvalidRequest", "Run", "init"]

_current: Run | None = None


def init(
    *,
    seed: int = 0,
    checkpoint_s: float = 10.0,
    device: str | None = None,
    find_unused_parameters: bool = False,
) -> Run:
    """Begin elastic training in this process; once per process.

    `seed` decides the order of the samples. `checkpoint_s`: how often the state is saved for the case that every node
    goes at once. `device`: "cpu", "cuda", ...; by default a GPU when there is one. `find_unused_parameters` as in
    DistributedDataParallel. Outside of a pool (plain `python train.py`) the run has one worker.
    """
    global _current
    if _current is not None:
        raise InvalidRequest("sunfleck.elastic.init() was called twice in one process; keep the run it returned")
    if checkpoint_s <= 0:
        raise InvalidRequest(f"checkpoint_s must be above 0, not {checkpoint_s}")
    _current = Run(seed=seed, checkpoint_s=checkpoint_s, device=device, find_unused=find_unused_parameters)
    return _current


class Run:
    """One training run, as seen by one of its workers. Made by `init`."""

    def __init__(self, *, seed: int, checkpoint_s: float, device: str | None, find_unused: bool) -> None:
        self.seed = seed
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        link = Link.from_environment()
        worker = os.environ.get("SUNFLECK_WORKER", "alone")
        rounds = Rounds(link, worker, os.environ.get("SUNFLECK_JOB", "alone"), self.device)
        if link is not None:
            outputs.outlive_full_disk()
            torch.set_num_threads(max(1, round(float(os.environ.get("SUNFLECK_NODE_CPUS", "1")))))
        folder = os.environ.get("SUNFLECK_JOB_DIR") if link is not None else None
        self._lineage = Lineage(Path(folder) / "checkpoints" if folder else None)
        self._session = Session(rounds, self._lineage, seed, checkpoint_s)
        self._evaluator = Evaluator(self._session)
        self._find_unused = find_unused
        self._prepared = False
        self._in_epoch = False
        if link is not None:
            self._arrange_last_words(rounds)

    # -- places ----------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This worker's number among `world`. Changes with the membership; ask anew in each step."""
        return self._session.rounds.comm.rank

    @property
    def world(self) -> int:
        """How many workers train now."""
        return self._session.rounds.comm.world

    @property
    def is_main(self) -> bool:
        """True on rank 0 alone: for printing and writing results."""
        return self.rank == 0

    @property
    def step(self) -> int:
        """Steps committed since the job began."""
        return self._lineage.place.step

    @property
    def epoch(self) -> int:
        return self._lineage.place.epoch

    @property
    def samples(self) -> int:
        """Samples trained since the job began."""
        return self._lineage.place.samples

    # -- what takes part -------------------------------------------------------------------------------------------

    def prepare(self, *things: Any) -> Any:
        """Models, optimizers, LR schedulers and DataLoaders, in any order; returned in the same order.

        The first DataLoader is the training loader; its batch_size is the global one. Raises InvalidRequest for things
        that cannot take part, saying why.
        """
        if self._prepared:
            raise InvalidRequest("run.prepare() was called twice; pass everything in one call")
        self._prepared = True
        prepared = [self._prepare_one(thing) for thing in things]
        self._session.check_prepared()
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def register(self, name: str, thing: Any) -> None:
        """Let something else with state_dict() and load_state_dict() take part: an EMA, a grad scaler ..."""
        if not hasattr(thing, "state_dict") or not hasattr(thing, "load_state_dict"):
            raise InvalidRequest(f"run.register({name!r}): it needs state_dict() and load_state_dict()")
        if self._session.started:
            raise InvalidRequest(f"run.register({name!r}) must come before the first epoch")
        if name in self._lineage.registered:
            raise InvalidRequest(f"run.register({name!r}): the name is taken")
        self._lineage.registered[name] = thing

    def _prepare_one(self, thing: Any) -> Any:
        lineage, session = self._lineage, self._session
        if isinstance(thing, torch.nn.Module):
            thing.to(self.device)
            model = ElasticModel(thing, self._find_unused, session.on_model_error)
            lineage.models.append(model)
            return model
        if is_loader(thing):
            loader = ElasticLoader(self, thing, training=session.loader is None)
            if session.loader is None:
                session.loader = loader
            return loader
        if isinstance(thing, torch.optim.Optimizer):
            guard_optimizer(thing, session.may_step)
            lineage.optimizers.append(thing)
            return thing
        if hasattr(thing, "step") and hasattr(thing, "load_state_dict"):
            guard_scheduler(thing, session.may_schedule)
            lineage.schedulers.append(thing)
            return thing
        raise InvalidRequest(
            f"run.prepare() takes models, optimizers, LR schedulers and DataLoaders, not {type(thing).__name__}; "
            f"for other state use run.register(name, thing)"
        )

    # -- training --------------------------------------------------------------------------------------------------

    def epochs(self, n_epochs: int) -> Iterator[int]:
        """The numbers of the epochs to train, from where the job stands to `n_epochs` - 1."""
        session = self._session
        session.start()
        while self._lineage.place.epoch < n_epochs:
            self._in_epoch = True
            try:
                yield self._lineage.place.epoch
            except GeneratorExit:
                # `break`, or an exception on its way out: the two look the same from here, and after an exception the
                # others must not be asked for anything. What is left to do is done when the program ends well.
                self._in_epoch = False
                raise
            self._in_epoch = False
            session.settle()
            self._lineage.place.next_epoch()
        session.rounds.comm.part()
        session.finish()

    def train_batches(self) -> Iterator[Any]:
        """What iterating the training loader gives: this rank's share of one step after the other."""
        if not self._in_epoch:
            raise InvalidRequest("iterate the training loader inside `for epoch in run.epochs(n):`")
        while (batch := self._session.next_batch()) is not None:
            yield batch

    def report(self, **metrics: Any) -> None:
        """Metrics of this step (means over this worker's samples) or of the moment, for tables, curves and reports.

        They are averaged over all workers and samples of about a quarter of a second. Raises TypeError for anything
        that is not one number. In a step that will be trained again they are dropped.
        """
        for name, value in metrics.items():
            self._session.report(name, number(name, value))

    def evaluate(self, judge: Callable[[Any], dict[str, Any]], loader: Any) -> dict[str, float]:
        """Exact metrics over all of `loader`, shared among the workers; the same result on each of them.

        `judge(batch)` returns sums over the batch by name, and under the name "n" how many they are sums over; the
        result is then the mean, sum / n. Without "n" it is the sums. Models are in eval mode and no gradients are
        made meanwhile. Every worker must call it. If the membership changes it begins anew by itself.
        """
        if is_loader(loader):
            loader = ElasticLoader(self, loader, training=False)
        if not isinstance(loader, ElasticLoader):
            raise InvalidRequest("run.evaluate(judge, loader) needs a DataLoader")
        caller = sys._getframe(1)
        site = zlib.crc32(f"{caller.f_code.co_filename}:{caller.f_lineno}".encode()) | 1
        self._session.start()
        return self._evaluator.evaluate(judge, loader, site)

    # -- the end ---------------------------------------------------------------------------------------------------

    def _arrange_last_words(self, rounds: Rounds) -> None:
        """Tell the controller how the program ended. Its exit status says the same if this cannot be sent."""
        failed: list[str] = []
        previous = sys.excepthook

        def on_exception(kind: Any, error: Any, trace: Any) -> None:
            failed.append(f"{kind.__name__}: {error}")
            previous(kind, error, trace)

        def last_words() -> None:
            if not failed and self._session.started:
                self._session.finish()
            step = self._lineage.place.step
            rounds.say(Raised(step=step, error=failed[0]) if failed else Done(step=step))
            if rounds.link is not None:
                rounds.link.flush()

        sys.excepthook = on_exception
        atexit.register(last_words)
