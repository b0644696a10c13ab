"""PURE. What one event does: the moves on the state from which every handler of the controller is made.

A turn lives for one event. Each of its moves changes the state and adds the commands that the change entails, so that
no handler can do the one and forget the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .commands import AnyCommand, ReleaseNodes, RescaleJob, StopJob, StopPool, WakeAt
from .model import JobPhase, NodeName, NodePhase
from .state import JobState, State


@dataclass
class Turn:
    state: State
    now: float
    leave_grace_s: float
    commands: list[AnyCommand] = field(default_factory=list)

    def changed(self) -> None:
        self.state.generation += 1
        self.state.dirty = True

    def wake_at(self, time_s: float) -> None:
        self.commands.append(WakeAt(time_s=time_s))

    def release(self, names: Iterable[NodeName]) -> None:
        fresh = [n for n in names if not self.state.nodes[n].released]
        for name in fresh:
            self.state.nodes[name].released = True
            self.state.nodes[name].phase = NodePhase.LEAVING
        if fresh:
            self.commands.append(ReleaseNodes(nodes=tuple(sorted(fresh))))

    def vacate(self, job: JobState, nodes: Iterable[NodeName]) -> None:
        """No process of this job is left there. A node that it still wants stays held: the executor restarts it."""
        state = self.state
        names = frozenset(nodes)
        job.observed -= names
        freed = []
        for name in sorted(names):
            node = state.nodes.get(name)
            if node is None or node.job != job.job or name in (job.requested or ()):
                continue
            node.job = None
            if node.phase is NodePhase.BUSY:
                node.phase = NodePhase.IDLE
                freed.append(name)
        self.release(
            name
            for name in sorted(names)
            if name in state.nodes and state.nodes[name].phase is NodePhase.LEAVING and state.nodes[name].job is None
        )
        if not job.observed and not job.phase.final:
            self.without_nodes(job)
        if freed:
            there = frozenset(freed)
            for other in state.active_jobs:
                if other.planned and other.planned & there:
                    self.settle(other)
            if any(state.nodes[name].job is None for name in freed):
                self.changed()

    def without_nodes(self, job: JobState) -> None:
        """It trains nowhere: waiting for workers, paused, or back in the queue."""
        if job.phase not in (JobPhase.STARTING, JobPhase.RUNNING):
            return
        job.samples_per_s, job.round_size = None, 0
        if job.requested:
            job.move(JobPhase.STARTING, self.now)
        elif job.requested is not None:
            job.move(JobPhase.PAUSED if job.trained else JobPhase.QUEUED, self.now)

    def settle(self, job: JobState, grace_s: float | None = None, force: bool = False) -> None:
        """Ask the executor for what is planned and can be had now: usable nodes that no other job holds."""
        state = self.state
        if job.phase.final or job.phase is JobPhase.STOPPING:
            return
        if any(state.nodes[n].phase is NodePhase.SILENT for n in job.planned):
            return
        there = [n for n in job.planned if state.nodes[n].usable and state.nodes[n].job in (None, job.job)]
        # Nodes it has first, so that a trimmed size keeps them.
        there.sort(key=lambda n: (state.nodes[n].job is None, n))
        sizes = job.spec.sizes(len(there))
        target = frozenset(there[: sizes[-1]]) if sizes else frozenset()
        waiting = len(there) < len(job.planned)
        if not target and waiting and not (job.requested and not job.requested <= job.planned):
            return  # too few yet; the others are being vacated for it
        if target == job.requested and not force:
            return
        if job.requested is None and not target and not state.held_by(job.job):
            job.requested = frozenset()
            self.without_nodes(job)
            return
        job.requested = target
        job.view = None
        for name in target:
            state.nodes[name].job = job.job
            state.nodes[name].phase = NodePhase.BUSY
        if target and job.phase in (JobPhase.QUEUED, JobPhase.PAUSED):
            job.move(JobPhase.STARTING, self.now)
        self.commands.append(
            RescaleJob(
                job=job.job,
                spec=job.spec,
                nodes=tuple(sorted(target)),
                grace_s=self.leave_grace_s if grace_s is None else grace_s,
            )
        )
        if not job.observed:
            self.without_nodes(job)

    def stop(self, job: JobState) -> None:
        job.requested = frozenset()
        self.commands.append(StopJob(job=job.job, grace_s=self.leave_grace_s))

    def lose(self, names: Iterable[NodeName]) -> None:
        state = self.state
        gone = [name for name in names if name in state.nodes]
        touched: list[JobState] = []
        holders = {state.nodes[n].job for n in gone}
        for job in state.active_jobs:
            if not (job.planned or job.observed or job.job in holders):
                continue
            mine = [n for n in gone if n in job.planned or n in job.observed or state.nodes[n].job == job.job]
            if mine:
                job.n_losses += 1
                job.planned -= frozenset(mine)
                if job.requested is not None:
                    job.requested -= frozenset(mine)
                job.observed -= frozenset(mine)
                touched.append(job)
        for name in gone:
            del state.nodes[name]
        for job in touched:
            if not job.phase.final:
                self.settle(job, force=True)
        if gone:
            self.changed()
        if state.stopping:
            self.finish_stopping()

    def end(self, name: str, phase: JobPhase, reason: str, error: str = "") -> None:
        job = self.live_job(name)
        if job is None:
            return
        if job.phase is JobPhase.QUEUED:  # a late word about workers that were already given up
            job.move(JobPhase.STARTING, self.now)
        job.move(phase, self.now)
        self.state.retire(job)
        job.reason, job.error = reason, error
        job.planned = job.requested = job.observed = frozenset()
        job.samples_per_s = None
        self.vacate(job, self.state.held_by(name))
        self.changed()
        if self.state.stopping:
            self.finish_stopping()

    def live_job(self, name: str) -> JobState | None:
        job = self.state.jobs.get(name)
        return None if job is None or job.phase.final else job

    def finish_stopping(self) -> None:
        """Release what nobody holds; end when nothing is left, or when time is up."""
        state = self.state
        self.release(n for n, node in state.nodes.items() if node.job is None)
        late = state.stop_deadline_s is not None and self.now >= state.stop_deadline_s
        if (not state.nodes or late) and not state.stopped:
            state.stopped = True
            self.commands.append(StopPool())
