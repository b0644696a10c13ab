"""The state that makes a training run what it is: everything prepared or registered, its place, its ledger."""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path
from typing import Any

import torch

from sunfleck.core.errors import InvalidRequest

from . import checkpoint
from .progress import Book, Place
from .state import copied
from .wrap import Undo

FORMAT = 1


class Lineage:
    """What is handed to newcomers and saved to disk. Nothing here talks to other workers."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.models: list[Any] = []
        self.optimizers: list[Any] = []
        self.schedulers: list[Any] = []
        self.registered: dict[str, Any] = {}
        self.place = Place()
        self.book = Book()
        self.evaluations: list[dict[str, float]] = []
        """Results since the last committed step: a newcomer that runs the same code is given them."""
        self.metric_names: list[str] = []
        self.exists = False
        """Whether this process holds state of the run (and not just a new model)."""
        self.evaluating = False
        self.accumulating = False
        """Whether gradients of committed steps wait for an optimizer step (gradient accumulation)."""
        self._again: dict[str, Any] | None = None

    # -- as a value ------------------------------------------------------------------------------------------------

    def capture(self, *, copy: bool) -> dict[str, Any]:
        """The whole state as plain values and tensors; with `copy`, one that later steps do not change."""
        value = {
            "format": FORMAT,
            "fingerprint": self.fingerprint(),
            "models": [m.state_dict() for m in self.models],
            "optimizers": [o.state_dict() for o in self.optimizers],
            "schedulers": [_plain_scheduler(s) for s in self.schedulers],
            "registered": {name: thing.state_dict() for name, thing in self.registered.items()},
            "gradients": self._gradients() if self.accumulating else None,
            "place": self.place.to_plain(),
            "book": self.book.to_plain(),
            "evaluations": [dict(e) for e in self.evaluations],
            "evaluating": self.evaluating,
            "metric_names": list(self.metric_names),
        }
        return copied(value) if copy else value

    def restore(self, value: dict[str, Any], origin: str) -> None:
        """Take over a captured state. Raises InvalidRequest when it belongs to another program."""
        if value.get("format") != FORMAT:
            raise InvalidRequest(f"{origin} has format {value.get('format')}, this version reads {FORMAT}")
        if value["fingerprint"] != self.fingerprint():
            raise InvalidRequest(
                f"{origin} belongs to another program: its models, optimizers, dataset or batch differ from the ones "
                f"prepared here; train under a new job name, or restore the script it was made with"
            )
        self._apply(value)
        self.place = Place.from_plain(value["place"])
        self.book = Book.from_plain(value["book"])
        self.evaluations = [dict(e) for e in value["evaluations"]]
        self.metric_names = list(value["metric_names"])
        self.exists = True
        # Taken in the middle of an evaluation: our script has yet to run what the others ran since the loop ended
        # (a scheduler step, say). When it gets to that evaluation, the state is put in place once more.
        self._again = value if value["evaluating"] else None

    def arrive_at_evaluation(self, index: int) -> None:
        """The script has come to its `index`-th evaluation since the last step, and takes part in it."""
        if self._again is not None and index >= len(self.evaluations):
            self._apply(self._again)
            self._again = None

    def committed(self) -> None:
        self._again = None
        self.evaluations.clear()

    def _apply(self, value: dict[str, Any]) -> None:
        for things, key in ((self.models, "models"), (self.optimizers, "optimizers"), (self.schedulers, "schedulers")):
            for thing, state in zip(things, value[key], strict=True):
                thing.load_state_dict(state)
        for name, thing in self.registered.items():
            thing.load_state_dict(value["registered"][name])
        gradients = value["gradients"]
        self.accumulating = gradients is not None
        for i, parameter in enumerate(self._parameters()):
            gradient = gradients[i] if gradients is not None else None
            parameter.grad = None if gradient is None else gradient.to(parameter.device, parameter.dtype)

    def _parameters(self) -> list[Any]:
        return [p for m in self.models for p in m.parameters()]

    def _gradients(self) -> list[Any]:
        return [p.grad for p in self._parameters()]

    def fingerprint(self) -> str:
        """Equal exactly when the state of one program fits the other."""
        digest = hashlib.sha256()
        for model in self.models:
            for name, tensor in model.state_dict().items():
                if isinstance(tensor, torch.Tensor):
                    digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype};".encode())
        for thing in (*self.optimizers, *self.schedulers, *self.registered.values()):
            digest.update(type(thing).__name__.encode() + b";")
        digest.update(",".join(self.registered).encode())
        digest.update(self._data_key.encode())
        return digest.hexdigest()[:32]

    _data_key = ""

    def describe_data(self, key: str) -> None:
        """Dataset length, batch and seed: a state only continues over the same data."""
        self._data_key = key

    # -- undo ------------------------------------------------------------------------------------------------------

    def buffers(self) -> list[Any]:
        return [b for m in self.models for b in m.buffers()]

    def begin_undo(self) -> Undo:
        """Copies of what a step changes before it is known to succeed: gradients, buffers, registered state."""
        undo = Undo()
        undo.keep_gradients(self._parameters(), self.accumulating)
        buffers = self.buffers()
        if buffers:
            undo.keep_tensors(buffers)
        for thing in self.registered.values():
            undo.keep_state(thing, copied)
        return undo

    def keep_optimizer(self, undo: Undo, optimizer: Any) -> None:
        """With several optimizers a later one can fail after an earlier one stepped: keep what that one changes."""
        undo.keep_tensors([p for group in optimizer.param_groups for p in group["params"]])
        undo.keep_state(optimizer, copied)

    # -- disk ------------------------------------------------------------------------------------------------------

    def checkpoint_step(self) -> int | None:
        return checkpoint.newest_step(self.folder) if self.folder is not None else None

    def load(self) -> bool:
        """Take over the newest readable checkpoint, if there is one."""
        if self.folder is None:
            return False
        found = checkpoint.load_newest(self.folder, lambda line: print(f"sunfleck: {line}", file=sys.stderr))
        if found is None:
            return False
        self.restore(found[1], f"the checkpoint of step {found[0]} in {self.folder}")
        return True

    def checkpoint_age_s(self) -> float:
        """Since the newest checkpoint was written; infinite when there is none."""
        step = self.checkpoint_step()
        if self.folder is None or step is None:
            return float("inf")
        try:
            return max(0.0, time.time() - (self.folder / f"step-{step:012d}.ckpt").stat().st_mtime)
        except OSError:
            return float("inf")


def _plain_scheduler(scheduler: Any) -> dict[str, Any]:
    """A scheduler's state without the function that `guard_scheduler` put on the instance."""
    state: dict[str, Any] = dict(scheduler.state_dict())
    state.pop("step", None)
    return state
