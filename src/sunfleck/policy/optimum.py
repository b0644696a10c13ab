"""PURE. `optimum`, the default policy: profile -> scaling curve -> exact optimum -> placement, with a reason for all.

Each plan maximises, exactly, the summed worth of all jobs over the horizon T_fwd (see `objective`) by the recursion in
`knapsack`; the job being profiled is held at its size, and while it is, no running job is stopped for its sake.
Between plans of equal worth the one with fewer changes is taken, and earlier arrivals come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sunfleck.core.model import JobId, JobView, Plan, PlannedJob, Profiling, Snapshot

from . import knapsack, objective, placement, profiler, scaling
from .explain import Explainer


@dataclass(frozen=True, kw_only=True)
class OptimumOptions:
    t_fwd_s: float = 60.0
    """Horizon: how long a decision is expected to stand, in seconds."""
    objective: str = "normalised"
    """`normalised` or `raw` throughput; either is multiplied by the job's weight."""
    max_running: int | None = None
    """At most this many jobs run at once, first come first served; None: as many as the optimum wants."""
    profiler: profiler.ProfilerOptions = field(default_factory=profiler.ProfilerOptions)
    review_s: float = 30.0
    """Ask again after this long while a running job's throughput at its size is not known."""


class Optimum:
    """See the module. Holds options only; `plan` depends on nothing but its snapshot."""

    name = "optimum"

    def __init__(self, options: OptimumOptions | None = None) -> None:
        self.options = options or OptimumOptions()
        if self.options.objective not in ("normalised", "raw"):
            raise ValueError(f"objective is `normalised` or `raw`, not `{self.options.objective}`")
        if not self.options.t_fwd_s > 0.0:
            raise ValueError(f"t_fwd_s must be above 0, not {self.options.t_fwd_s}")

    def curve(self, job: JobView) -> scaling.Curve:
        """The curve this policy believes in."""
        return scaling.fit(job.scales)

    def plan(self, snapshot: Snapshot) -> Plan:
        options, n_nodes = self.options, len(snapshot.nodes)
        admitted = self._admitted(snapshot)
        names = {job.job for job in admitted}
        advice = profiler.advise(snapshot, options.profiler, names)
        run = advice.profiling
        worths = [self._worth(job, n_nodes, run) for job in admitted]
        try:
            allocation = knapsack.solve([w.table for w in worths], n_nodes)
        except knapsack.Infeasible:
            # Jobs that may not be stopped hold more than is there without the profiled job's share: no profile now.
            run, advice = None, profiler.Advice(None, options.review_s)
            worths = [self._worth(job, n_nodes, None) for job in admitted]
            allocation = knapsack.solve([w.table for w in worths], n_nodes)
        counts = {job.job: n for job, n in zip(admitted, allocation.sizes, strict=True)}
        nodes = placement.place(snapshot, counts)
        explainer = Explainer(admitted, worths, allocation.sizes, n_nodes, run)
        planned = tuple(
            PlannedJob(
                job=job.job,
                nodes=nodes[job.job],
                reason=explainer.reason(job) if job.job in names else self._waits(len(admitted)),
            )
            for job in snapshot.jobs
        )
        return Plan(
            jobs=planned,
            objective=allocation.objective,
            bound=allocation.bound,
            gap=allocation.gap,
            profiling=run,
            review_after_s=self._review_s(advice, admitted, counts),
            solver=allocation.solver,
        )

    def _admitted(self, snapshot: Snapshot) -> list[JobView]:
        """Jobs that may run: all, or the running ones and then the first to arrive up to `max_running`."""
        jobs, cap = list(snapshot.jobs), self.options.max_running
        if cap is None or len(jobs) <= cap:
            return jobs
        running = {job.job for job in [job for job in jobs if job.nodes][:cap]}
        waiting = [job.job for job in jobs if job.job not in running]
        names = running | set(waiting[: max(0, cap - len(running))])
        return [job for job in jobs if job.job in names]

    def _waits(self, n_admitted: int) -> str:
        return f"queued: {n_admitted} jobs run already, the limit is {self.options.max_running}"

    def _worth(self, job: JobView, n_nodes: int, run: Profiling | None) -> objective.Worth:
        profiled = run is not None and run.job == job.job
        runs = len(job.nodes) >= job.spec.min_nodes
        return objective.worth(
            job,
            self.curve(job),
            n_nodes,
            self.options.t_fwd_s,
            normalised=self.options.objective == "normalised",
            may_stop=run is None or not runs,
            only=run.n_nodes if run is not None and profiled else None,
        )

    def _review_s(
        self, advice: profiler.Advice, admitted: Sequence[JobView], counts: dict[JobId, int]
    ) -> float | None:
        if advice.profiling is not None:
            return advice.review_after_s
        known = all(
            profiler.settled(profiler.stats_at(job, counts[job.job]), self.options.profiler)
            for job in admitted
            if counts[job.job] > 0
        )
        times = [t for t in (advice.review_after_s, None if known else self.options.review_s) if t is not None]
        return min(times, default=None)
