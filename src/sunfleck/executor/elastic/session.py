"""The protocol of a run among its workers: opening and settling steps, changing rounds, leaving, evaluating."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from sunfleck.core.errors import InvalidRequest
from sunfleck.executor.launch.wire import (
    EndProgram,
    FormRound,
    Left,
    Ready,
    RoundJoined,
    Span,
    StepReport,
)

from .comm import Comm, CommFailed, Superseded
from .control import Control, StepState
from .lineage import Lineage
from .loader import ElasticLoader
from .progress import Meter
from .rounds import Rounds
from .saver import Saver
from .state import recv_state, send_state
from .wrap import gradient_hook

REPORT_S = 0.25
"""How often rank 0 reports."""


class Session:
    def __init__(self, rounds: Rounds, lineage: Lineage, seed: int, checkpoint_s: float) -> None:
        self.rounds = rounds
        self.lineage = lineage
        self.seed = seed
        self.loader: ElasticLoader | None = None
        self.started = False
        self.meter = Meter()
        self.control = Control(rounds, lineage)
        self._saver = Saver(rounds, lineage, checkpoint_s)
        self._step: StepState | None = None
        self.before_first_step: Callable[[], None] = lambda: None
        """What to settle among the ranks before a step; set by the evaluator."""
        self.n_evaluations = 0
        self._reported_s = 0.0
        self._committed_s = time.monotonic()
        self._terminated = False
        self._finished = False
        rounds.step = lambda: lineage.place.step
        rounds.repeat = lambda: self._repeat_ledger(len(lineage.book.entries))

    # -- start -----------------------------------------------------------------------------------------------------

    def check_prepared(self) -> None:
        if self.loader is not None:
            source = self.loader.source
            self.lineage.describe_data(f"{source.n_in_dataset}:{source.n_samples}:{source.batch}:{self.seed}")

    def start(self) -> None:
        """Say that we are ready, and wait for the first round. Once."""
        if self.started:
            return
        if self.loader is None or not self.lineage.models:
            raise InvalidRequest("call run.prepare(model, optimizer, loader) before run.epochs()")
        self.started = True
        self.lineage.fingerprint()
        if self.rounds.link is None:
            self.lineage.exists = True
            self.meter.restart(time.monotonic(), warm_up=False)
            return
        self._handle_term()
        self.rounds.say_ready(self._ready())
        self._enter(self.rounds.wait(after=-1), since_s=None)

    def _ready(self) -> Ready:
        assert self.loader is not None
        source = self.loader.source
        return Ready(
            round=self.rounds.number,
            step=self.lineage.place.step,
            checkpoint_step=self.lineage.checkpoint_step(),
            n_samples=source.n_samples,
            epoch_hash=source.hash(),
            batch=source.batch,
        )

    def _handle_term(self) -> None:
        if threading.current_thread() is threading.main_thread():

            def on_term(*_: Any) -> None:
                self._terminated = True

            signal.signal(signal.SIGTERM, on_term)

    # -- steps -----------------------------------------------------------------------------------------------------

    def next_batch(self) -> Any:
        """Settle the step before, change rounds if everybody agrees, open the next step. None at the epoch's end."""
        assert self.loader is not None
        self.settle()
        self._boundary()
        place, source = self.lineage.place, self.loader.source
        if place.cursor >= source.n_samples:
            return None
        while True:
            try:
                self.before_first_step()
                break
            except CommFailed as error:
                self.recover(error)
            except Superseded:
                self.enter_newest()
            place = self.lineage.place
            if place.cursor >= source.n_samples:
                return None
        place = self.lineage.place
        comm = self.rounds.comm
        stop = min(place.cursor + source.batch, source.n_samples)
        batch, n_local, hash_value = self.loader.take(place.epoch, place.cursor, stop, comm.rank, comm.world)
        self._step = StepState(place.cursor, stop, n_local, hash_value)
        if comm.world > 1:
            self._step.undo = self.lineage.begin_undo()
        return batch

    def settle(self) -> None:
        """End the open step: commit it, or void it and form the next round with whoever is left."""
        step = self._step
        if step is None:
            return
        if self.rounds.comm.world > 1:
            ok = self._decide(step)
            if ok and len(self.lineage.models) > 1:
                ok = self.control.average_buffers(step)
            if not ok:
                self._step = None
                assert step.undo is not None
                step.undo.restore()
                self.recover(CommFailed(self.rounds.comm.error or "unknown"))
                return
        else:
            self.control.alone(step)
        self._step = None
        self._commit(step)

    def _decide(self, step: StepState) -> bool:
        """Whether every collective of the step so far has succeeded here. Waits for the control sum."""
        return self.control.decide(step, buffers=len(self.lineage.models) == 1)

    def _commit(self, step: StepState) -> None:
        lineage, rounds, now_s = self.lineage, self.rounds, time.monotonic()
        place = lineage.place
        lineage.committed()
        lineage.accumulating = not step.applied
        self.n_evaluations = 0
        span = Span(
            epoch=place.epoch,
            step_from=place.step,
            step_to=place.step + 1,
            cursor_from=step.start,
            cursor_to=step.stop,
            n_samples=step.n_committed,
            index_hash=step.hash_committed,
        )
        lineage.book.commit(rounds.number, span)
        place.advance(step.stop - step.start)
        self._committed_s = now_s
        self.meter.step(now_s, step.stop - step.start)
        for name, (total, weight) in step.metrics_committed.items():
            self.meter.add_metric(name, total, weight)
        self.control.keep_reported(step)
        if now_s - self._reported_s >= REPORT_S:
            self.report_now()

    def report_now(self) -> None:
        """Rank 0 tells the controller what was committed; every rank begins its next interval."""
        now_s = time.monotonic()
        spans = self.lineage.book.take()
        metrics = self.meter.take_metrics()
        dt_s, per_s, step_s = self.meter.rate(now_s)
        self._reported_s = now_s
        place, rounds = self.lineage.place, self.rounds
        if rounds.comm.rank == 0 and (spans or metrics):
            rounds.say(
                StepReport(
                    round=rounds.number,
                    world=rounds.comm.world,
                    step=place.step,
                    epoch=place.epoch,
                    samples=place.samples,
                    dt_s=dt_s,
                    samples_per_s=per_s,
                    step_s=step_s,
                    metrics=metrics,
                    spans=spans,
                )
            )
        self.meter.restart(now_s, warm_up=False)

    def report(self, name: str, value: float) -> None:
        if self._step is not None:
            self._step.reported[name] = value
        else:
            self.meter.add_metric(name, value, 1.0)
            self._reported_s = min(self._reported_s, time.monotonic() - REPORT_S)

    def may_step(self, optimizer: Any) -> bool:
        """Asked by each optimizer before it steps."""
        step = self._step
        if step is not None:
            step.applied = True
        if step is None or self.rounds.comm.world == 1:
            return True
        if not self._decide(step):
            return False
        if len(self.lineage.optimizers) > 1 and step.undo is not None:
            self.lineage.keep_optimizer(step.undo, optimizer)
        return True

    def may_schedule(self) -> bool:
        return self._step is None or self.rounds.comm.world == 1 or self._decide(self._step)

    def on_model_error(self, error: BaseException) -> None:
        self.rounds.comm.fail(error)

    # -- boundaries ------------------------------------------------------------------------------------------------

    def _boundary(self) -> None:
        """Between steps, on all ranks alike: rounds, saving, leaving."""
        rounds = self.rounds
        if rounds.link is None:
            return
        rounds.poll()
        if rounds.end is not None:
            self._end(rounds.end)
        if self._terminated and rounds.told is None:
            self._leave(save=rounds.comm.rank == 0)
        if rounds.told is not None and (rounds.comm.world == 1 or self.control.agreed > 0):
            began_s = time.monotonic()
            rounds.comm.part()
            self._enter(rounds.told, since_s=began_s)
        self._saver.save_sometimes(self.report_now)

    def _leave(self, save: bool) -> NoReturn:
        """This worker's end, at a boundary. No destructors: they would cost half a second."""
        self.report_now()
        if save:
            self._saver.save_now()
        told = self.rounds.told
        self.rounds.say(Left(round=told.round if told else self.rounds.number, step=self.lineage.place.step))
        if self.rounds.link is not None:
            self.rounds.link.flush()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _end(self, command: EndProgram) -> NoReturn:
        waiting = self.rounds.waiting is not None
        self._leave(save=command.save and (waiting or self.rounds.comm.rank == 0))

    def finish(self) -> None:
        """The program is over: save what came of it. Asks nothing of the other ranks."""
        if self._finished or self.rounds.link is None:
            return
        self.report_now()
        if self._step is None and self.rounds.comm.rank == 0:
            self._finished = True
            self._saver.save_now()

    # -- rounds ----------------------------------------------------------------------------------------------------

    def recover(self, error: Exception) -> None:
        """The group is broken. Our state is that of the last step we committed; wait for the next round and join it."""
        rounds = self.rounds
        rounds.comm.fail(error)
        for model in self.lineage.models:
            model.parallelise(None, None)
        rounds.comm.close_behind()
        rounds.say_failed(rounds.number, self.lineage.place.step, str(error), self._ready())
        self._enter(rounds.wait(after=rounds.number), since_s=self._committed_s)

    def enter_newest(self) -> None:
        command = self.rounds.end or self.rounds.told
        assert command is not None
        self._enter(command, since_s=time.monotonic())

    def _enter(self, command: FormRound | EndProgram, since_s: float | None) -> None:
        """Become a member of the round, or of the newest one announced meanwhile; or leave, if that has no place for
        us."""
        self.report_now()  # under the number of the round that committed it
        while True:
            if isinstance(command, EndProgram):
                self._end(command)
            if self.rounds.worker not in command.members:
                self._leave(
                    save=not command.members and (self.rounds.comm.rank == 0 or self.rounds.waiting is not None)
                )
            try:
                self._join(command, since_s)
                return
            except Superseded:
                command = self.rounds.wait(after=command.round)
            except CommFailed as error:
                self.rounds.say_failed(command.round, self.lineage.place.step, str(error), self._ready())
                command = self.rounds.wait(after=command.round)

    def _join(self, form: FormRound, since_s: float | None) -> None:
        lineage, rounds = self.lineage, self.rounds
        previous, n_previous = rounds.number, len(rounds.members)
        mine = {
            "exists": lineage.exists,
            "step": lineage.place.step,
            "evaluations": len(lineage.evaluations),
            "fingerprint": lineage.fingerprint(),
            "worker": rounds.worker,
            "host": os.environ.get("SUNFLECK_NODE_HOST", "localhost"),
        }
        comm, said = rounds.meet(form, mine)
        try:
            for rank, other in enumerate(said):
                if other["fingerprint"] != said[0]["fingerprint"]:
                    raise InvalidRequest(
                        f"rank {rank} ({other['worker']}) has another model, optimizer or dataset than rank 0 "
                        f"({said[0]['worker']}): every worker must build the same"
                    )
            self._share_state(comm, said, lambda: rounds.newer_than(form.round))
        except BaseException as error:
            comm.fail(error)
            comm.close_behind()
            raise
        comm.remember_sockets()
        old = rounds.adopt(form, comm)
        self._use(comm)
        old.close_behind()  # last, when no DDP holds it any more: whoever lets go of it last waits for its end
        now_s = time.monotonic()
        rounds.say(
            RoundJoined(round=form.round, step=lineage.place.step, stall_s=None if since_s is None else now_s - since_s)
        )
        if comm.rank == 0:
            self._saver.take_over()
            self._repeat_ledger()
            rounds.forget_old_keys(previous, n_previous)
        if self._terminated:
            self._terminated = False

    def _share_state(self, comm: Comm, said: list[dict[str, Any]], superseded: Callable[[], bool]) -> None:
        """The most advanced state goes to everybody who has an older one; without any, rank 0 loads the checkpoint."""
        lineage = self.lineage
        keys = [(s["step"], s["evaluations"]) if s["exists"] else (-1, 0) for s in said]
        newest = max(keys)
        if newest[0] < 0:
            if comm.rank == 0:
                lineage.load()
                lineage.exists = True
            sources = [0]
        else:
            sources = [r for r, key in enumerate(keys) if key == newest]
        needy = [r for r in range(comm.world) if r not in sources]
        if comm.rank in sources:
            mine = [r for i, r in enumerate(needy) if sources[i % len(sources)] == comm.rank]
            if mine:
                send_state(comm, lineage.capture(copy=False), mine)
        elif comm.world > 1:
            source = sources[needy.index(comm.rank) % len(sources)]
            value = recv_state(comm, source)
            lineage.restore(value, f"the state of {said[source]['worker']}")
        # Everybody has it, and every connection that training needs is made.
        if comm.world > 1:
            comm.wait(comm.all_reduce(torch.zeros(1)), superseded)

    def _use(self, comm: Comm) -> None:
        """Train in this group from now on."""
        self.control.agreed = 0
        for model in self.lineage.models:
            if comm.world == 1:
                model.parallelise(None, None)
            else:
                model.parallelise(comm, gradient_hook(comm, self._weight, self._after_gradients))
        place = self.lineage.place
        torch.manual_seed(zlib.crc32(f"{self.seed}/{place.step}/{comm.rank}".encode()))
        self.meter.restart(time.monotonic(), warm_up=True)
        self._reported_s = time.monotonic()

    def _weight(self) -> float:
        step = self._step
        return 1.0 / self.rounds.comm.world if step is None else step.n_local / (step.stop - step.start)

    def _after_gradients(self) -> None:
        if self._step is not None:
            self.control.begin(self._step, buffers=len(self.lineage.models) == 1)

    def _repeat_ledger(self, n_entries: int = 32) -> None:
        """Say again what was committed lately: the rank 0 that should have said it, or the controller that heard it,
        may have died first. The ledger fold is idempotent."""
        place, rounds = self.lineage.place, self.rounds
        by_round: dict[int, list[Span]] = {}
        for number, span in self.lineage.book.entries[-n_entries:]:
            by_round.setdefault(number, []).append(span)
        # The last report, without spans, says how far the lineage has come by now.
        for number, spans in [*by_round.items(), (rounds.number, [])]:
            rounds.say(
                StepReport(
                    round=number,
                    world=rounds.comm.world,
                    step=place.step,
                    epoch=place.epoch,
                    samples=place.samples,
                    dt_s=0.0,
                    samples_per_s=None,
                    step_s=0.0,
                    metrics={},
                    spans=tuple(spans),
                )
            )
