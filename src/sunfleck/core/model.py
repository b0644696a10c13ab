"""PURE. The values everything else speaks in: nodes, jobs, measurements, snapshots and plans.

All of them are frozen msgspec structs, so that one codec serves wire, journal and HTTP, and so that a value handed
to a policy or an observer cannot be changed under the controller. Units are in the names (`_s`, `_bytes`,
`_per_s`); counts are `n_x`; times are seconds on the engine's clock (wall clock: since the Unix epoch).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import StrEnum
from typing import TypeAlias

import msgspec
from msgspec import Struct

NodeName: TypeAlias = str
JobId: TypeAlias = str


class NodeSpec(Struct, frozen=True, kw_only=True):
    """What a node offers. `kind` groups interchangeable nodes: equal kind means equal speed."""

    name: NodeName
    host: str = "localhost"
    cpus: float = 1.0
    n_gpus: int = 0
    memory_bytes: int = 0
    kind: str = "node"


class Program(Struct, frozen=True, kw_only=True):
    """What a worker of a job runs. The controller never looks inside; executors do."""

    script: str = ""
    """Path of a Python file; empty when `module` is given."""
    module: str = ""
    """Name of a module to run as `python -m` would."""
    args: tuple[str, ...] = ()
    cwd: str = "."
    env: dict[str, str] = {}
    warm: tuple[str, ...] = ("torch",)
    """Modules that the zygote imports before it forks workers of this job."""


class Target(Struct, frozen=True, kw_only=True):
    """What a job's user wants of one of its reported metrics: to reach `value`, from below or from above."""

    metric: str
    value: float
    at_least: bool = True
    """True: reached when metric >= value (accuracy); False: when metric <= value (loss)."""

    def reached(self, value: float | None) -> bool:
        """Whether `value` meets the target. NaN and None do not."""
        if value is None:
            return False
        return value >= self.value if self.at_least else value <= self.value


class JobSpec(Struct, frozen=True, kw_only=True):
    """A malleable training job as its user describes it. No scaling curve is asked for; it is measured.

    Runs on 0 nodes, or on n nodes with min_nodes <= n <= max_nodes and (n - min_nodes) % multiple == 0.
    """

    name: str
    min_nodes: int = 1
    max_nodes: int = 1
    multiple: int = 1
    weight: float = 1.0
    """Importance relative to other jobs: multiplies the job's normalised throughput in the objective."""
    priority: int = 0
    """Jobs of a higher class get what they can use before jobs of a lower one get anything (equal by default)."""
    user: str = ""
    """Whose job it is; a policy may share the nodes fairly between users."""
    total_samples: float | None = None
    """How many samples it is going to train, where that is known."""
    deadline_s: float | None = None
    """Seconds after its submission by which it should have trained `total_samples`."""
    program: Program | None = None
    architecture: str = ""
    """Jobs with the same non-empty key share their profile."""
    target: Target | None = None
    """Shown beside the job's progress and in reports. Ending the program when it is reached is the program's part."""
    max_restarts: int = 3
    """Unplanned worker deaths tolerated without a committed step between them; then the job fails."""

    def sizes(self, n_max: int) -> tuple[int, ...]:
        """The sizes > 0 this job may take when `n_max` nodes are there, ascending."""
        return tuple(range(self.min_nodes, min(self.max_nodes, n_max) + 1, self.multiple))


class ScaleStats(Struct, frozen=True, kw_only=True):
    """Throughput seen at one size: a running mean and spread over settled progress reports (Welford)."""

    n_nodes: int
    n_reports: int = 0
    mean_per_s: float = 0.0
    m2: float = 0.0
    """Sum of squared deviations from the mean, (samples/s)^2."""
    trained_s: float = 0.0
    """Seconds of training the reports cover."""
    recent_per_s: float = 0.0
    """Exponential average over about the last ten reports, for the detection of drifts (see core.scales)."""

    def add(self, samples_per_s: float, dt_s: float) -> ScaleStats:
        n = self.n_reports + 1
        recent = self.recent_per_s + 0.2 * (samples_per_s - self.recent_per_s) if self.n_reports else samples_per_s
        delta = samples_per_s - self.mean_per_s
        mean = self.mean_per_s + delta / n
        return ScaleStats(
            n_nodes=self.n_nodes,
            n_reports=n,
            mean_per_s=mean,
            m2=self.m2 + delta * (samples_per_s - mean),
            trained_s=self.trained_s + dt_s,
            recent_per_s=recent,
        )

    @property
    def stderr_per_s(self) -> float:
        """Standard error of the mean; infinite for fewer than two reports."""
        if self.n_reports < 2:
            return float("inf")
        return float((self.m2 / (self.n_reports - 1) / self.n_reports) ** 0.5)


class Cost(Struct, frozen=True, kw_only=True):
    """One rescale cost in seconds of lost training, assumed until the first measurement replaces it."""

    value_s: float
    n_measured: int = 0

    @property
    def measured(self) -> bool:
        return self.n_measured > 0

    def observe(self, value_s: float) -> Cost:
        """Exponential average over measurements; the first one replaces the assumption."""
        if self.n_measured == 0:
            return Cost(value_s=value_s, n_measured=1)
        return Cost(value_s=0.7 * self.value_s + 0.3 * value_s, n_measured=self.n_measured + 1)


