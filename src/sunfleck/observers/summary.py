"""PURE. The numbers of a run. Every one is defined here, and in docs/journal.md in words.

At an instant, a node is *usable* when it is in the pool and has not been reclaimed. *Offered* are as many of the
usable nodes as the unfinished jobs could hold together, given the sizes each of them may take; none while the pool
is going down. *Used* are the usable nodes that are members of a job's formed round, at most as many as are offered.
Both are integrated over time; the time in which a job starts or stands still in a rescale is offered either way.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from sunfleck.core.events import DatasetDescribed, SamplesCommitted
from sunfleck.core.model import JobId, JobSpec, Target

from .timelines import JobTimeline, NodeTimeline
from .views import PoolView

Verify = Callable[[list[SamplesCommitted], DatasetDescribed], tuple[int, int]]
"""Checks a job's ledger: (samples lost, samples trained twice) in what is committed so far."""


class JobSummary(Struct, frozen=True, kw_only=True):
    name: str
    samples: int
    metric: float | None
    """Last reported value of the target's metric; of `loss` where there is no target."""
    metric_name: str
    target: float | None
    reached: bool | None
    """Whether the last reported value meets the target; None without a target."""
    rescales: int
    stall_s_p50: float | None
    stall_s_p99: float | None
    samples_lost: int | None
    """None when the ledger was not checked or the job described no dataset."""
    samples_repeated: int | None
    restarts: int
    phase: str
    node_seconds_used: float
    """Node-seconds as a member of its round, reclaimed nodes included until they left."""


class Summary(Struct, frozen=True, kw_only=True):
    """The machine-readable line of a run. Quantities without data are null."""

    node_seconds_offered: float
    node_seconds_used: float
    samples: int
    jobs: tuple[JobSummary, ...]
    reclaims: int
    """Nodes the cluster took back, each time it did."""
    losses: int
    """Nodes that went without being handed back."""
    handback_s_p50: float | None
    handback_s_p99: float | None
    plan_solve_s_p50: float | None
    elapsed_s: float

    @property
    def used_fraction(self) -> float | None:
        """Used / offered; None when nothing was offered."""
        return self.node_seconds_used / self.node_seconds_offered if self.node_seconds_offered > 0 else None


def summary(view: PoolView, targets: Mapping[str, Target], now_s: float, verify: Verify | None = None) -> Summary:
    """Numbers of a pool up to `now_s`, at which whatever still lasts is cut. `targets`, by job id or job name, come
    before what the jobs themselves ask for."""
    offered, used = node_seconds(view, now_s)
    held_s = held_seconds(view, now_s)
    jobs = tuple(
        summarise_job(
            job, targets.get(job.job) or targets.get(job.spec.name) or job.spec.target, verify, held_s[job.job]
        )
        for job in view.jobs.values()
    )
    stays = [stay for node in view.nodes.values() for stay in node.presences]
    handbacks = view.handbacks_s()
    return Summary(
        node_seconds_offered=round(offered, 3),
        node_seconds_used=round(used, 3),
        samples=sum(job.samples for job in jobs),
        jobs=jobs,
        reclaims=sum(1 for stay in stays if stay.reclaimed_s is not None),
        losses=sum(1 for stay in stays if stay.lost),
        handback_s_p50=percentile(handbacks, 50),
        handback_s_p99=percentile(handbacks, 99),
        plan_solve_s_p50=percentile([solve.solve_s for solve in view.solves], 50),
        elapsed_s=round(now_s - view.first_s, 3) if view.first_s is not None else 0.0,
    )


def summarise_job(job: JobTimeline, target: Target | None, verify: Verify | None, held_s: float) -> JobSummary:
    """One job's numbers; `held_s`: its node-seconds."""
    metric_name = target.metric if target is not None else "loss"
    metric = job.metric(metric_name)
    checked = verify(job.spans, job.dataset) if verify is not None and job.dataset is not None else None
    return JobSummary(
        name=job.spec.name,
        samples=job.samples,
        metric=metric,
        metric_name=metric_name,
        target=None if target is None else target.value,
        reached=None if target is None else target.reached(metric),
        rescales=job.n_rescales,
        stall_s_p50=percentile(job.stalls_s, 50),
        stall_s_p99=percentile(job.stalls_s, 99),
        samples_lost=None if checked is None else checked[0],
        samples_repeated=None if checked is None else checked[1],
        restarts=job.n_restarts,
        phase=job.phase.value,
        node_seconds_used=round(held_s, 3),
    )


