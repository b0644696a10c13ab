"""PURE. The controller's state: what is planned, requested and observed, and the table of a job's moves.

Per job three node sets are kept. `planned` is what the last accepted plan wants, less what has left since;
`requested` is what the executor was last told; `observed` is what it last reported to train. What is wrong right now
is their difference. A node is *held* by the job that has, or may have, processes on it (`NodeState.job`): a node
passes from one job to another only after the executor said that the first has left it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .errors import InvalidTransition
from .model import (
    Costs,
    JobId,
    JobPhase,
    JobSpec,
    JobView,
    NodeName,
    NodePhase,
    NodeSpec,
    Plan,
    PoolHistory,
    Profiling,
    ScaleStats,
)

P = JobPhase
MOVES: dict[JobPhase, dict[JobPhase, str]] = {
    P.QUEUED: {
        P.STARTING: "the plan gave it nodes and the executor was told",
        P.CANCELLED: "cancelled before it ever had a node",
    },
    P.STARTING: {
        P.RUNNING: "its first round formed",
        P.QUEUED: "its nodes left before it trained",
        P.PAUSED: "its nodes left before it trained again",
        P.STOPPING: "cancelled; its workers are ending",
        P.FINISHED: "the program ended successfully",
        P.FAILED: "the program failed before it trained",
    },
    P.RUNNING: {
        P.STARTING: "all its workers died or left, and new ones are on their way",
        P.PAUSED: "it has no node; its state is in its checkpoint",
        P.STOPPING: "cancelled; its workers are ending",
        P.FINISHED: "the program ended successfully",
        P.FAILED: "the program failed",
    },
    P.PAUSED: {
        P.STARTING: "the plan gave it nodes again",
        P.CANCELLED: "cancelled while it had no node",
        P.FINISHED: "the program ended as its last node left",
        P.FAILED: "the program failed as its last node left",
    },
    P.STOPPING: {
        P.CANCELLED: "every worker is gone",
        P.FINISHED: "the program ended before it could be cancelled",
        P.FAILED: "the program failed before it could be cancelled",
    },
    P.FINISHED: {},
    P.FAILED: {},
    P.CANCELLED: {},
}
"""Every legal move of a job and its meaning. docs/architecture.md shows this table."""


@dataclass
class NodeState:
    spec: NodeSpec
    joined_s: float
    phase: NodePhase = NodePhase.IDLE
    job: JobId | None = None
    """Holder: the job that has, or may have, processes here."""
    reclaimed_s: float | None = None
    deadline_s: float | None = None
    """When the cluster takes it by force (reclaim + grace), or gives up on it (silent)."""
    released: bool = False
    """Whether ReleaseNodes was sent."""

    @property
    def usable(self) -> bool:
        return self.phase in (NodePhase.IDLE, NodePhase.BUSY)


@dataclass
class JobState:
    job: JobId
    spec: JobSpec
    submitted_s: float
    phase: JobPhase = JobPhase.QUEUED
    phase_since_s: float = 0.0
    planned: frozenset[NodeName] = frozenset()
    requested: frozenset[NodeName] | None = frozenset()
    """None after a restart of the controller: the executor knows nothing yet."""
    observed: frozenset[NodeName] = frozenset()
    reason: str = "waiting for the next plan"
    trained: bool = False
    round: int = -1
    round_size: int = 0
    """Nodes of its last formed round; word of leavers may come before or after that of the next round."""
    step: int = 0
    epoch: int = 0
    samples: int = 0
    samples_per_s: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    checkpoint_step: int | None = None
    costs: Costs = field(default_factory=Costs)
    scales: dict[int, ScaleStats] = field(default_factory=dict)
    """By size; shared (the same dict) between jobs of one architecture."""
    size_since_s: float = 0.0
    progress_s: float = 0.0
    """When it last reported progress or formed a round."""
    n_rescales: int = 0
    n_losses: int = 0
    """Rounds that ended by an unplanned death."""
    error: str = ""
    view: JobView | None = field(default=None, compare=False)
    """What a policy was last shown of it, while that stays so: as long as it waits for its first node."""
    started_s: float | None = None
    ended_s: float | None = None

    def move(self, to: JobPhase, now: float) -> None:
        """Change phase along MOVES. Staying is no move."""
        if to is self.phase:
            return
        if to not in MOVES[self.phase]:
            raise InvalidTransition(
                f"job {self.job} ({self.spec.name}) cannot go from {self.phase} to {to}: "
                f"in {self.phase} since {self.phase_since_s:.3f}, now {now:.3f}, "
                f"planned {sorted(self.planned)}, requested {sorted(self.requested or ())}, "
                f"observed {sorted(self.observed)}"
            )
        self.phase = to
        self.phase_since_s = now
        self.view = None
        if to.final:
            self.ended_s = now
        if to is JobPhase.RUNNING and self.started_s is None:
            self.started_s = now

    @property
    def rescaling(self) -> bool:
        """Whether the executor still works on the last request."""
        return self.requested is not None and self.requested != self.observed


@dataclass
class State:
    """All the controller knows. Changed only by Controller.handle."""

    pool: str = ""
    nodes: dict[NodeName, NodeState] = field(default_factory=dict)
    jobs: dict[JobId, JobState] = field(default_factory=dict)
    """In order of arrival."""
    active: dict[JobId, JobState] = field(default_factory=dict)
    """Those of them that are not final. A queue may hold thousands: what is done per event must not be done for all."""
    n_wanted: int = 0
    """Sum of their max_nodes."""
    architectures: dict[str, dict[int, ScaleStats]] = field(default_factory=dict)
    n_measured: int = 0
    """Measurements of throughput so far."""
    generation: int = 0
    solving: int | None = None
    """Generation of the Solve under way."""
    dirty: bool = False
    """Whether something changed that a plan would care about."""
    profiling: Profiling | None = None
    history: PoolHistory = field(default_factory=PoolHistory)
    review_s: float | None = None
    stopping: bool = False
    stopped: bool = False
    stop_deadline_s: float | None = None
    n_requested: int = 0
    plan: Plan | None = None
    """The last accepted one, when it came and how long it took."""
    plan_s: float = 0.0
    plan_solve_s: float = 0.0
    plan_error: str = ""
    """Why the policy gave no plan when it was last asked; empty when it did."""
    n_reclaims: int = 0

    def add(self, job: JobState) -> None:
        """A new job, last in order of arrival."""
        self.jobs[job.job] = self.active[job.job] = job
        self.n_wanted += job.spec.max_nodes

    def retire(self, job: JobState) -> None:
        """The job has become final."""
        if self.active.pop(job.job, None) is not None:
            self.n_wanted -= job.spec.max_nodes

    def held_by(self, job: JobId) -> frozenset[NodeName]:
        return frozenset(name for name, node in self.nodes.items() if node.job == job)

    @property
    def active_jobs(self) -> list[JobState]:
        return list(self.active.values())

    @property
    def engaged_jobs(self) -> list[JobState]:
        """Active jobs that have, want or were promised a node (or whose requests the executor does not know yet)."""
        return [j for j in self.active.values() if j.planned or j.requested is None or j.requested or j.observed]


def violations(state: State) -> list[str]:
    """Every broken invariant, in words; empty when all is well. Checked after every event in tests."""
    wrong: list[str] = []
    owners: dict[NodeName, JobId] = {}
    if list(state.active) != [name for name, job in state.jobs.items() if not job.phase.final]:
        wrong.append("the active jobs are not those that are not final")
    for job in state.jobs.values():
        for name in job.planned:
            if name in owners:
                wrong.append(f"node {name} is planned for {owners[name]} and for {job.job}")
            owners[name] = job.job
            if name not in state.nodes:
                wrong.append(f"{job.job} plans node {name}, which is not in the pool")
            elif not (state.nodes[name].usable or state.nodes[name].phase is NodePhase.SILENT):
                wrong.append(f"{job.job} plans node {name}, which is {state.nodes[name].phase}")
        for name in job.requested or ():
            node = state.nodes.get(name)
            if node is None:
                wrong.append(f"{job.job} requests node {name}, which is not in the pool")
            elif node.job != job.job:
                wrong.append(f"{job.job} requests node {name}, which {node.job} holds")
        n = len(job.requested or ())
        if n and n not in job.spec.sizes(n):
            wrong.append(f"{job.job} requests {n} nodes, which is not one of its sizes")
        if job.phase.final and (job.planned or job.requested):
            wrong.append(f"{job.job} is {job.phase} but still wants nodes")
    for name, node in state.nodes.items():
        if node.job is not None and node.job not in state.jobs:
            wrong.append(f"node {name} is held by unknown job {node.job}")
        if node.phase is NodePhase.IDLE and node.job is not None:
            wrong.append(f"node {name} is idle but held by {node.job}")
        if node.phase is NodePhase.BUSY and node.job is None:
            wrong.append(f"node {name} is busy but held by no job")
        if node.released and node.job is not None:
            wrong.append(f"node {name} is released while {node.job} holds it")
    return wrong
