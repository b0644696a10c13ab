"""When a run is saved: now and then on rank 0, behind its back; and at once, when the last worker leaves."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from sunfleck.executor.launch.wire import CheckpointWritten

from . import checkpoint
from .lineage import Lineage
from .rounds import Rounds


class Saver:
    def __init__(self, rounds: Rounds, lineage: Lineage, checkpoint_s: float) -> None:
        self._rounds = rounds
        self._lineage = lineage
        self._checkpoint_s = checkpoint_s
        self._writer = checkpoint.Writer(lineage.folder) if lineage.folder is not None else None
        self._saved_s = time.monotonic()

    def take_over(self) -> None:
        """This worker has become rank 0: the next checkpoint is due when the last one is old, whoever wrote it; but not
        before the new round has trained a while."""
        self._saved_s = time.monotonic() - min(self._lineage.checkpoint_age_s(), self._checkpoint_s * 0.5)

    def save_sometimes(self, report_now: Callable[[], None]) -> None:
        """At a boundary: start a checkpoint if one is due, and tell what became of earlier ones. What it will hold is
        reported before, so that no ledger entry behind a checkpoint can be missing."""
        if self._writer is None or self._rounds.comm.rank != 0:
            return
        for step, path, error in self._writer.finished():
            if path is not None:
                self._rounds.say(CheckpointWritten(step=step, path=str(path)))
            else:
                print(f"sunfleck: the checkpoint of step {step} failed: {error}", file=sys.stderr, flush=True)
        due = time.monotonic() - self._saved_s >= self._checkpoint_s
        if (due or self._rounds.save_wanted) and not self._writer.busy:
            self._rounds.save_wanted = False
            self._saved_s = time.monotonic()
            report_now()
            self._writer.start(self._lineage.place.step, self._lineage.capture(copy=True))

    def save_now(self) -> None:
        """Save and wait for it. A failure is told and does not stop the worker from leaving."""
        if self._lineage.folder is None or not self._lineage.exists:
            return
        if self._writer is not None:
            self._writer.wait()
        step = self._lineage.place.step
        try:
            path = checkpoint.save(self._lineage.folder, step, self._lineage.capture(copy=False))
        except Exception as error:
            print(f"sunfleck: the checkpoint of step {step} failed: {error}", file=sys.stderr, flush=True)
            return
        self._rounds.say(CheckpointWritten(step=step, path=str(path)))
