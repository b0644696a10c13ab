"""PURE. The Job Profiling Advisor (JPA): which job to hold at which size, so that its scaling curve becomes known.

After MalleTrain (ICPE 2024): a job whose throughput at the scales 1..K is unmeasured is profiled, one job at a time,
and only while the nodes that other jobs could give up without being stopped suffice. Scales are visited in descending
order, so that one expansion is followed by cheap shrinks and each shrink measures its cost too.

Where it differs: a scale is held until the confidence interval of its mean is tight, not for a fixed time; whatever
normal running has measured is not measured again; jobs of one architecture share scales (the controller merges them);
a job that has the pool to itself is left at the size the optimum gives it for a while first, since nobody waits for
what a profile would tell.

The run under way is a value, `Profiling`: it comes with the snapshot and goes out with the plan. When its nodes vanish
it is dropped, and begun again where it stopped once there is room.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import ceil, inf

from sunfleck.core.model import JobId, JobView, Profiling, ScaleStats, Snapshot

from .scaling import TIGHT, relative_error


@dataclass(frozen=True, kw_only=True)
class ProfilerOptions:
    n_scales: int = 4
    """K: scales 1..K are profiled (at least the two smallest sizes the job may take); 0 switches profiling off."""
    tolerance: float = TIGHT
    """A scale is known when the relative standard error of its throughput is at most this ..."""
    max_hold_s: float = 20.0
    """... or when its reports cover this many seconds of training: noise is then a property of the job."""
    arrive_s: float = 60.0
    """How long a job may take to get to a size and to give its first report there before it is given up."""
    alone_after_s: float = 30.0
    """How long after its submission a job is left alone while no job wants more nodes than there are."""
    min_review_s: float = 0.2
    """Shortest time between two looks at the measurements."""


@dataclass(frozen=True)
class Advice:
    """Hold `profiling.job` at `profiling.n_nodes` (None: nobody), and ask again after `review_after_s`."""

    profiling: Profiling | None = None
    review_after_s: float | None = None


def stats_at(job: JobView, n_nodes: int) -> ScaleStats | None:
    """What was measured at one size, if anything."""
    return next((s for s in job.scales if s.n_nodes == n_nodes and s.n_reports > 0), None)


def settled(stats: ScaleStats | None, options: ProfilerOptions) -> bool:
    """Whether more measuring at this size would tell nothing that a plan needs."""
    if stats is None:
        return False
    return relative_error(stats) <= options.tolerance or (
        stats.n_reports >= 2 and stats.trained_s >= options.max_hold_s
    )


def scales_to_profile(job: JobView, n_nodes: int, options: ProfilerOptions) -> tuple[int, ...]:
    """Sizes of the job that still need a profile, descending."""
    spec = job.spec
    largest = min(spec.max_nodes, n_nodes, max(options.n_scales, spec.min_nodes + spec.multiple))
    wanted = range(spec.min_nodes, largest + 1, spec.multiple)
    return tuple(sorted((n for n in wanted if not settled(stats_at(job, n), options)), reverse=True))


def advise(snapshot: Snapshot, options: ProfilerOptions, eligible: Collection[JobId] | None = None) -> Advice:
    """The next step of profiling. `eligible`: jobs that may run at all (None: all of the snapshot)."""
    if options.n_scales <= 0:
        return Advice()
    jobs = [job for job in snapshot.jobs if eligible is None or job.job in eligible]
    running = snapshot.profiling
    after: JobId | None = None
    if running is not None:
        job = next((job for job in jobs if job.job == running.job), None)
        if job is not None:
            advice, given_up = _continued(job, running, snapshot, jobs, options)
            if advice is not None:
                return advice
            after = job.job if given_up else None
    return _begun(snapshot, jobs, options, after)


def _room(job: JobView, snapshot: Snapshot, jobs: list[JobView]) -> int:
    """Nodes the job could have without keeping the smallest size from any other job, running or in line: a user who
    has just submitted does not wait for somebody else's measurement. (With more jobs than nodes nobody gets a second
    node, and there is nothing to profile.)"""
    others = sum(o.spec.min_nodes for o in jobs if o.job != job.job)
    return len(snapshot.nodes) - others


def _continued(
    job: JobView, run: Profiling, snapshot: Snapshot, jobs: list[JobView], options: ProfilerOptions
) -> tuple[Advice | None, bool]:
    """The run goes on (at this size or the next), or (None, whether it was given up for silence)."""
    room, now_s = _room(job, snapshot, jobs), snapshot.now_s
    sizes = job.spec.sizes(min(room, len(snapshot.nodes)))
    if run.n_nodes not in sizes:
        return None, False  # nodes have vanished, or a job that may not be stopped has come
    stats = stats_at(job, run.n_nodes)
    arrived = len(job.nodes) == run.n_nodes and not job.rescaling
    held_s = now_s - max(run.since_s, job.size_since_s) if arrived else now_s - run.since_s
    if not settled(stats, options):
        if held_s >= options.arrive_s and (stats is None or not arrived):
            return None, True
        if not arrived or stats is None or held_s < options.max_hold_s:
            return Advice(run, _review_s(job, stats, arrived, held_s, options)), False
    remaining = [n for n in run.remaining if n in sizes and not settled(stats_at(job, n), options)]
    if not remaining:
        return None, False
    begun = Profiling(job=job.job, n_nodes=remaining[0], since_s=now_s, remaining=tuple(remaining[1:]))
    return Advice(begun, _review_s(job, None, False, 0.0, options)), False


def _begun(snapshot: Snapshot, jobs: list[JobView], options: ProfilerOptions, after: JobId | None) -> Advice:
    """A run for the first job in order of arrival that needs one and for which there is room.

    The job given up last (`after`) is passed over, and the search begins behind it.
    """
    wanted_nodes = sum(max(job.spec.sizes(len(snapshot.nodes)), default=0) for job in jobs)
    contended = wanted_nodes > len(snapshot.nodes)
    names = [job.job for job in jobs]
    first = names.index(after) + 1 if after in names else 0
    review_s: float | None = None
    for job in jobs[first:] + jobs[:first]:
        if job.job == after or (job.started and not job.scales):
            continue  # it trains, but too slowly to report: holding it would teach nothing soon
        scales = scales_to_profile(job, len(snapshot.nodes), options)
        if not scales or scales[0] > _room(job, snapshot, jobs):
            continue
        patience_s = job.submitted_s + options.alone_after_s - snapshot.now_s
        if not contended and patience_s > 0.0:
            review_s = patience_s if review_s is None else min(review_s, patience_s)
            continue
        run = Profiling(job=job.job, n_nodes=scales[0], since_s=snapshot.now_s, remaining=scales[1:])
        return Advice(run, _review_s(job, stats_at(job, scales[0]), False, 0.0, options))
    return Advice(None, review_s)


def _review_s(job: JobView, stats: ScaleStats | None, arrived: bool, held_s: float, options: ProfilerOptions) -> float:
    """When the scale will probably be known: from the spread and the pace of its reports so far."""
    if not arrived:
        move = job.costs.rescale_up_s if job.nodes else job.costs.start_s
        return max(options.min_review_s, min(move.value_s, options.arrive_s), 0.5)
    if stats is None or relative_error(stats) == inf:
        return max(options.min_review_s, 0.5)
    left_s = max(options.max_hold_s - stats.trained_s, options.max_hold_s - held_s)
    if options.tolerance > 0.0:
        needed = ceil(stats.n_reports * (relative_error(stats) / options.tolerance) ** 2) - stats.n_reports
        left_s = min(left_s, max(needed, 1) * stats.trained_s / stats.n_reports)
    return max(options.min_review_s, left_s)
