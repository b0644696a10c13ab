"""PURE, given a seed. Simulated workers as the published replay of FreeTrain (CCGrid 2023) keeps their books."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sunfleck.cluster.base import Emit
from sunfleck.core.events import JobFinished, WorkersLeft
from sunfleck.core.model import JobSpec

from .clock import VirtualClock
from .executor import Run, SimExecutor
from .workload import SimJob


@dataclass
class _Base:
    """What a job had when an instant's decision first reached it, and what it has been charged for it so far."""

    time_s: float
    n_nodes: int
    rate: float
    cost_s: float = 0.0


class PublishedExecutor(SimExecutor):
    """The books of the published replay (FreeTrain's, CCGrid 2023): nothing takes time, costs are taken off.

    At every instant of the trace each job gets dt * P(n), less the cost of the last decision: P at the size that it had
    until then (before it lost nodes, if it did) times R_up or R_dw. A job that lost nodes pays R_dw once more for that,
    at the same rate. Completions are noticed at instants of the trace only, and the overshoot is clipped. A start from
    nothing is free."""

    def __init__(
        self, jobs: Iterable[SimJob], clock: VirtualClock, emit: Emit, *, seed: int = 0, reports: bool = False
    ) -> None:
        super().__init__(jobs, clock, emit, seed=seed, reports=reports, handback_s=0.0)
        self._n_reports: dict[tuple[str, int], int] = {}
        self._active: dict[str, Run] = {}
        self._bases: dict[str, _Base] = {}
        self._before_loss: dict[str, tuple[float, float]] = {}

    def _rate_before(self, run: Run) -> float:
        """Its throughput until this instant, before nodes were lost at it."""
        when, rate = self._before_loss.get(run.job.name, (-1.0, 0.0))
        return rate if when == self._clock.now() else run.rate

    def _charge(self, run: Run, cost_s: float, base: _Base) -> None:
        if cost_s:
            self.tally.n_rescales += 1 if cost_s > 0.0 else -1
            self.tally.lost_rescale += cost_s * base.rate
            run.done -= cost_s * base.rate

    def rescale(self, job: str, spec: JobSpec, nodes: Sequence[str], grace_s: float) -> None:
        run = self._runs[job]
        if run.over:
            return
        self._account(run)
        new = frozenset(nodes)
        # One decision may reach a job in parts (nodes that another has to leave first): it is charged as one.
        base = self._bases.get(job)
        if base is None or base.time_s != self._clock.now():
            base = self._bases[job] = _Base(self._clock.now(), len(run.nodes), self._rate_before(run))
        else:
            self._charge(run, -base.cost_s, base)
        base.cost_s = 0.0
        if base.n_nodes and len(new) != base.n_nodes:
            costs = run.job.costs
            base.cost_s = costs.rescale_up_s if len(new) > base.n_nodes else costs.rescale_down_s
            self._charge(run, base.cost_s, base)
        leaving = run.nodes - new
        self._hold(run, new)
        if new:
            self._active[job] = run
        run.rate = run.job.curve.at(len(new))
        if leaving:
            self._emit(WorkersLeft(job=job, nodes=tuple(sorted(leaving)), planned=True))
        if new:
            run.stalled_s = None
            self._form(run, self._clock.now(), base.cost_s or None)
        else:
            run.training = frozenset()

    def nodes_vanished(self, nodes: Sequence[str]) -> None:
        gone = frozenset(nodes)
        for run in self._active.values():
            if not run.nodes & gone:
                continue
            self._account(run)
            self._before_loss[run.job.name] = (self._clock.now(), run.rate)
            cost = run.job.costs.rescale_down_s * run.rate
            run.done -= cost
            self.tally.lost_reclaim += cost
            self._hold(run, run.nodes - gone)
            run.training = run.nodes
            run.rate = run.job.curve.at(len(run.nodes))
            self._bases.pop(run.job.name, None)

    def instant(self) -> None:
        """An instant of the trace: see who has finished since the last one."""
        done = []
        for run in self._active.values():
            dt = self._clock.now() - run.since_s
            self._account(run)
            if run.done >= run.job.samples:
                done.append(run)
            elif self._reports and dt > 0.0 and run.rate:
                self._measure(run, dt)
        for run in done:
            run.done = run.job.samples
            del self._active[run.job.name]
            self._over(run)
            self._emit(JobFinished(job=run.job.name))

    def _measure(self, run: Run, dt_s: float) -> None:
        """Report the throughput of the time since the last instant: the 1st, 2nd, 4th, 8th ... at each size."""
        key = (run.job.name, len(run.training))
        n = self._n_reports[key] = self._n_reports.get(key, 0) + 1
        if n & (n - 1) == 0:
            self._progress(run, dt_s, run.rate)
