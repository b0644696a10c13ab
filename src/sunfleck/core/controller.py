"""PURE. The controller: events in, commands out. The same object drives the simulator, a laptop and a cluster.

Two speeds. A *reflex* answers at once and without the optimiser: a node is wanted back, so its job shrinks now. A
*plan* comes from the policy: `Solve` goes out with a snapshot and the state's generation, `PlanReady` comes back as an
event and is dropped when the generation has moved on. At most one Solve is under way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from . import events as e
from . import scales
from .commands import (
    AnyCommand,
    RequestNodes,
    Solve,
)
from .model import (
    Costs,
    JobPhase,
    JobSpec,
    NodeName,
    NodePhase,
    PlannedJob,
    Snapshot,
)
from .snapshots import Snapshots
from .state import JobState, NodeState, State
from .turn import Turn


@dataclass(frozen=True)
class ControllerConfig:
    """leave_grace_s: how long a worker that is asked to leave may take when nothing presses (a rescale, a cancel).
    reclaim_margin_s: a reclaimed node's worker must be gone this long before the cluster's own deadline.
    plan_retry_s: pause before the policy is asked again after it failed.
    min_dwell_s is the policy's business, not ours.
    """

    leave_grace_s: float = 10.0
    reclaim_margin_s: float = 0.5
    plan_retry_s: float = 1.0
    capacity: int | None = None
    """Most nodes this pool can ever have, where that is known."""
    costs: Costs = field(default_factory=Costs)
    """What a new job's changes of size are assumed to cost until they are measured."""


MIN_WEIGHT, MAX_WEIGHT = 1e-6, 1e6
"""A weight beyond (infinity, say) would drown every other job in rounding errors, or leave the policy no number."""


