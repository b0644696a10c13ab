"""PURE. What happened to one node, one job and the planner over time: the parts of a `views.PoolView`."""

from __future__ import annotations

from typing import TypeVar

from msgspec import Struct, field

from sunfleck.core import events as ev
from sunfleck.core.model import JobId, JobPhase, JobSpec, NodeName, NodeSpec, ScaleStats

RESOLUTION = 2000
"""Points closer together than this part of a series' length are merged: a job may run for weeks, and a view that
kept every report would grow by megabytes an hour. The length of a series grows with the logarithm of time only."""

Number = TypeVar("Number", int, float)


def note(series: list[tuple[float, Number]], time_s: float, value: Number) -> None:
    """Append a point; its predecessor gives way if it is too close to the one before. The last point is always the
    last one reported, and nothing is merged in a series of RESOLUTION points or fewer."""
    if len(series) > RESOLUTION and time_s - series[-2][0] < (time_s - series[0][0]) / RESOLUTION:
        series[-1] = (time_s, value)
    else:
        series.append((time_s, value))


class Presence(Struct, kw_only=True):
    """One stay of a node in the pool. `end_s` is None while it lasts."""

    start_s: float
    end_s: float | None = None
    reclaimed_s: float | None = None
    """When the cluster asked for it back; from then on it may not be used."""
    grace_s: float | None = None
    handback_s: float | None = None
    """From the reclaim (or the release) until nothing of ours was left on it, as the cluster adapter measured."""
    lost: bool = False
    """It went without being handed back."""

    @property
    def usable_until_s(self) -> float | None:
        return self.end_s if self.reclaimed_s is None else self.reclaimed_s


class Hold(Struct, kw_only=True):
    """A time during which a node was a member of a job's formed round."""

    job: JobId
    node: NodeName
    start_s: float
    end_s: float | None = None


class NodeTimeline(Struct, kw_only=True):
    spec: NodeSpec
    presences: list[Presence] = field(default_factory=list)
    holds: list[Hold] = field(default_factory=list)
    silent_since_s: float | None = None
    """Set while a restarted controller has not heard of it again."""


class Round(Struct, kw_only=True):
    """One formed round of a job. `n_before`: nodes of the round before, 0 for a start from nothing."""

    time_s: float
    round: int
    n_nodes: int
    n_before: int
    step: int
    took_s: float
    stall_s: float | None
    cause: str


class Profile(Struct, kw_only=True):
    """A time during which plans held a job at one size to measure it."""

    job: JobId
    n_nodes: int
    start_s: float
    end_s: float | None = None


class Solve(Struct, kw_only=True):
    time_s: float
    solve_s: float
    solver: str
    gap: float
    n_jobs: int


class JobTimeline(Struct, kw_only=True):
    """Lists of pairs are series of (time_s, value), in order of time; long ones are thinned by `note`."""

    job: JobId
    spec: JobSpec
    submitted_s: float
    phase: JobPhase = JobPhase.QUEUED
    """As far as events tell: starting and stopping are the controller's to know."""
    ended_s: float | None = None
    error: str = ""
    nodes: tuple[NodeName, ...] = ()
    """Members of its round now."""
    sizes: list[tuple[float, int]] = field(default_factory=list)
    """Steps: the size holds until the next entry."""
    rounds: list[Round] = field(default_factory=list)
    samples: int = 0
    """Of the model's lineage, as last reported."""
    step: int = 0
    epoch: int = 0
    samples_at: list[tuple[float, int]] = field(default_factory=list)
    samples_per_s: list[tuple[float, float]] = field(default_factory=list)
    """Settled throughput only."""
    metrics: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    scales: dict[int, ScaleStats] = field(default_factory=dict)
    """Settled throughput by size, from this job's own reports."""
    checkpoints: list[tuple[float, int]] = field(default_factory=list)
    """(time_s, step)."""
    deaths: list[tuple[float, str]] = field(default_factory=list)
    """(time_s, detail) of unplanned leaves of workers, one per node."""
    spans: list[ev.SamplesCommitted] = field(default_factory=list)
    """Its ledger, if the view keeps it."""
    dataset: ev.DatasetDescribed | None = None
    reason: str = ""
    """What the last plan said about it."""

    @property
    def n_rescales(self) -> int:
        """Changes of size while it trained, planned or forced: rounds formed from a round of another size."""
        return sum(1 for entry in self.rounds if entry.n_before not in (0, entry.n_nodes))

    @property
    def n_restarts(self) -> int:
        """Starts from nothing after the first: it had lost, or given up, all its nodes."""
        return max(0, sum(1 for entry in self.rounds if entry.cause == "start") - 1)

    @property
    def stalls_s(self) -> list[float]:
        """Time its surviving workers did not train, for each round that had survivors."""
        return [entry.stall_s for entry in self.rounds if entry.stall_s is not None]

    def metric(self, name: str) -> float | None:
        """Latest value, None when never reported."""
        series = self.metrics.get(name)
        return series[-1][1] if series else None
