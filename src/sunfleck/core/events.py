"""PURE. Everything that can happen, in the past tense. Events are the only record: state is a fold over them.

Source: who reports the event. `cluster`: the adapter that watches nodes; `executor`: the adapter that runs
workers; `user`: CLI or API through the engine; `planner`: the policy's answer; `engine`: the engine itself.
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from .model import JobId, JobSpec, NodeName, NodeSpec, Plan


class Event(Struct, frozen=True, kw_only=True, tag=True, tag_field="event"):
    """Base of all events."""


# -- engine ------------------------------------------------------------------------------------------------------


class PoolStarted(Event, frozen=True, kw_only=True):
    """engine: first event of a pool's journal."""

    pool: str
    version: str


class ControllerRestarted(Event, frozen=True, kw_only=True):
    """engine: the journal was replayed by a new controller. Nodes are silent until their agents call in again."""

    patience_s: float = 10.0
    """Nodes that have not called in after this long are lost."""


class TimeReached(Event, frozen=True, kw_only=True):
    """engine: a time the controller asked to be woken at has come."""


class PoolStopRequested(Event, frozen=True, kw_only=True):
    """user: `sunfleck down`. Jobs checkpoint and keep their place; nodes are handed back."""


# -- cluster -----------------------------------------------------------------------------------------------------


class NodesJoined(Event, frozen=True, kw_only=True):
    """cluster: these nodes are ours now and their agents answer. Also sent when an agent calls in again after a
    controller restart; `job` then names the job whose worker still runs there."""

    nodes: tuple[NodeSpec, ...]
    holding: dict[NodeName, JobId] = {}


class NodesReclaimed(Event, frozen=True, kw_only=True):
    """cluster: these nodes are wanted back within `grace_s`."""

    nodes: tuple[NodeName, ...]
    grace_s: float
    reason: str = ""


class NodesLost(Event, frozen=True, kw_only=True):
    """cluster: these nodes are gone, with whatever ran there."""

    nodes: tuple[NodeName, ...]
    reason: str


class NodesReleased(Event, frozen=True, kw_only=True):
    """cluster: the hand-back of these nodes is complete; nothing of ours is left on them."""

    nodes: tuple[NodeName, ...]
    handback_s: float | None = None
    """From the reclaim (or the release command) until the node was free."""


# -- user --------------------------------------------------------------------------------------------------------


class JobSubmitted(Event, frozen=True, kw_only=True):
    """user: a job was accepted; the id is the engine's."""

    job: JobId
    spec: JobSpec


class JobCancelRequested(Event, frozen=True, kw_only=True):
    """user: end this job and keep its last checkpoint."""

    job: JobId
    reason: str = "cancelled by user"


# -- executor ----------------------------------------------------------------------------------------------------


class RoundFormed(Event, frozen=True, kw_only=True):
    """executor: the job trains with exactly these nodes from `step` on.

    `stall_s` is the time its surviving workers did not train (None when there was no survivor); `took_s` the
    time from the command to training at the new size; `cause`: start | rescale | loss.
    """

    job: JobId
    round: int
    nodes: tuple[NodeName, ...]
    step: int
    took_s: float
    stall_s: float | None = None
    cause: str = "rescale"


class WorkersLeft(Event, frozen=True, kw_only=True):
    """executor: no process of this job is left on these nodes. `planned` tells a leave from a death."""

    job: JobId
    nodes: tuple[NodeName, ...]
    planned: bool
    detail: str = ""


class Progress(Event, frozen=True, kw_only=True):
    """executor: the job has committed training up to `step`.

    `samples` counts samples of the model's lineage since the job began (replayed work counts once);
    `samples_per_s` covers the last `dt_s` at `n_nodes`, and is only given (not None) when the interval held no
    rescale and no warm-up steps.
    """

    job: JobId
    round: int
    n_nodes: int
    step: int
    epoch: int
    samples: int
    dt_s: float
    samples_per_s: float | None = None
    metrics: dict[str, float] = {}


class SamplesCommitted(Event, frozen=True, kw_only=True):
    """executor: ledger entry. Steps [step_from, step_to) of one round trained positions
    [cursor_from, cursor_to) of the epoch's permutation; `n_samples` and `index_hash` were summed over all ranks
    from the samples really fetched (see executor.elastic.data for the hash). A later round that starts at a step
    below `step_to` voids the overlap: those steps were lost with their workers and are trained anew."""

    job: JobId
    round: int
    epoch: int
    step_from: int
    step_to: int
    cursor_from: int
    cursor_to: int
    n_samples: int
    index_hash: int
    """Modulo 2**63."""


class DatasetDescribed(Event, frozen=True, kw_only=True):
    """executor: what one epoch of this job's data must cover."""

    job: JobId
    n_samples: int
    epoch_hash: int
    batch: int


class CheckpointSaved(Event, frozen=True, kw_only=True):
    """executor: everything up to `step` survives the loss of all nodes."""

    job: JobId
    step: int
    path: str


class JobFinished(Event, frozen=True, kw_only=True):
    """executor: the program ended by itself, successfully, on all its workers."""

    job: JobId


class JobCrashed(Event, frozen=True, kw_only=True):
    """executor: the program cannot go on: it failed at import, raised, or died too often. `error` has the last
    lines of the worker that failed first and where its log is."""

    job: JobId
    error: str


class JobStopped(Event, frozen=True, kw_only=True):
    """executor: after StopJob: every worker is gone and the last state is saved."""

    job: JobId


# -- planner -----------------------------------------------------------------------------------------------------


class PlanReady(Event, frozen=True, kw_only=True):
    """planner: answer to Solve. Dropped when its generation is stale."""

    generation: int
    plan: Plan
    solve_s: float


class PlanFailed(Event, frozen=True, kw_only=True):
    """planner: the solver raised. What runs keeps running; the controller asks again."""

    generation: int
    error: str


AnyEvent: TypeAlias = (
    PoolStarted
    | ControllerRestarted
    | TimeReached
    | PoolStopRequested
    | NodesJoined
    | NodesReclaimed
    | NodesLost
    | NodesReleased
    | JobSubmitted
    | JobCancelRequested
    | RoundFormed
    | WorkersLeft
    | Progress
    | SamplesCommitted
    | DatasetDescribed
    | CheckpointSaved
    | JobFinished
    | JobCrashed
    | JobStopped
    | PlanReady
    | PlanFailed
)
