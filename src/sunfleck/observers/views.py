"""PURE. Folds of the journal: what happened to every node and every job, as plain values.

`PoolView` is fed every (time_s, event) once, in order, and can be looked at at any time: live, after a restart, or
years later from an archived journal. CLI, report, JSON and web are drawings of it. It never refuses an event: what
does not fit (an unknown job, a node that was never seen) is history all the same.

Everything is derived from events alone, so some things are not here: whether a plan was accepted or stale, and
what was commanded. Ask a running controller for those (`StatusView`, `ExplainView` in live.py, exported here too).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import Struct, field

from sunfleck.core import events as ev
from sunfleck.core.model import JobId, JobPhase, JobSpec, NodeName, NodeSpec, Profiling, ScaleStats, Target

from .live import CurvePoint, ExplainView, JobRow, NodeRow, PlanRow, StatusView
from .timelines import Hold, JobTimeline, NodeTimeline, Presence, Profile, Round, Solve, note

__all__ = [
    "CurvePoint",
    "ExplainView",
    "Hold",
    "JobRow",
    "JobTimeline",
    "NodeRow",
    "NodeTimeline",
    "PlanRow",
    "PoolView",
    "Presence",
    "Profile",
    "Round",
    "Solve",
    "StatusView",
    "Target",
    "fold",
]


class PoolView(Struct, kw_only=True):
    """The whole history of one pool."""

    pool: str = ""
    version: str = ""
    first_s: float | None = None
    last_s: float = 0.0
    open_spells: list[tuple[float, float | None]] = field(default_factory=list)
    """(start_s, end_s) of the times when work was welcome: from a start until `down`."""
    restarts_s: list[float] = field(default_factory=list)
    """When a new controller replayed this journal."""
    nodes: dict[NodeName, NodeTimeline] = field(default_factory=dict)
    jobs: dict[JobId, JobTimeline] = field(default_factory=dict)
    solves: list[Solve] = field(default_factory=list)
    plan_failures: list[tuple[float, str]] = field(default_factory=list)
    profiles: list[Profile] = field(default_factory=list)
    keep_ledger: bool = True
    """Whether jobs keep every SamplesCommitted, to be verified. A view that lives as long as its pool need not."""

    def add(self, time_s: float, event: ev.AnyEvent) -> None:
        """Fold one event in."""
        if self.first_s is None:
            self.first_s = time_s
            self.open_spells.append((time_s, None))
        handler = _HANDLERS.get(type(event))
        if handler is not None:
            handler(self, time_s, event)
        self.last_s = max(self.last_s, time_s)

    @property
    def started_s(self) -> float | None:
        """Time of the first event; None before it."""
        return self.first_s

    def handbacks_s(self) -> list[float]:
        """How long each hand-back of a reclaimed node took. What was released unasked, as by `down`, is not here."""
        return [
            stay.handback_s
            for node in self.nodes.values()
            for stay in node.presences
            if stay.reclaimed_s is not None and stay.handback_s is not None
        ]

    def job_called(self, name: str) -> JobTimeline | None:
        """By id, or else the newest job of that name."""
        if name in self.jobs:
            return self.jobs[name]
        named = [job for job in self.jobs.values() if job.spec.name == name]
        return named[-1] if named else None

    # -- engine --------------------------------------------------------------------------------------------------

    def on_pool_started(self, time_s: float, event: ev.PoolStarted) -> None:
        self.pool, self.version = event.pool, event.version
        self._welcome(time_s)

    def on_controller_restarted(self, time_s: float, event: ev.ControllerRestarted) -> None:
        self.restarts_s.append(time_s)
        self._welcome(time_s)
        for node in self.nodes.values():
            if _current(node) is not None:
                # Nobody watched since the last event; what the node did meanwhile is only believed if it calls in.
                node.silent_since_s = self.last_s

    def on_pool_stop_requested(self, time_s: float, event: ev.PoolStopRequested) -> None:
        start_s, end_s = self.open_spells[-1]
        self.open_spells[-1] = (start_s, time_s if end_s is None else end_s)
        self._profile(time_s, None)

    # -- cluster -------------------------------------------------------------------------------------------------

    def on_nodes_joined(self, time_s: float, event: ev.NodesJoined) -> None:
        for spec in event.nodes:
            node = self.nodes.setdefault(spec.name, NodeTimeline(spec=spec))
            node.spec = spec
            stay = _current(node)
            if stay is None:
                node.presences.append(Presence(start_s=time_s))
            else:
                hold = _holding(node)
                if hold is not None and event.holding.get(spec.name) != hold.job:
                    self._let_go(spec.name, time_s)
            node.silent_since_s = None

    def on_nodes_reclaimed(self, time_s: float, event: ev.NodesReclaimed) -> None:
        for name in event.nodes:
            stay = self._stay(name)
            if stay is not None and stay.reclaimed_s is None:
                stay.reclaimed_s, stay.grace_s = time_s, event.grace_s

    def on_nodes_lost(self, time_s: float, event: ev.NodesLost) -> None:
        self._end_stays(time_s, event.nodes, lost=True, handback_s=None)

    def on_nodes_released(self, time_s: float, event: ev.NodesReleased) -> None:
        self._end_stays(time_s, event.nodes, lost=False, handback_s=event.handback_s)

    # -- user ----------------------------------------------------------------------------------------------------

    def on_job_submitted(self, time_s: float, event: ev.JobSubmitted) -> None:
        self._job(time_s, event.job).spec = event.spec

    def on_job_cancel_requested(self, time_s: float, event: ev.JobCancelRequested) -> None:
        job = self.jobs.get(event.job)
        if job is not None and not job.phase.final:
            job.phase, job.ended_s, job.error = JobPhase.CANCELLED, time_s, event.reason

    # -- executor ------------------------------------------------------------------------------------------------

    def on_round_formed(self, time_s: float, event: ev.RoundFormed) -> None:
        job = self._job(time_s, event.job)
        job.rounds.append(
            Round(
                time_s=time_s,
                round=event.round,
                n_nodes=len(event.nodes),
                n_before=job.rounds[-1].n_nodes if job.rounds and event.cause != "start" else 0,
                step=event.step,
                took_s=event.took_s,
                stall_s=event.stall_s,
                cause=event.cause,
            )
        )
        self._move(time_s, job, event.nodes)
        for name in event.nodes:
            self.nodes[name].silent_since_s = None  # it trains, so it lives

    def on_workers_left(self, time_s: float, event: ev.WorkersLeft) -> None:
        job = self._job(time_s, event.job)
        if not event.planned:
            job.deaths.extend((time_s, f"{name}: {event.detail}" if event.detail else name) for name in event.nodes)
        self._move(time_s, job, tuple(name for name in job.nodes if name not in event.nodes))

    def on_progress(self, time_s: float, event: ev.Progress) -> None:
        job = self._job(time_s, event.job)
        job.samples, job.step, job.epoch = event.samples, event.step, event.epoch
        note(job.samples_at, time_s, event.samples)
        for name, value in event.metrics.items():
            note(job.metrics.setdefault(name, []), time_s, value)
        if event.samples_per_s is not None:
            note(job.samples_per_s, time_s, event.samples_per_s)
            scale = job.scales.get(event.n_nodes, ScaleStats(n_nodes=event.n_nodes))
            job.scales[event.n_nodes] = scale.add(event.samples_per_s, event.dt_s)

    def on_samples_committed(self, time_s: float, event: ev.SamplesCommitted) -> None:
        job = self._job(time_s, event.job)
        if self.keep_ledger:
            job.spans.append(event)

    def on_dataset_described(self, time_s: float, event: ev.DatasetDescribed) -> None:
        self._job(time_s, event.job).dataset = event

    def on_checkpoint_saved(self, time_s: float, event: ev.CheckpointSaved) -> None:
        self._job(time_s, event.job).checkpoints.append((time_s, event.step))

    def on_job_finished(self, time_s: float, event: ev.JobFinished) -> None:
        self._end_job(time_s, event.job, JobPhase.FINISHED)

    def on_job_crashed(self, time_s: float, event: ev.JobCrashed) -> None:
        self._end_job(time_s, event.job, JobPhase.FAILED, event.error)

    def on_job_stopped(self, time_s: float, event: ev.JobStopped) -> None:
        job = self._job(time_s, event.job)
        self._move(time_s, job, ())

    # -- planner -------------------------------------------------------------------------------------------------

    def on_plan_ready(self, time_s: float, event: ev.PlanReady) -> None:
        plan = event.plan
        self.solves.append(
            Solve(time_s=time_s, solve_s=event.solve_s, solver=plan.solver, gap=plan.gap, n_jobs=len(plan.jobs))
        )
        for planned in plan.jobs:
            job = self.jobs.get(planned.job)
            if job is not None:
                job.reason = planned.reason
        self._profile(time_s, plan.profiling)

    def on_plan_failed(self, time_s: float, event: ev.PlanFailed) -> None:
        self.plan_failures.append((time_s, event.error))

    # -- shared --------------------------------------------------------------------------------------------------

    def _welcome(self, time_s: float) -> None:
        if self.open_spells[-1][1] is not None:
            self.open_spells.append((time_s, None))

    def _job(self, time_s: float, job: JobId) -> JobTimeline:
        if job not in self.jobs:  # a journal with a gap: keep what is known
            self.jobs[job] = JobTimeline(job=job, spec=JobSpec(name=job), submitted_s=time_s, sizes=[(time_s, 0)])
        return self.jobs[job]

    def _stay(self, name: NodeName) -> Presence | None:
        node = self.nodes.get(name)
        return None if node is None else _current(node)

    def _let_go(self, name: NodeName, time_s: float) -> None:
        """End the hold on a node and take it out of its job's members; of a silent node, when it was last heard."""
        node = self.nodes.get(name)
        hold = None if node is None else _holding(node)
        if node is not None and hold is not None:
            hold.end_s = max(hold.start_s, _last_heard(node, time_s))
            job = self.jobs[hold.job]
            self._resize(hold.end_s, job, tuple(member for member in job.nodes if member != name))

    def _move(self, time_s: float, job: JobTimeline, nodes: tuple[NodeName, ...]) -> None:
        """The job's members are exactly these now."""
        for name in job.nodes:
            if name not in nodes:
                self._let_go(name, time_s)
        for name in nodes:
            node = self.nodes.setdefault(name, NodeTimeline(spec=NodeSpec(name=name)))
            hold = _holding(node)
            if hold is None or hold.job != job.job:
                self._let_go(name, time_s)
                node.holds.append(Hold(job=job.job, node=name, start_s=time_s))
        self._resize(time_s, job, nodes)

    def _resize(self, time_s: float, job: JobTimeline, nodes: tuple[NodeName, ...]) -> None:
        job.nodes = nodes
        time_s = max(time_s, job.sizes[-1][0])  # a silent node is let go at the time it was last seen
        if job.sizes[-1][1] != len(nodes):
            if job.sizes[-1][0] == time_s:
                job.sizes.pop()
            if not job.sizes or job.sizes[-1][1] != len(nodes):
                job.sizes.append((time_s, len(nodes)))
        if not job.phase.final:
            if nodes:
                job.phase = JobPhase.RUNNING
            elif job.rounds:
                job.phase = JobPhase.PAUSED

    def _end_stays(self, time_s: float, nodes: tuple[NodeName, ...], *, lost: bool, handback_s: float | None) -> None:
        for name in nodes:
            node, stay = self.nodes.get(name), self._stay(name)
            if node is None or stay is None:
                continue
            self._let_go(name, time_s)
            stay.end_s = max(stay.start_s, _last_heard(node, time_s))
            stay.lost, stay.handback_s = lost, handback_s
            node.silent_since_s = None

    def _end_job(self, time_s: float, name: JobId, phase: JobPhase, error: str = "") -> None:
        job = self._job(time_s, name)
        if not job.phase.final:
            job.phase, job.ended_s, job.error = phase, time_s, error
        self._move(time_s, job, ())

    def _profile(self, time_s: float, wanted: Profiling | None) -> None:
        last = self.profiles[-1] if self.profiles and self.profiles[-1].end_s is None else None
        if last is not None:
            if wanted is not None and (wanted.job, wanted.n_nodes) == (last.job, last.n_nodes):
                return
            last.end_s = time_s
        if wanted is not None:
            self.profiles.append(Profile(job=wanted.job, n_nodes=wanted.n_nodes, start_s=time_s))