class Costs(Struct, frozen=True, kw_only=True):
    """Costs of changing a job's size: the stall of its surviving workers, and the wait from 0 nodes to training."""

    start_s: Cost = Cost(value_s=2.0)
    rescale_up_s: Cost = Cost(value_s=0.5)
    rescale_down_s: Cost = Cost(value_s=0.2)
    preempt_s: Cost = Cost(value_s=0.5)


class NodePhase(StrEnum):
    """`idle` and `busy` nodes may be planned; a `leaving` one is handed back as soon as its worker is gone; a
    `silent` one was ours before the controller restarted and has not called in yet."""

    IDLE = "idle"
    BUSY = "busy"
    LEAVING = "leaving"
    SILENT = "silent"


class JobPhase(StrEnum):
    """See the state table in docs/architecture.md; `core.state.MOVES` is its source."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    PAUSED = "paused"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        return self in (JobPhase.FINISHED, JobPhase.FAILED, JobPhase.CANCELLED)


class NodeView(Struct, frozen=True, kw_only=True):
    """A node as a policy sees it: only nodes that may be planned are in a snapshot."""

    name: NodeName
    kind: str = "node"
    job: JobId | None = None
    """The job that holds it or is about to."""
    joined_s: float = 0.0
    leaves_s: float | None = None
    """When the cluster has said that it will want the node back, if it has."""


class JobView(Struct, frozen=True, kw_only=True):
    """A job as a policy sees it: not final, and allowed to run."""

    job: JobId
    spec: JobSpec
    submitted_s: float
    nodes: tuple[NodeName, ...] = ()
    """Nodes it holds after departures, sorted."""
    started: bool = False
    """Whether it has ever trained."""
    rescaling: bool = False
    """Whether a change of size is under way; moving it again now would cost twice."""
    scales: tuple[ScaleStats, ...] = ()
    """Measurements by size, ascending; jobs of one architecture share them."""
    costs: Costs = Costs()
    size_since_s: float = 0.0
    """When it took its present size."""
    samples: float = 0.0
    """Samples trained so far."""


class PoolHistory(Struct, frozen=True, kw_only=True):
    """What a pool has seen of its nodes' comings and goings: the ground of every forecast.

    `ended[i]` counts fragments that the cluster ended after 2**(i/2) to 2**((i+1)/2) seconds (shorter ones: i = 0);
    fragments that we ended ourselves say nothing about the cluster and are left out.
    """

    since_s: float | None = None
    """When the first node joined."""
    n_leave_events: int = 0
    """Times at which one or more nodes left."""
    ended: tuple[int, ...] = ()

    def joined(self, now_s: float) -> PoolHistory:
        """A node has come."""
        return self if self.since_s is not None else msgspec.structs.replace(self, since_s=now_s)

    def left(self, stays_s: Iterable[float]) -> PoolHistory:
        """The cluster has taken nodes back, all at once, after these stays in seconds."""
        ended = list(self.ended)
        for stay_s in stays_s:
            i = int(2.0 * math.log2(max(stay_s, 1.0)))
            ended.extend([0] * (i + 1 - len(ended)))
            ended[i] += 1
        return PoolHistory(since_s=self.since_s, n_leave_events=self.n_leave_events + 1, ended=tuple(ended))


class Snapshot(Struct, frozen=True, kw_only=True):
    """All a policy may know. `generation` names the controller state that it was taken from."""

    generation: int
    now_s: float
    nodes: tuple[NodeView, ...]
    jobs: tuple[JobView, ...]
    """In order of arrival."""
    profiling: Profiling | None = None
    """The profile run under way, as the last accepted plan set it."""
    history: PoolHistory = PoolHistory()


class Profiling(Struct, frozen=True, kw_only=True):
    """A job held at one size so that its throughput there can be measured."""

    job: JobId
    n_nodes: int
    since_s: float
    remaining: tuple[int, ...] = ()
    """Sizes still to visit after this one, in order."""


class PlannedJob(Struct, frozen=True, kw_only=True):
    """What a plan gives one job, and why."""

    job: JobId
    nodes: tuple[NodeName, ...]
    reason: str
    """In words, for `explain`."""


class Plan(Struct, frozen=True, kw_only=True):
    """Who gets which nodes. Jobs that are not listed get none.

    `objective`, `bound` and `gap` are as HiGHS names them; an exact solver reports gap 0.
    """

    jobs: tuple[PlannedJob, ...]
    objective: float = 0.0
    bound: float = 0.0
    gap: float = 0.0
    profiling: Profiling | None = None
    review_after_s: float | None = None
    """Ask again after this long even if nothing happens (a measurement will have settled by then)."""
    solver: str = ""
    waits: str = "no nodes are left for it"
    """Why jobs that are not listed have none."""
