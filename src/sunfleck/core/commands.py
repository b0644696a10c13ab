"""PURE. Everything the controller can want, in the imperative. Executors carry commands out and never decide."""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from .model import JobId, JobSpec, NodeName, Snapshot


class Command(Struct, frozen=True, kw_only=True, tag=True, tag_field="command"):
    """Base of all commands."""


class Solve(Command, frozen=True, kw_only=True):
    """planner: plan this snapshot; answer with PlanReady or PlanFailed of the same generation."""

    snapshot: Snapshot


class RescaleJob(Command, frozen=True, kw_only=True):
    """executor: make the job run on exactly these nodes (start it if it does not run; empty: save its state and
    leave every node). Supersedes any earlier command for the job that is still under way.

    The executor answers with WorkersLeft for nodes it left and RoundFormed when it trains there.
    `grace_s` bounds a leave: a worker still there after it is killed.
    """

    job: JobId
    spec: JobSpec
    nodes: tuple[NodeName, ...]
    grace_s: float


class StopJob(Command, frozen=True, kw_only=True):
    """executor: end the job: save its state if `save`, end every worker, answer JobStopped."""

    job: JobId
    grace_s: float
    save: bool = True


class ReleaseNodes(Command, frozen=True, kw_only=True):
    """cluster: hand these nodes back now; nothing of ours runs on them. Answer NodesReleased."""

    nodes: tuple[NodeName, ...]


class RequestNodes(Command, frozen=True, kw_only=True):
    """cluster: we could use this many nodes in all. Clusters that offer nodes by themselves ignore it."""

    n_nodes: int


class WakeAt(Command, frozen=True, kw_only=True):
    """engine: send TimeReached at this time (earlier wake-ups stand)."""

    time_s: float


class StopPool(Command, frozen=True, kw_only=True):
    """engine: everything is handed back and saved; the engine may end."""


AnyCommand: TypeAlias = Solve | RescaleJob | StopJob | ReleaseNodes | RequestNodes | WakeAt | StopPool
