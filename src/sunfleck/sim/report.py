"""PURE. What a simulation has shown, in the figures by which policies are compared.

Training is counted in seconds of single nodes: a sample by the time that one node needs for it. Where all jobs are of
one network, ratios of it are ratios of samples.

| key | formula |
|---|---|
| U | training / that of the same jobs, placed once and optimally on a pool that never changes and has the time-average
      number of idle nodes; as many jobs as may run at once |
| H | training / that of the oracle: an instantaneous optimum with true curves and no costs on the same trace |
| E | sum over jobs (samples / throughput on one node) / idle node-seconds: 1 = every idle second at perfect scaling |
| node_use | node-seconds held by jobs / idle node-seconds |
| lost_rescale, lost_reclaim | samples not trained for changes of size, decided or forced, / (samples + both) |
| profile_share | node-seconds held by jobs while they were being profiled / node-seconds held by jobs |
| plan_ms_p50, plan_ms_p99 | time this machine took for one plan; the only figures that vary between equal runs |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from .run import Outcome
from .trace import IdleTrace
from .workload import SimJob, static_rate


@dataclass(frozen=True)
class Figures:
    """One policy's row; see the module for the formulas."""

    policy: str
    U: float
    H: float | None
    """None when no oracle was run."""
    E: float
    samples: float
    node_use: float
    lost_rescale: float
    lost_reclaim: float
    rescales: int
    jobs_done: int
    plan_ms_p50: float
    plan_ms_p99: float
    profile_share: float
    handback_s_p99: float | None = None

    def as_dict(self) -> dict[str, object]:
        """With figures rounded to what they are worth."""
        row = asdict(self)
        return {k: _rounded(v) if isinstance(v, float) else v for k, v in row.items()}


def static_one_node_s(trace: IdleTrace, jobs: Sequence[SimJob], max_running: int | None) -> float:
    """The denominator of U: what the first `max_running` jobs (no limit: one a node) would train on a static
    pool of the same node-hours, in seconds of single nodes."""
    n_nodes = trace.mean_idle_nodes
    n_jobs = min(len(jobs), math.ceil(n_nodes) if max_running is None else max_running)
    return static_rate(jobs[:n_jobs], n_nodes, normalised=True) * trace.span_s


def figures(
    trace: IdleTrace,
    jobs: Sequence[SimJob],
    outcome: Outcome,
    max_running: int | None,
    oracle: Outcome | None = None,
) -> Figures:
    """The row of one simulation."""
    samples = math.fsum(outcome.samples.values())
    tally = outcome.tally
    potential = samples + tally.lost_rescale + tally.lost_reclaim
    static_s = static_one_node_s(trace, jobs, max_running)
    one_node_s = _one_node_s(jobs, outcome)
    best_s = _one_node_s(jobs, oracle) if oracle is not None else 0.0
    idle = trace.idle_node_s
    plan_ms = np.array(outcome.plan_wall_s or [0.0]) * 1e3
    return Figures(
        policy=outcome.policy,
        U=one_node_s / static_s if static_s > 0.0 else 0.0,
        H=one_node_s / best_s if best_s > 0.0 else None,
        E=one_node_s / idle if idle > 0.0 else 0.0,
        samples=samples,
        node_use=tally.used_node_s / idle if idle > 0.0 else 0.0,
        lost_rescale=tally.lost_rescale / potential if potential > 0.0 else 0.0,
        lost_reclaim=tally.lost_reclaim / potential if potential > 0.0 else 0.0,
        rescales=tally.n_rescales,
        jobs_done=len(tally.finished),
        plan_ms_p50=float(np.percentile(plan_ms, 50)),
        plan_ms_p99=float(np.percentile(plan_ms, 99)),
        profile_share=outcome.profiled_node_s / tally.used_node_s if tally.used_node_s > 0.0 else 0.0,
        handback_s_p99=float(np.percentile(outcome.handbacks_s, 99)) if outcome.handbacks_s else None,
    )


def _one_node_s(jobs: Sequence[SimJob], outcome: Outcome) -> float:
    """Seconds that single nodes would have needed for what was trained."""
    return math.fsum(outcome.samples[job.name] / job.curve.at(1) for job in jobs)


def table(rows: Sequence[Figures]) -> str:
    """The rows as plain text, best H (or U) first as given."""
    heads = ("policy", "U", "H", "E", "1e9 samples", "use", "lost r/c", "rescales", "done", "plan ms", "profiled")
    lines = [
        (
            row.policy,
            f"{row.U:.4f}",
            "-" if row.H is None else f"{row.H:.4f}",
            f"{row.E:.4f}",
            f"{row.samples / 1e9:.3f}",
            f"{row.node_use:.3f}",
            f"{row.lost_rescale:.3f}/{row.lost_reclaim:.3f}",
            str(row.rescales),
            str(row.jobs_done),
            f"{row.plan_ms_p50:.1f}/{row.plan_ms_p99:.1f}",
            f"{row.profile_share:.3f}",
        )
        for row in rows
    ]
    widths = [max(len(line[i]) for line in [heads, *lines]) for i in range(len(heads))]

    def joined(line: Sequence[str]) -> str:
        first, *others = (cell.rjust(w) for cell, w in zip(line, widths, strict=True))
        return "  ".join([first.strip().ljust(widths[0]), *others])

    return "\n".join(joined(line) for line in [heads, *lines])


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