class Controller:
    """handle(event, now) -> commands. Total (any event in any state), deterministic, and free of side effects."""

    def __init__(self, config: ControllerConfig | None = None) -> None:
        self.config = config or ControllerConfig()
        self.state = State()
        self._turn = Turn(self.state, 0.0, self.config.leave_grace_s)
        self._snapshots = Snapshots()
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            e.PoolStarted: self._on_pool_started,
            e.ControllerRestarted: self._on_controller_restarted,
            e.TimeReached: self._on_time_reached,
            e.PoolStopRequested: self._on_pool_stop_requested,
            e.NodesJoined: self._on_nodes_joined,
            e.NodesReclaimed: self._on_nodes_reclaimed,
            e.NodesLost: self._on_nodes_lost,
            e.NodesReleased: self._on_nodes_released,
            e.JobSubmitted: self._on_job_submitted,
            e.JobCancelRequested: self._on_job_cancel_requested,
            e.RoundFormed: self._on_round_formed,
            e.WorkersLeft: self._on_workers_left,
            e.Progress: self._on_progress,
            e.SamplesCommitted: self._on_nothing,
            e.DatasetDescribed: self._on_nothing,
            e.CheckpointSaved: self._on_checkpoint_saved,
            e.JobFinished: self._on_job_finished,
            e.JobCrashed: self._on_job_crashed,
            e.JobStopped: self._on_job_stopped,
            e.PlanReady: self._on_plan_ready,
            e.PlanFailed: self._on_plan_failed,
        }

    def handle(self, event: e.AnyEvent, now: float, more: bool = False) -> list[AnyCommand]:
        """Fold one event into the state; say what is to be done about it, in order. `more`: further events of the
        same turn follow at once, so that a plan asked for now would only be out of date."""
        self._turn = Turn(self.state, now, self.config.leave_grace_s)
        self._handlers[type(event)](event)
        if not more:
            self._ask_for_plan()
        self._request_nodes()
        return self._turn.commands

    def refusal(self, spec: JobSpec) -> str | None:
        """Why this job can never run here, or None. Asked before JobSubmitted is made."""
        if spec.min_nodes < 1:
            return f"MIN must be at least 1 node, not {spec.min_nodes}"
        if spec.max_nodes < spec.min_nodes:
            return f"MAX ({spec.max_nodes}) is below MIN ({spec.min_nodes}); give --nodes MIN:MAX with MIN <= MAX"
        if spec.multiple < 1:
            return f"the node multiple must be at least 1, not {spec.multiple}"
        if not MIN_WEIGHT <= spec.weight <= MAX_WEIGHT:
            return f"the weight must be above 0, from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}, not {spec.weight:g}"
        for name in ("total_samples", "deadline_s"):
            value = getattr(spec, name)
            if value is not None and not 0 < value < math.inf:
                return f"{name} must be a number above 0, not {value}"
        capacity = self.config.capacity
        if capacity is not None and spec.min_nodes > capacity:
            return (
                f"it needs at least {spec.min_nodes} nodes and this pool has at most {capacity}; "
                f"lower MIN or start a larger pool"
            )
        return None

    def snapshot(self) -> Snapshot:
        """What a policy is shown of the present state."""
        return self._snapshots.take(self.state, self._turn.now)

    # -- pool ----------------------------------------------------------------------------------------------------

    def _on_nothing(self, event: e.AnyEvent) -> None:
        """The event concerns observers only."""

    def _on_pool_started(self, event: e.PoolStarted) -> None:
        self.state.pool = event.pool

    def _on_controller_restarted(self, event: e.ControllerRestarted) -> None:
        """What was replayed is memory, not fact: every node must call in again, and the executor must be told anew."""
        state = self.state
        state.solving = None
        state.stopping = state.stopped = False
        state.stop_deadline_s = None
        state.profiling = None
        state.n_requested = 0
        for node in state.nodes.values():
            node.phase = NodePhase.SILENT
            node.deadline_s = self._turn.now + event.patience_s
            node.released = False
        for job in state.active_jobs:
            job.requested = None
            if job.phase is JobPhase.STOPPING:
                self._turn.stop(job)
        if state.nodes:
            self._turn.wake_at(self._turn.now + event.patience_s)
        self._turn.changed()

    def _on_time_reached(self, event: e.TimeReached) -> None:
        state, now = self.state, self._turn.now
        silent = [
            name
            for name, node in state.nodes.items()
            if node.phase is NodePhase.SILENT and node.deadline_s is not None and node.deadline_s <= now
        ]
        if silent:
            self._turn.lose(silent)
        if state.review_s is not None and state.review_s <= now:
            state.review_s = None
            state.dirty = True
        if state.stopping:
            self._turn.finish_stopping()

    def _on_pool_stop_requested(self, event: e.PoolStopRequested) -> None:
        state = self.state
        if state.stopping:
            return
        state.stopping = True
        state.stop_deadline_s = self._turn.now + 2 * self.config.leave_grace_s
        state.profiling = None
        for job in state.active_jobs:
            if job.phase is not JobPhase.STOPPING:
                job.planned = frozenset()
                job.reason = "the pool is stopping; it goes on from its checkpoint when the pool is up again"
                self._turn.settle(job)
        self._turn.wake_at(state.stop_deadline_s)
        self._turn.finish_stopping()

    # -- nodes ---------------------------------------------------------------------------------------------------

    def _on_nodes_joined(self, event: e.NodesJoined) -> None:
        state = self.state
        state.history = state.history.joined(self._turn.now)
        for spec in event.nodes:
            old = state.nodes.get(spec.name)
            holder = event.holding.get(spec.name)
            if holder is not None and (holder not in state.jobs or state.jobs[holder].phase.final):
                holder = None
            if old is None:
                node = NodeState(spec=spec, joined_s=self._turn.now)
                state.nodes[spec.name] = node
            else:
                node = old
                node.spec = spec
                if node.job is not None and node.job != holder:
                    # Its worker died while no controller looked, or the agent itself was replaced.
                    self._turn.vacate(state.jobs[node.job], [spec.name])
                node.deadline_s = None
                node.reclaimed_s = None
                node.released = False
            node.job = holder
            node.phase = NodePhase.IDLE if holder is None else NodePhase.BUSY
            if holder is not None and spec.name not in state.jobs[holder].planned:
                # A worker that the plan does not know there: let the holder's next command end it.
                state.jobs[holder].requested = None
        for job in state.engaged_jobs:
            self._turn.settle(job)
        if state.stopping:
            self._turn.finish_stopping()
        self._turn.changed()

    def _on_nodes_reclaimed(self, event: e.NodesReclaimed) -> None:
        """The reflex: no solver between the cluster's wish and the shrink."""
        state = self.state
        self._remember_leave(event.nodes)
        touched: dict[str, JobState] = {}
        free: list[NodeName] = []
        engaged = state.engaged_jobs
        for name in event.nodes:
            node = state.nodes.get(name)
            if node is None or node.phase is NodePhase.LEAVING:
                continue
            state.n_reclaims += 1
            node.phase = NodePhase.LEAVING
            node.reclaimed_s = self._turn.now
            node.deadline_s = self._turn.now + event.grace_s
            for job in engaged:
                if name in job.planned:
                    job.planned -= {name}
                    job.reason = f"node {name} was reclaimed"
                    touched[job.job] = job
            if node.job is None:
                free.append(name)
            else:
                touched[node.job] = state.jobs[node.job]
        self._turn.release(free)
        for job in touched.values():
            self._turn.settle(job, grace_s=max(0.0, event.grace_s - self.config.reclaim_margin_s))
        if touched or free:
            self._turn.changed()

    def _on_nodes_lost(self, event: e.NodesLost) -> None:
        self._remember_leave(event.nodes)
        self._turn.lose(event.nodes)

    def _remember_leave(self, names: Sequence[NodeName]) -> None:
        """How long the nodes that the cluster takes now have stayed, for forecasts."""
        nodes = [self.state.nodes[name] for name in names if name in self.state.nodes]
        stays_s = [self._turn.now - node.joined_s for node in nodes if node.usable]
        if stays_s:
            self.state.history = self.state.history.left(stays_s)

    def _on_nodes_released(self, event: e.NodesReleased) -> None:
        self._turn.lose(event.nodes)

    # -- jobs ----------------------------------------------------------------------------------------------------

    def _on_job_submitted(self, event: e.JobSubmitted) -> None:
        state = self.state
        if event.job in state.jobs:
            return
        job = JobState(
            job=event.job,
            spec=event.spec,
            submitted_s=self._turn.now,
            phase_since_s=self._turn.now,
            costs=self.config.costs,
        )
        if event.spec.architecture:
            job.scales = state.architectures.setdefault(event.spec.architecture, {})
        state.add(job)
        self._turn.changed()

    def _on_job_cancel_requested(self, event: e.JobCancelRequested) -> None:
        job = self.state.jobs.get(event.job)
        if job is None or job.phase.final or job.phase is JobPhase.STOPPING:
            return
        job.reason = event.reason
        job.planned = frozenset()
        if job.phase in (JobPhase.QUEUED, JobPhase.PAUSED) and not self.state.held_by(job.job):
            job.requested = frozenset()
            job.move(JobPhase.CANCELLED, self._turn.now)
            self.state.retire(job)
        else:
            if job.phase is JobPhase.PAUSED:  # its last worker is still on its way out
                job.move(JobPhase.STARTING, self._turn.now)
            if job.phase is JobPhase.QUEUED:
                job.move(JobPhase.STARTING, self._turn.now)
            job.move(JobPhase.STOPPING, self._turn.now)
            self._turn.stop(job)
        self._turn.changed()

    def _on_round_formed(self, event: e.RoundFormed) -> None:
        job = self._turn.live_job(event.job)
        if job is None:
            return
        before, now_nodes = job.round_size, frozenset(event.nodes)
        if event.stall_s is not None:
            costs = job.costs
            if event.cause == "loss":
                costs = msgspec.structs.replace(costs, preempt_s=costs.preempt_s.observe(event.stall_s))
            elif len(now_nodes) > before:
                costs = msgspec.structs.replace(costs, rescale_up_s=costs.rescale_up_s.observe(event.stall_s))
            elif len(now_nodes) < before:
                costs = msgspec.structs.replace(costs, rescale_down_s=costs.rescale_down_s.observe(event.stall_s))
            job.costs = costs
        elif not before:
            job.costs = msgspec.structs.replace(job.costs, start_s=job.costs.start_s.observe(event.took_s))
        if event.cause == "rescale" and before and len(now_nodes) != before:
            job.n_rescales += 1
        if now_nodes != job.observed:
            job.size_since_s = self._turn.now
            job.samples_per_s = None
        job.observed = frozenset(n for n in now_nodes if n in self.state.nodes)
        job.round, job.round_size = event.round, len(now_nodes)
        job.progress_s = self._turn.now
        job.step = event.step
        job.trained = True
        if job.phase in (JobPhase.STARTING, JobPhase.RUNNING):
            job.move(JobPhase.RUNNING, self._turn.now)

    def _on_workers_left(self, event: e.WorkersLeft) -> None:
        state = self.state
        job = state.jobs.get(event.job)
        if job is None:
            return
        if not event.planned:
            job.n_losses += 1
        self._turn.vacate(job, event.nodes)
        if state.stopping:
            self._turn.finish_stopping()

    def _on_progress(self, event: e.Progress) -> None:
        job = self._turn.live_job(event.job)
        if job is None or event.round < job.round:
            return
        job.step, job.epoch, job.samples = event.step, event.epoch, event.samples
        job.progress_s = self._turn.now
        job.metrics.update(event.metrics)
        rate = event.samples_per_s
        if rate is not None and 0 < rate < math.inf and event.n_nodes == len(job.observed):
            job.samples_per_s = rate
            scales.observe(job.scales, event.n_nodes, rate, event.dt_s)
            self.state.n_measured += 1

    def _on_checkpoint_saved(self, event: e.CheckpointSaved) -> None:
        job = self.state.jobs.get(event.job)
        if job is not None:
            job.checkpoint_step = event.step

    def _on_job_finished(self, event: e.JobFinished) -> None:
        self._turn.end(event.job, JobPhase.FINISHED, "the program ended successfully")

    def _on_job_crashed(self, event: e.JobCrashed) -> None:
        self._turn.end(
            event.job, JobPhase.FAILED, event.error.splitlines()[0] if event.error else "failed", event.error
        )

    def _on_job_stopped(self, event: e.JobStopped) -> None:
        job = self._turn.live_job(event.job)
        if job is not None and job.phase is JobPhase.STOPPING:
            self._turn.end(event.job, JobPhase.CANCELLED, job.reason)

    # -- plans ---------------------------------------------------------------------------------------------------

    def _ask_for_plan(self) -> None:
        state = self.state
        if not state.dirty or state.solving is not None or state.stopping:
            return
        if any(node.phase is NodePhase.SILENT for node in state.nodes.values()):
            return  # a plan without them would shrink jobs that are running well
        state.dirty = False
        if not state.active:
            return
        state.solving = state.generation
        self._turn.commands.append(Solve(snapshot=self.snapshot()))

    def _request_nodes(self) -> None:
        state = self.state
        wanted = 0 if state.stopping else state.n_wanted
        if wanted != state.n_requested:
            state.n_requested = wanted
            self._turn.commands.append(RequestNodes(n_nodes=wanted))

    def _on_plan_failed(self, event: e.PlanFailed) -> None:
        state = self.state
        state.solving = None
        state.plan_error = event.error
        state.review_s = self._turn.now + self.config.plan_retry_s
        self._turn.wake_at(state.review_s)

    def _on_plan_ready(self, event: e.PlanReady) -> None:
        state = self.state
        state.solving = None
        if event.generation != state.generation or state.stopping:
            state.dirty = True
            return
        plan = event.plan
        state.plan_error = ""
        state.plan, state.plan_s, state.plan_solve_s = plan, self._turn.now, event.solve_s
        state.profiling = plan.profiling
        state.review_s = None
        if plan.review_after_s is not None:
            state.review_s = self._turn.now + plan.review_after_s
            self._turn.wake_at(state.review_s)
        wanted: dict[str, PlannedJob] = {given.job: given for given in plan.jobs}
        jobs: list[JobState] = []
        for job in state.active.values():
            given = wanted.get(job.job)
            if job.view is not None and (given is None or not given.nodes):  # it goes on waiting
                job.reason = given.reason if given else plan.waits
                continue
            if job.phase is JobPhase.STOPPING:
                continue
            job.reason = given.reason if given else plan.waits
            if (given and given.nodes) or job.planned or job.requested is None or job.requested:
                job.planned = frozenset(given.nodes) if given else frozenset()
                jobs.append(job)
        # Shrinks first: what they free at once (nodes never really used) is there for the others.
        for job in sorted(jobs, key=lambda j: len(j.planned) - len(j.requested or ())):
            self._turn.settle(job)