def fold(entries: Iterable[tuple[float, ev.AnyEvent]]) -> PoolView:
    """The view after these (time_s, event)."""
    view = PoolView()
    for time_s, event in entries:
        view.add(time_s, event)
    return view


def _current(node: NodeTimeline) -> Presence | None:
    return node.presences[-1] if node.presences and node.presences[-1].end_s is None else None


def _last_heard(node: NodeTimeline, time_s: float) -> float:
    return time_s if node.silent_since_s is None else node.silent_since_s


def _holding(node: NodeTimeline) -> Hold | None:
    return node.holds[-1] if node.holds and node.holds[-1].end_s is None else None


_HANDLERS: dict[type, Any] = {
    ev.PoolStarted: PoolView.on_pool_started,
    ev.ControllerRestarted: PoolView.on_controller_restarted,
    ev.PoolStopRequested: PoolView.on_pool_stop_requested,
    ev.NodesJoined: PoolView.on_nodes_joined,
    ev.NodesReclaimed: PoolView.on_nodes_reclaimed,
    ev.NodesLost: PoolView.on_nodes_lost,
    ev.NodesReleased: PoolView.on_nodes_released,
    ev.JobSubmitted: PoolView.on_job_submitted,
    ev.JobCancelRequested: PoolView.on_job_cancel_requested,
    ev.RoundFormed: PoolView.on_round_formed,
    ev.WorkersLeft: PoolView.on_workers_left,
    ev.Progress: PoolView.on_progress,
    ev.SamplesCommitted: PoolView.on_samples_committed,
    ev.DatasetDescribed: PoolView.on_dataset_described,
    ev.CheckpointSaved: PoolView.on_checkpoint_saved,
    ev.JobFinished: PoolView.on_job_finished,
    ev.JobCrashed: PoolView.on_job_crashed,
    ev.JobStopped: PoolView.on_job_stopped,
    ev.PlanReady: PoolView.on_plan_ready,
    ev.PlanFailed: PoolView.on_plan_failed,
}
