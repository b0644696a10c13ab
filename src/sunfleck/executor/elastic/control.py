"""The control sum of a step: how many samples, which ones, who knows of a new round, what was reported.

One small all-reduce, started as soon as the last gradients are on their way, so that it overlaps with them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from .comm import CommFailed
from .data import join_hash, split_hash
from .lineage import Lineage
from .rounds import Rounds
from .wrap import Undo

N_METRICS = 16
"""Metrics that are averaged over all ranks; of more, only rank 0's own values count."""
_N_AHEAD = 4
_AT_COUNT = _N_AHEAD
_AT_HASH = _AT_COUNT + 1
_AT_METRICS = _AT_HASH + 3
_SIZE = _AT_METRICS + 2 * N_METRICS


@dataclass
class StepState:
    """An open step: positions [start, stop) of the epoch, of which this rank has n_local."""

    start: int
    stop: int
    n_local: int
    index_hash: int
    undo: Undo | None = None
    reported: dict[str, float] = field(default_factory=dict)
    vector: Any = None
    work: Any = None
    sent: dict[str, tuple[float, float]] = field(default_factory=dict)
    buffers: Any = None
    buffer_work: Any = None
    decided: bool = False
    applied: bool = False
    """Whether an optimizer stepped (or tried to) in this step; otherwise its gradients are being accumulated."""
    n_committed: int = 0
    hash_committed: int = 0
    metrics_committed: dict[str, tuple[float, float]] = field(default_factory=dict)


class Control:
    """`agreed`: how many rounds ahead of the one in force every rank has been told of, by the last control sum."""

    def __init__(self, rounds: Rounds, lineage: Lineage) -> None:
        self._rounds = rounds
        self._lineage = lineage
        self._outbox: dict[str, tuple[float, float]] = {}
        self.agreed = 0

    def begin(self, step: StepState, *, buffers: bool) -> None:
        """Start the control sum of this step, once. Every rank gets here at the same place among its collectives."""
        if step.vector is not None:
            return
        rounds = self._rounds
        rounds.poll()
        vector = torch.zeros(_SIZE, dtype=torch.float64)
        vector[: min(_N_AHEAD, rounds.ahead())] = 1.0
        vector[_AT_COUNT] = step.n_local
        vector[_AT_HASH : _AT_HASH + 3] = torch.tensor(split_hash(step.index_hash), dtype=torch.float64)
        step.sent, self._outbox = self._outbox, {}
        for name, (total, weight) in step.sent.items():
            slot = self._slot(name)
            if slot is not None:
                vector[_AT_METRICS + 2 * slot] = total
                vector[_AT_METRICS + 2 * slot + 1] = weight
        step.vector = vector
        try:
            step.work = rounds.comm.all_reduce(vector)
            if buffers:
                self._begin_buffers(step)
        except CommFailed:
            return

    def decide(self, step: StepState, *, buffers: bool) -> bool:
        """Whether everything of this step has succeeded here so far. Waits for the control sum the first time."""
        comm = self._rounds.comm
        if not step.decided:
            self.begin(step, buffers=buffers)
            step.decided = True
            try:
                comm.wait(step.work)
                comm.wait(step.buffer_work)
                if comm.error is None:
                    self._read(step)
                    self._end_buffers(step)
            except CommFailed:
                pass
        if comm.error is not None:
            self._put_back(step)
            return False
        return True

    def alone(self, step: StepState) -> None:
        """The control sum of a world of one."""
        step.n_committed, step.hash_committed = step.n_local, step.index_hash
        step.metrics_committed, self._outbox = self._outbox, {}

    def average_buffers(self, step: StepState) -> bool:
        """With several models: all forward passes are over only when the step ends."""
        try:
            self._begin_buffers(step)
            self._rounds.comm.wait(step.buffer_work)
            self._end_buffers(step)
        except CommFailed:
            return False
        return self._rounds.comm.error is None

    def keep_reported(self, step: StepState) -> None:
        """What the user reported in a committed step goes out with the next control sum."""
        for name, value in step.reported.items():
            self._lineage_slot(name)
            total, weight = self._outbox.get(name, (0.0, 0.0))
            n = max(step.n_local, 0)
            self._outbox[name] = (total + value * n, weight + n)

    # -- parts -----------------------------------------------------------------------------------------------------

    def _read(self, step: StepState) -> None:
        vector, world = step.vector.tolist(), self._rounds.comm.world
        self.agreed = sum(1 for count in vector[:_N_AHEAD] if count == world)
        step.n_committed = int(vector[_AT_COUNT])
        step.hash_committed = join_hash((vector[_AT_HASH], vector[_AT_HASH + 1], vector[_AT_HASH + 2]))
        for slot, name in enumerate(self._lineage.metric_names[:N_METRICS]):
            total, weight = vector[_AT_METRICS + 2 * slot : _AT_METRICS + 2 * slot + 2]
            if weight > 0:
                step.metrics_committed[name] = (total, weight)
        for name in self._lineage.metric_names[N_METRICS:]:
            if name in step.sent:
                step.metrics_committed[name] = step.sent[name]

    def _put_back(self, step: StepState) -> None:
        for name, (total, weight) in step.sent.items():
            held_total, held_weight = self._outbox.get(name, (0.0, 0.0))
            self._outbox[name] = (held_total + total, held_weight + weight)
        step.sent = {}

    def _lineage_slot(self, name: str) -> None:
        if name not in self._lineage.metric_names:
            self._lineage.metric_names.append(name)

    def _slot(self, name: str) -> int | None:
        slot = self._lineage.metric_names.index(name)
        return slot if slot < N_METRICS else None

    def _begin_buffers(self, step: StepState) -> None:
        """Running statistics (BatchNorm) become the weighted mean over the ranks, so that every rank has the same."""
        floating = [b for b in self._lineage.buffers() if b.is_floating_point()]
        if not floating:
            return
        share = step.n_local / (step.stop - step.start)
        flat = torch.cat([b.detach().reshape(-1).to("cpu", torch.float32) for b in floating]).mul_(share)
        if share == 0:
            flat.zero_()
        step.buffers = (floating, flat)
        step.buffer_work = self._rounds.comm.all_reduce(flat)

    def _end_buffers(self, step: StepState) -> None:
        if step.buffers is None:
            return
        floating, flat = step.buffers
        at = 0
        with torch.no_grad():
            for buffer in floating:
                buffer.copy_(flat[at : at + buffer.numel()].view_as(buffer))
                at += buffer.numel()
        step.buffers = None
