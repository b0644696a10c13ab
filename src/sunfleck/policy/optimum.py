"""PURE. `optimum`, the default policy: profile -> scaling curve -> exact optimum -> placement, with a reason for all.

Each plan maximises, exactly, the summed worth of all jobs over the horizon T_fwd (see `objective`) by the recursion in
`knapsack`; the job being profiled is held at its size, and while it is, no running job is stopped for its sake.
Between plans of equal worth the one with fewer changes is taken, and earlier arrivals come first. How many jobs run is
part of the optimum unless a limit is given. The horizon is forecast from how long the nodes will stay, unless given.

With other options the same class is FreeTrain (curves from users, starts for free, a limit on running jobs),
MalleTrain (the same with curves from its advisor), and the oracle (true curves, no costs): see `registry`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sunfleck.core.model import JobId, JobView, Plan, PlannedJob, Profiling, Snapshot

from . import allocation, knapsack, objective, placement, profiler, scaling
from .admission import admit
from .curves import CurveSource
from .explain import Explainer
from .forecast import Forecast


@dataclass(frozen=True, kw_only=True)
class OptimumOptions:
    t_fwd_s: float | None = None
    """Horizon: how long a decision is expected to stand, in seconds; None: forecast for every decision."""
    objective: str = "normalised"
    """`normalised` or `raw` throughput; either is multiplied by the job's weight."""
    max_running: int | None = None
    """At most this many jobs run at once, first come first served; None: as many as the optimum wants."""
    profiler: profiler.ProfilerOptions = field(default_factory=profiler.ProfilerOptions)
    review_s: float = 30.0
    """Ask again after this long while a running job's throughput at its size is not known."""
    fair_share: float = 0.0
    """0: the sum over all jobs counts, whoever they belong to. Towards 1: users of many jobs count less and less, until
    at 1 the product of the users' shares counts (proportional fairness)."""
    curves: CurveSource | None = None
    """Where curves come from; None: fitted to what was measured."""
    optimism: float = 0.0
    """Relative gain per doubling that is assumed beyond the largest measured size, so that it gets tried, on top of
    the optimism of a fit to few points. On the mixed jobs of the published replay 0.02 costs 0.5 % of the samples."""
    forecast: bool = True
    """Whether stays are forecast for placement and for nodes about to leave."""
    free_start: bool = False
    """Starting from 0 nodes is believed to cost nothing, as in the published model."""
    free_rescale: bool = False
    """Nothing is believed to cost anything."""


