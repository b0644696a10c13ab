"""PURE. What a running controller answers to `status`, `jobs`, `nodes` and `explain`: plain values, ready to print,
to send as JSON or to show on a page. Whoever answers fills them from the controller's state; nothing here decides.

A job's three node sets are kept apart all the way to the screen: *planned* (the last plan gave them), *requested*
(the last command named them), *observed* (it trains there now). What is wrong right now is their difference.
"""

from __future__ import annotations

from msgspec import Struct

from sunfleck.core.model import Costs, JobId, JobPhase, NodeName, NodePhase, Profiling, Target


class NodeRow(Struct, frozen=True, kw_only=True):
    """One node of the pool."""

    name: NodeName
    phase: NodePhase
    job: JobId | None = None
    """The job that holds it."""
    host: str = "localhost"
    kind: str = "node"
    cpus: float = 1.0
    n_gpus: int = 0
    joined_s: float = 0.0
    leaves_s: float | None = None
    """When the cluster has said that it will want the node back, if it has."""
    reason: str = ""
    """Why it is idle, leaving or silent, in words."""


class JobRow(Struct, frozen=True, kw_only=True):
    """One job, from its submission to long after its end."""

    job: JobId
    name: str
    phase: JobPhase
    min_nodes: int = 1
    max_nodes: int = 1
    planned: tuple[NodeName, ...] = ()
    requested: tuple[NodeName, ...] = ()
    observed: tuple[NodeName, ...] = ()
    submitted_s: float = 0.0
    ended_s: float | None = None
    step: int = 0
    epoch: int = 0
    samples: int = 0
    samples_per_s: float | None = None
    """Latest settled throughput; None while none is known at its present size."""
    metrics: dict[str, float] = {}
    """Latest value of every reported metric."""
    target: Target | None = None
    fraction: float | None = None
    """How much of its work is done, 0 to 1, where somebody knows."""
    n_rescales: int = 0
    profiling: bool = False
    """Held at its present size to be measured there."""
    reason: str = ""
    """Why it has the nodes it has, or none, or how it ended, in words."""


class PlanRow(Struct, frozen=True, kw_only=True):
    """The last accepted plan in numbers, as HiGHS names them."""

    solver: str
    time_s: float
    solve_s: float
    objective: float = 0.0
    bound: float = 0.0
    gap: float = 0.0
    generation: int = 0


class StatusView(Struct, frozen=True, kw_only=True):
    """Answer to `status`; `jobs` and `nodes` print parts of it."""

    pool: str
    version: str
    now_s: float
    started_s: float
    generation: int = 0
    nodes: tuple[NodeRow, ...] = ()
    jobs: tuple[JobRow, ...] = ()
    """In order of arrival."""
    plan: PlanRow | None = None
    profiling: Profiling | None = None
    n_reclaims: int = 0
    handback_s_p50: float | None = None
    handback_s_p99: float | None = None
    warming: bool = False
    """Whether the pool still imports what its first workers will find imported."""
    stopping: bool = False
    """`sunfleck down` was asked for."""
    warnings: tuple[str, ...] = ()
    """What a user should know now: a journal that cannot be written, oversubscribed nodes, a solver that failed."""


class CurvePoint(Struct, frozen=True, kw_only=True):
    """Throughput at one size, measured or assumed (extrapolated by the fitted curve)."""

    n_nodes: int
    samples_per_s: float
    measured: bool
    stderr_per_s: float | None = None
    n_reports: int = 0


class ExplainView(Struct, frozen=True, kw_only=True):
    """Answer to `explain JOB`: why it has the nodes it has, or none."""

    row: JobRow
    now_s: float
    reason: str
    """The plan's (or the controller's) sentence."""
    details: tuple[str, ...] = ()
    """More sentences: what it waits for, what would change it, who holds the other nodes."""
    curve: tuple[CurvePoint, ...] = ()
    """Ascending in n_nodes."""
    costs: Costs = Costs()
    profiling: Profiling | None = None
    plan: PlanRow | None = None
    t_fwd_s: float | None = None
    """The horizon over which the plan weighs gain against cost."""
    n_pool_nodes: int = 0
    log_path: str = ""