def held_seconds(view: PoolView, now_s: float) -> defaultdict[JobId, float]:
    """Node-seconds each job held up to `now_s`; 0 for a job that held none."""
    held: defaultdict[JobId, float] = defaultdict(float)
    for node in view.nodes.values():
        for hold in node.holds:
            end_s = now_s if hold.end_s is None else min(hold.end_s, now_s)
            held[hold.job] += max(0.0, end_s - hold.start_s)
    return held


def percentile(values: Sequence[float], percent: int) -> float | None:
    """Linear interpolation between order statistics (numpy's default); None for no values."""
    if len(values) < 2:
        return round(values[0], 6) if values else None
    return round(statistics.quantiles(values, n=100, method="inclusive")[percent - 1], 6)


def node_seconds(view: PoolView, now_s: float) -> tuple[float, float]:
    """(offered, used) up to `now_s`: one sweep over the instants at which something changes."""
    changes = _changes(view, now_s)
    usable = used = spells = 0
    unfinished: Counter[tuple[int, int, int]] = Counter()
    offered_s = used_s = 0.0
    before_s = 0.0
    n_offered = 0
    for time_s, d_usable, d_used, d_spells, job, d_job in changes:
        if time_s > before_s:
            offered_s += (time_s - before_s) * n_offered
            used_s += (time_s - before_s) * min(used, n_offered)
            before_s = time_s
        usable += d_usable
        used += d_used
        spells += d_spells
        if job is not None:
            unfinished[_sizes_key(job)] += d_job
        n_offered = most_held(unfinished, usable) if spells > 0 else 0
    return offered_s, used_s


def most_held(unfinished: Mapping[tuple[int, int, int], int], n_nodes: int) -> int:
    """The most of `n_nodes` that jobs can hold together: each takes none, or lo, lo + step, ... up to hi nodes.

    `unfinished` counts jobs by (lo, hi, step). Bit k of `reachable` says whether k nodes in all can be held. When
    every size down to none is allowed, that is min(n_nodes, sum of hi).
    """
    if n_nodes <= 0:
        return 0
    if all(lo <= 1 and step == 1 for lo, _, step in unfinished):
        return min(n_nodes, sum(hi * n_jobs for (_, hi, _), n_jobs in unfinished.items()))
    within = (1 << (n_nodes + 1)) - 1
    reachable = 1
    for (lo, hi, step), n_jobs in unfinished.items():
        for _ in range(n_jobs):
            if reachable >> n_nodes & 1:
                return n_nodes
            grown = reachable
            for size in range(lo, min(hi, n_nodes) + 1, step):
                grown |= reachable << size
            if grown & within == reachable:
                break
            reachable = grown & within
    return reachable.bit_length() - 1


def _sizes_key(spec: JobSpec) -> tuple[int, int, int]:
    return spec.min_nodes, spec.max_nodes, spec.multiple


Change = tuple[float, int, int, int, JobSpec | None, int]


def _changes(view: PoolView, now_s: float) -> list[Change]:
    """(time, usable +-1, used +-1, open +-1, job, unfinished +-1) in order of time, all within (.., now_s]."""
    changes: list[Change] = []

    def during(start_s: float, end_s: float | None, d: tuple[int, int, int], job: JobSpec | None = None) -> None:
        end_s = now_s if end_s is None else min(end_s, now_s)
        if end_s > start_s:
            n_jobs = 0 if job is None else 1
            changes.append((start_s, *d, job, n_jobs))
            changes.append((end_s, -d[0], -d[1], -d[2], job, -n_jobs))

    for node in view.nodes.values():
        for stay in node.presences:
            during(stay.start_s, stay.usable_until_s, (1, 0, 0))
        for start_s, end_s in used_intervals(node, now_s):
            during(start_s, end_s, (0, 1, 0))
    for start_s, spell_end_s in view.open_spells:
        during(start_s, spell_end_s, (0, 0, 1))
    for job in view.jobs.values():
        during(job.submitted_s, job.ended_s, (0, 0, 0), job.spec)
    changes.sort(key=lambda change: change[0])
    return changes


def used_intervals(node: NodeTimeline, now_s: float) -> list[tuple[float, float]]:
    """When the node was a member of a round while it was usable: its holds cut to its stays."""
    cut = []
    for hold in node.holds:
        for stay in node.presences:
            start_s = max(hold.start_s, stay.start_s)
            end_s = min(x for x in (hold.end_s, stay.usable_until_s, now_s) if x is not None)
            if end_s > start_s:
                cut.append((start_s, end_s))
    return cut
