"""PURE. `paper-milp`: the allocation problem as published, with a binary for every (job, node), solved by HiGHS.

    max  sum_j [ T_fwd O_j - O_j(C_j) (R_up_j u_j + R_dw_j d_j) ]
    s.t. sum_j x_ji <= 1 for every node i;  n_j = sum_i x_ji;  n_j = 0 or a size the job may take
         O_j = sum_p w_jp O_jp,  n_j = sum_p w_jp N_jp,  sum_p w_jp = 1, at most two adjacent w_jp > 0 (SOS2)
         u_j = 0 forbids to add a node, d_j = 0 to drop one, u_j + d_j <= 1 (no migration)

(FreeTrain, CCGrid 2023; MalleTrain, ICPE 2024.) HiGHS has no SOS2 sets: adjacency is a binary per segment. Starting is
free, nodes are told apart although they are interchangeable, which is why the same optimum takes `knapsack`
milliseconds and this model minutes. Bounded in time: the incumbent is used, the gap reported, what runs is kept.

Needs the optional package highspy (`pip install sunfleck[milp]`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sunfleck.core.model import JobSpec, JobView, NodeName, Plan, PlannedJob, Snapshot

from . import objective, scaling
from .admission import admit
from .curves import CurveSource
from .milp import INFINITY, Builder, relative_gap


@dataclass(frozen=True, kw_only=True)
class PaperMilpOptions:
    t_fwd_s: float = 120.0
    objective: str = "normalised"
    max_running: int | None = 10
    time_limit_s: float = 10.0
    """Of one plan, wall-clock; HiGHS looks at it only now and then."""
    curves: CurveSource | None = None
    """Where curves come from; None: fitted to what was measured."""


class PaperMilp:
    """See the module."""

    name = "paper-milp"

    def __init__(self, options: PaperMilpOptions | None = None) -> None:
        self.options = options or PaperMilpOptions()

    def plan(self, snapshot: Snapshot) -> Plan:
        options = self.options
        admission = admit(snapshot, options.max_running, normalised=options.objective == "normalised")
        jobs = [job for job in admission.jobs if job.spec.sizes(len(snapshot.nodes))]
        given: dict[str, tuple[NodeName, ...]] = {}
        worth = bound = 0.0
        if jobs and snapshot.nodes:
            given, worth, bound = _solve(snapshot, jobs, options)
        gap = relative_gap(worth, bound)
        planned = []
        for job in snapshot.jobs:
            nodes = given.get(job.job, ())
            if nodes:
                reason = f"{len(nodes)} of {len(snapshot.nodes)} nodes by the published model, gap {gap:.1%}"
            elif job.spec.min_nodes > len(snapshot.nodes):
                reason = f"queued: min_nodes {job.spec.min_nodes} exceeds the {len(snapshot.nodes)} nodes there"
            elif job.job in given or job.nodes:
                reason = "queued: all nodes are worth more elsewhere"
            else:
                continue
            planned.append(PlannedJob(job=job.job, nodes=nodes, reason=reason))
        return Plan(
            jobs=tuple(planned),
            objective=worth,
            bound=max(bound, worth),
            gap=gap,
            solver="highs",
            waits=admission.waits,
        )


def curve_points(spec: JobSpec, n_nodes: int) -> list[int]:
    """Sizes at which the piecewise linear curve has its points: all up to 8, then doubling, and the ends."""
    sizes = spec.sizes(n_nodes)
    picked = [n for i, n in enumerate(sizes) if i < 8 or n in (sizes[-1],) or (n & (n - 1)) == 0]
    return [0, *picked]


def _solve(
    snapshot: Snapshot, jobs: Sequence[JobView], options: PaperMilpOptions
) -> tuple[dict[str, tuple[NodeName, ...]], float, float]:
    """Nodes of each job, the worth found and its upper bound (first nodes' worth times seconds)."""
    n_nodes = len(snapshot.nodes)
    names = [node.name for node in snapshot.nodes]
    build = Builder()
    x = [[build.column(integer=True) for _ in names] for _ in jobs]
    trivial = 0.0
    ends: list[tuple[np.ndarray, float, float]] = []
    for j, job in enumerate(jobs):
        spec, held = job.spec, set(job.nodes)
        curve = options.curves(job) if options.curves else scaling.fit(job.scales)
        n_max = min(spec.max_nodes, n_nodes)
        rates = objective.rates_of(spec, curve, max(n_max, len(held), 1), normalised=options.objective == "normalised")
        points = curve_points(spec, n_nodes)
        weights = [build.column(options.t_fwd_s * float(rates[n])) for n in points]
        trivial += options.t_fwd_s * float(rates[points].max())
        segments = [build.column(integer=True) for _ in points[1:]]
        count = [(column, 1.0) for column in x[j]]
        build.row([(w, 1.0) for w in weights], 1.0, 1.0)
        build.row([(s, 1.0) for s in segments], 1.0, 1.0)
        for p, w in enumerate(weights):
            around = segments[max(0, p - 1) : p + 1]
            build.row([(w, 1.0), *((s, -1.0) for s in around)], -INFINITY, 0.0)
        build.row([*count, *((w, -float(n)) for w, n in zip(weights, points, strict=True))], 0.0, 0.0)
        runs = build.column(integer=True)
        steps = build.column(upper=float((n_max - spec.min_nodes) // spec.multiple), integer=True)
        build.row([*count, (runs, -float(spec.min_nodes)), (steps, -float(spec.multiple))], 0.0, 0.0)
        build.row([(steps, 1.0), (runs, -float(n_nodes))], -INFINITY, 0.0)
        if held:
            lost = float(rates[len(held)]) if len(held) >= spec.min_nodes else 0.0
            up_s, down_s = job.costs.rescale_up_s.value_s, job.costs.rescale_down_s.value_s
            up = build.column(-lost * up_s, integer=True)
            down = build.column(-lost * down_s, integer=True)
            build.row([(up, 1.0), (down, 1.0)], -INFINITY, 1.0)
            own = [x[j][i] for i, name in enumerate(names) if name in held]
            other = [x[j][i] for i, name in enumerate(names) if name not in held]
            if other:
                build.row([*((c, 1.0) for c in other), (up, -float(len(other)))], -INFINITY, 0.0)
            build.row([*((c, 1.0) for c in own), (down, float(len(own)))], float(len(own)), INFINITY)
            ends.append((rates, lost, down_s))
        else:
            ends.append((rates, 0.0, 0.0))
    for i in range(n_nodes):
        build.row([(x[j][i], 1.0) for j in range(len(jobs))], -INFINITY, 1.0)

    # What runs now (a job that lost too many nodes to run stops) is the first incumbent; HiGHS completes the rest.
    present = {job.job: job.nodes if len(job.nodes) in job.spec.sizes(n_nodes) else () for job in jobs}
    columns = [c for row in x for c in row]
    start = [float(name in present[job.job]) for job in jobs for name in names]
    found, worth, bound = build.maximise(columns, start, time_limit_s=options.time_limit_s)
    bound = min(bound, trivial)
    kept = sum(
        options.t_fwd_s * float(rates[len(present[job.job])]) - (0.0 if present[job.job] else lost * down_s)
        for job, (rates, lost, down_s) in zip(jobs, ends, strict=True)
    )
    if found is None or worth < kept:
        return present, kept, bound
    given = {
        job.job: tuple(sorted(name for i, name in enumerate(names) if found[x[j][i]] > 0.5))
        for j, job in enumerate(jobs)
    }
    return given, worth, bound
