"""PURE. Simple policies to compare with: what a site could do without an optimiser.

All admit first come first served up to `max_running` jobs, and place nodes like every other policy here, so that a
comparison shows the allocation and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from msgspec import structs

from sunfleck.core.model import JobId, JobView, Plan, PlannedJob, Snapshot

from . import objective, placement, scaling
from .admission import admit
from .curves import CurveSource


@dataclass(frozen=True, kw_only=True)
class BaselineOptions:
    max_running: int | None = 10
    """At most this many jobs at once; None: no limit."""


@dataclass(frozen=True, kw_only=True)
class EqualShareOptions(BaselineOptions):
    share_remainder: bool = False
    """Whether nodes that do not suffice for another step of everybody go to those that came first; as published,
    they stay idle."""


@dataclass(frozen=True, kw_only=True)
class GreedyOptions(BaselineOptions):
    objective: str = "normalised"
    curves: CurveSource | None = None
    """Where curves come from; None: fitted to what was measured."""


@dataclass(frozen=True, kw_only=True)
class RigidOptions(BaselineOptions):
    max_running: int | None = None
    n_nodes: int = 4
    """Size of every job, as near as its own limits allow."""
    requeue_s: float = 1.0
    """How long a killed job needs to be back in the queue."""


def plan_of(
    snapshot: Snapshot, counts: Mapping[JobId, int], reasons: Mapping[JobId, str], other: str, solver: str
) -> Plan:
    """A plan from counts; `other` is why jobs without a reason of their own, which it does not list, have no nodes."""
    nodes = placement.place(snapshot, counts)
    return Plan(
        jobs=tuple(
            PlannedJob(job=job.job, nodes=nodes[job.job], reason=reasons.get(job.job, other))
            for job in snapshot.jobs
            if job.job in reasons or job.nodes
        ),
        solver=solver,
        waits=other,
    )


class EqualShare:
    """FreeTrain's own yardstick: the nodes divided evenly between the jobs, rounded down, at every event.

    Shares are sizes each job may take; what one job cannot take is shared by the others.
    """

    name = "equal-share"

    def __init__(self, options: EqualShareOptions | None = None) -> None:
        self.options = options or EqualShareOptions()

    def plan(self, snapshot: Snapshot) -> Plan:
        admission = admit(snapshot, self.options.max_running)
        counts = equal_shares(admission.jobs, len(snapshot.nodes), self.options.share_remainder)
        n_sharing = sum(1 for n in counts.values() if n)
        reasons = {
            job: f"an equal share of {len(snapshot.nodes)} nodes between {n_sharing} jobs"
            if n
            else "queued: an equal share is less than its min_nodes"
            for job, n in counts.items()
        }
        return plan_of(snapshot, counts, reasons, admission.waits, "equal-share")


def equal_shares(jobs: Sequence[JobView], n_nodes: int, share_remainder: bool) -> dict[JobId, int]:
    """Round robin: in order of arrival everybody takes one step up at a time, as long as a step is left for it; after
    the first round, without `share_remainder`, only in whole rounds."""
    counts = {job.job: 0 for job in jobs}
    left, growing = n_nodes, list(jobs)
    while left > 0 and growing:
        still = []
        if not share_remainder and any(counts.values()):
            whole = [job for job in growing if counts[job.job] + job.spec.multiple <= job.spec.max_nodes]
            if sum(job.spec.multiple for job in whole) > left:
                break
        for job in growing:
            spec, n = job.spec, counts[job.job]
            step = spec.multiple if n else spec.min_nodes
            if n + step <= spec.max_nodes and step <= left:
                counts[job.job] += step
                left -= step
                still.append(job)
        growing = still
    return counts


class Greedy:
    """Steepest ascent: node after node goes to the job that gains most by it. Blind to rescale costs, and short of
    the optimum where curves are not concave."""

    name = "greedy"

    def __init__(self, options: GreedyOptions | None = None) -> None:
        self.options = options or GreedyOptions()

    def plan(self, snapshot: Snapshot) -> Plan:
        admission, n_nodes = admit(snapshot, self.options.max_running), len(snapshot.nodes)
        rates = {}
        for job in admission.jobs:
            curve = self.options.curves(job) if self.options.curves else scaling.fit(job.scales)
            n_max = max(1, min(job.spec.max_nodes, n_nodes))
            rates[job.job] = objective.rates_of(
                job.spec, curve, n_max, normalised=self.options.objective == "normalised"
            ).tolist()
        counts = {job.job: 0 for job in admission.jobs}
        left = n_nodes
        heap: list[tuple[float, int]] = []

        def offer(i: int) -> None:
            job = admission.jobs[i]
            n = counts[job.job]
            step = job.spec.multiple if n else job.spec.min_nodes
            if n + step <= min(job.spec.max_nodes, n_nodes):
                table = rates[job.job]
                heappush(heap, (-(table[n + step] - table[n]) / step, i))

        for i in range(len(admission.jobs)):
            offer(i)
        while heap:
            loss, i = heappop(heap)
            job = admission.jobs[i]
            step = job.spec.multiple if counts[job.job] else job.spec.min_nodes
            if step > left or loss >= 0.0:
                continue
            counts[job.job] += step
            left -= step
            offer(i)
        reasons = {
            job: f"{n} nodes by steepest ascent" if n else "queued: every node gains more elsewhere"
            for job, n in counts.items()
        }
        return plan_of(snapshot, counts, reasons, admission.waits, "greedy")


class Rigid:
    """Ordinary preemptible jobs in the holes: a fixed size, first come first served where they fit; a job that loses
    a node is killed, and starts again from its checkpoint when its size is free."""

    name = "rigid"

    def __init__(self, options: RigidOptions | None = None) -> None:
        self.options = options or RigidOptions()

    def size(self, job: JobView) -> int:
        """The size of this job: the largest allowed one up to the option, or its smallest."""
        spec = job.spec
        steps = max(0, (min(self.options.n_nodes, spec.max_nodes) - spec.min_nodes) // spec.multiple)
        return spec.min_nodes + steps * spec.multiple

    def plan(self, snapshot: Snapshot) -> Plan:
        counts: dict[JobId, int] = {}
        reasons: dict[JobId, str] = {}
        killed = False
        left, n_running = len(snapshot.nodes), 0
        for job in snapshot.jobs:
            if len(job.nodes) == self.size(job):
                counts[job.job] = len(job.nodes)
                reasons[job.job] = f"runs on its fixed size of {len(job.nodes)} nodes"
                left -= len(job.nodes)
                n_running += 1
            elif job.nodes:
                counts[job.job] = 0
                reasons[job.job] = "killed: it lost a node and its size is fixed"
                killed = True
        cap = self.options.max_running
        for job in snapshot.jobs:
            size = self.size(job)
            if job.job not in counts and size <= left and (cap is None or n_running < cap):
                counts[job.job] = size
                reasons[job.job] = f"starts on its fixed size of {size} nodes"
                left -= size
                n_running += 1
        plan = plan_of(snapshot, counts, reasons, "queued: its fixed size does not fit", "rigid")
        if not killed:
            return plan
        return structs.replace(plan, review_after_s=self.options.requeue_s)