class Optimum:
    """See the module. Holds options only; `plan` depends on nothing but its snapshot."""

    def __init__(self, options: OptimumOptions | None = None, name: str = "optimum") -> None:
        self.name = name
        self.options = options or OptimumOptions()
        if self.options.objective not in ("normalised", "raw"):
            raise ValueError(f"objective is `normalised` or `raw`, not `{self.options.objective}`")
        if self.options.t_fwd_s is not None and not self.options.t_fwd_s > 0.0:
            raise ValueError(f"t_fwd_s must be above 0, not {self.options.t_fwd_s}")
        if not 0.0 <= self.options.fair_share <= 1.0:
            raise ValueError(f"fair_share is between 0 and 1, not {self.options.fair_share}")

    def curve(self, job: JobView) -> scaling.Curve:
        """The curve this policy believes in."""
        options = self.options
        return options.curves(job) if options.curves else scaling.fit(job.scales, optimism=options.optimism)

    def plan(self, snapshot: Snapshot) -> Plan:
        options, n_nodes = self.options, len(snapshot.nodes)
        admission = admit(snapshot, options.max_running, normalised=options.objective == "normalised")
        jobs = admission.jobs
        names = {job.job for job in jobs}
        advice = profiler.advise(snapshot, options.profiler, names)
        forecast = Forecast(snapshot) if options.forecast else None
        run = advice.profiling
        worths = self.worths(snapshot, jobs, run, forecast)
        try:
            found = self._allocate(snapshot, jobs, worths)
        except knapsack.Infeasible:
            # Jobs that may not be stopped hold more than is there without the profiled job's share: no profile now.
            run, advice = None, profiler.Advice(None, options.review_s)
            worths = self.worths(snapshot, jobs, None, forecast)
            found = self._allocate(snapshot, jobs, worths)
        counts = {job.job: n for job, n in zip(jobs, found.sizes, strict=True)}
        stay_s = forecast.stay_s if forecast else None
        nodes = placement.place(snapshot, counts, stay_s, found.kinds)
        explainer = Explainer(jobs, worths, found.sizes, n_nodes, run)
        # Jobs in line behind those are not listed: `waits` speaks for them all.
        planned = tuple(
            PlannedJob(
                job=job.job,
                nodes=nodes[job.job],
                reason=explainer.reason(job) if job.job in names else explainer.too_small(job) or admission.waits,
            )
            for job in snapshot.jobs
            if job.job in names or job.nodes or job.spec.min_nodes > n_nodes
        )
        return Plan(
            jobs=planned,
            objective=found.objective,
            bound=found.bound,
            gap=found.gap,
            profiling=run,
            review_after_s=self._review_s(advice, jobs, counts),
            solver=found.solver,
            waits=admission.waits,
        )

    def worths(
        self, snapshot: Snapshot, jobs: Sequence[JobView], run: Profiling | None, forecast: Forecast | None
    ) -> list[objective.Worth]:
        """What each size is worth to each job, as this policy sees it."""
        options, n_nodes = self.options, len(snapshot.nodes)
        t_fwd_s = options.t_fwd_s or (forecast.horizon_s if forecast else 60.0)
        fragile = _fragile(snapshot, jobs, forecast, t_fwd_s) if forecast else {}
        return [
            objective.worth(
                job,
                self.curve(job),
                n_nodes,
                t_fwd_s,
                normalised=options.objective == "normalised",
                may_stop=run is None or len(job.nodes) < job.spec.min_nodes,
                only=run.n_nodes if run is not None and run.job == job.job else None,
                free_start=options.free_start,
                free_rescale=options.free_rescale,
                fragile=fragile.get(job.job),
                now_s=snapshot.now_s,
            )
            for job in jobs
        ]

    def _allocate(
        self, snapshot: Snapshot, jobs: Sequence[JobView], worths: Sequence[objective.Worth]
    ) -> allocation.Found:
        return allocation.allocate(snapshot, jobs, [w.table for w in worths], self.options.fair_share)

    def _review_s(self, advice: profiler.Advice, jobs: Sequence[JobView], counts: Mapping[JobId, int]) -> float | None:
        if advice.profiling is not None or self.options.profiler.n_scales <= 0:
            return advice.review_after_s
        known = all(
            profiler.settled(profiler.stats_at(job, counts[job.job]), self.options.profiler)
            for job in jobs
            if counts[job.job] > 0
        )
        times = [t for t in (advice.review_after_s, None if known else self.options.review_s) if t is not None]
        return min(times, default=None)


def _fragile(
    snapshot: Snapshot, jobs: Sequence[JobView], forecast: Forecast, t_fwd_s: float
) -> dict[JobId, objective.Fragile]:
    """For each job, how many of its nodes and which share of all others leave within the horizon, as announced."""
    leaving = {n.name: forecast.announced_s(n.name) for n in snapshot.nodes if n.leaves_s is not None}
    leaving = {name: in_s for name, in_s in leaving.items() if in_s < t_fwd_s}
    if not leaving:
        return {}
    mean_s = sum(leaving.values()) / len(leaving)
    result = {}
    for job in jobs:
        held = sum(1 for name in job.nodes if name in leaving)
        others = len(snapshot.nodes) - len(job.nodes)
        share = (len(leaving) - held) / others if others else 0.0
        result[job.job] = objective.Fragile(held=held, share=share, leaves_in_s=mean_s)
    return result
