"""PURE, given a seeded random source. Simulated workers: jobs train along their true curves, and pay for every change.

`SimExecutor` models an elastic runtime: a change of size stops the survivors for a while and then they train at the
new size; a start from nothing takes its time; nodes that vanish without a word cost what was not yet saved.
`published.PublishedExecutor` keeps the books as the published replay does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from sunfleck.cluster.base import Emit
from sunfleck.core.events import JobFinished, JobStopped, Progress, RoundFormed, WorkersLeft
from sunfleck.core.model import JobSpec

from .clock import Entry, Rank, VirtualClock
from .workload import SimJob

FIRST_REPORT_S = 2.0
REPORT_EVERY_S = 300.0
"""Reports of throughput come after 2, 4, 8 ... seconds at one size and then every 300 s."""


@dataclass
class Tally:
    """What became of the node-time: the raw figures of a report."""

    used_node_s: float = 0.0
    """Node-seconds held by jobs, training or not."""
    n_rescales: int = 0
    n_starts: int = 0
    lost_rescale: float = 0.0
    """Samples not trained because of planned changes of size and starts."""
    lost_reclaim: float = 0.0
    """Samples not trained, or trained in vain, because nodes were taken."""
    finished: list[tuple[float, str]] = field(default_factory=list)
    history: list[tuple[float, str, int]] = field(default_factory=list)
    """(time, job, nodes) at every change, for pictures."""


@dataclass
class Run:
    job: SimJob
    done: float = 0.0
    rate: float = 0.0
    """Samples/s now; 0 while it does not train."""
    since_s: float = 0.0
    """Up to when `done` is right."""
    nodes: frozenset[str] = frozenset()
    """Where it has workers."""
    training: frozenset[str] = frozenset()
    """Members of its last round."""
    round: int = -1
    stalled_s: float | None = None
    """Since when its survivors have not trained."""
    told_s: float = 0.0
    """When the present change was asked for."""
    saved: float = 0.0
    """Samples that survive the loss of all nodes."""
    saved_s: float = 0.0
    by_force: bool = False
    """Whether the present change is the cluster's doing."""
    reported: tuple[float, float] = (0.0, 0.0)
    """Time and samples of the last report."""
    report_gap_s: float = FIRST_REPORT_S
    form: Entry | None = None
    finish: Entry | None = None
    report: Entry | None = None
    over: bool = False


class SimExecutor:
    """Executor protocol on virtual time. `handback_s`: how long a worker takes to leave when it is asked to;
    `checkpoint_s`: how much training at most is lost with the last of a job's nodes (without notice)."""

    def __init__(
        self,
        jobs: Iterable[SimJob],
        clock: VirtualClock,
        emit: Emit,
        *,
        seed: int = 0,
        handback_s: float = 0.05,
        checkpoint_s: float = 60.0,
        reports: bool = True,
    ) -> None:
        self._clock = clock
        self._emit = emit
        self._runs = {job.name: Run(job) for job in jobs}
        self._rng = np.random.default_rng(seed)
        self._handback_s = handback_s
        self._checkpoint_s = checkpoint_s
        self._reports = reports
        self._seized: set[str] = set()
        """Nodes that the cluster has asked for or taken: leaving them is no choice of ours."""
        self.tally = Tally()

    # -- Executor protocol ---------------------------------------------------------------------------------------

    def rescale(self, job: str, spec: JobSpec, nodes: Sequence[str], grace_s: float) -> None:
        run = self._runs[job]
        if run.over:
            return
        now = self._clock.now()
        self._account(run)
        new, old = frozenset(nodes), run.nodes
        leaving = old - new
        run.by_force = run.by_force or bool(leaving & self._seized)
        self._hold(run, new)
        if leaving:
            self._leave(run, leaving)
        self._strike(run)
        if not new:
            if run.rate or run.stalled_s is not None:
                run.saved, run.saved_s = run.done, now  # saved on the way out
            self._stop_training(run)
            run.training = frozenset()
            run.stalled_s = None
            run.by_force = False
            return
        costs = run.job.costs
        if run.training & new:
            if new == run.training and run.rate:
                self._train(run)
                self._form(run, now, 0.0)
                return
            if run.by_force and run.training - old:
                wait_s = costs.preempt_s
            else:
                wait_s = costs.rescale_up_s if len(new) > len(run.training) else costs.rescale_down_s
            if run.stalled_s is None:
                run.stalled_s = now
        else:
            wait_s = costs.start_s
            run.stalled_s = None
        self._stop_training(run)
        run.told_s = now
        run.form = self._clock.at(now + wait_s, Rank.TRAINING, lambda: self._formed(run))

    def stop_job(self, job: str, grace_s: float, save: bool) -> None:
        run = self._runs[job]
        self._account(run)
        self._over(run)
        self._clock.at(self._clock.now() + self._handback_s, Rank.TRAINING, lambda: self._emit(JobStopped(job=job)))

    def stop(self) -> None:
        for run in self._runs.values():
            self._account(run)
            self._strike(run)

    # -- what the simulated cluster does to workers --------------------------------------------------------------

    def nodes_seized(self, nodes: Sequence[str]) -> None:
        """The cluster wants these nodes back; jobs will be told by the controller."""
        self._seized.update(nodes)

    def nodes_joined(self, nodes: Sequence[str]) -> None:
        self._seized.difference_update(nodes)

    def nodes_vanished(self, nodes: Sequence[str]) -> None:
        """Whatever ran there is dead, now."""
        gone = frozenset(nodes)
        for run in self._runs.values():
            dead = run.nodes & gone
            if not dead or run.over:
                continue
            self._account(run)
            self._strike(run)
            survivors = run.nodes - dead
            self._hold(run, survivors)
            run.by_force = True
            if run.training and not run.training & survivors:
                self._roll_back(run)
            elif run.training & dead and run.stalled_s is None:
                run.stalled_s = self._clock.now()
            self._stop_training(run)
            if run.training - gone == frozenset():
                run.training = frozenset()
                run.stalled_s = None

    def sample_counts(self) -> dict[str, float]:
        """Samples trained so far, by job."""
        return {name: min(run.done, run.job.samples) for name, run in self._runs.items()}

    # -- inside --------------------------------------------------------------------------------------------------

    def _account(self, run: Run) -> None:
        """Bring the samples and the books up to now."""
        now = self._clock.now()
        dt = now - run.since_s
        if dt > 0.0:
            run.done += dt * run.rate
            self.tally.used_node_s += dt * len(run.nodes)
            if not run.rate and run.nodes:
                # What its present nodes would have trained had the change cost nothing.
                lost = dt * run.job.curve.at(len(run.nodes))
                if run.by_force:
                    self.tally.lost_reclaim += lost
                else:
                    self.tally.lost_rescale += lost
            elif run.rate and now - run.saved_s >= self._checkpoint_s:
                run.saved_s = now - (now - run.saved_s) % self._checkpoint_s
                run.saved = run.done - (now - run.saved_s) * run.rate
        run.since_s = now

    def _hold(self, run: Run, nodes: frozenset[str]) -> None:
        if len(nodes) != len(run.nodes):
            self.tally.history.append((self._clock.now(), run.job.name, len(nodes)))
        run.nodes = nodes

    def _strike(self, run: Run) -> None:
        for entry in (run.form, run.finish, run.report):
            if entry is not None:
                entry.cancel()
        run.form = run.finish = run.report = None

    def _stop_training(self, run: Run) -> None:
        if run.rate and self._reports and self._clock.now() - run.reported[0] >= FIRST_REPORT_S:
            self._say(run)
        run.rate = 0.0

    def _roll_back(self, run: Run) -> None:
        """All its workers died at once: it goes on from its last checkpoint."""
        self.tally.lost_reclaim += run.done - run.saved
        run.done = run.saved

    def _leave(self, run: Run, leaving: frozenset[str]) -> None:
        event = WorkersLeft(job=run.job.name, nodes=tuple(sorted(leaving)), planned=True)
        self._clock.at(self._clock.now() + self._handback_s, Rank.TRAINING, lambda: self._emit(event))

    def _formed(self, run: Run) -> None:
        self._account(run)
        now = self._clock.now()
        stall_s = None if run.stalled_s is None else now - run.stalled_s
        if run.training:
            self.tally.n_rescales += 1
        else:
            self.tally.n_starts += 1
        self._train(run)
        self._form(run, run.told_s, stall_s)
        run.stalled_s = None
        run.by_force = False

    def _form(self, run: Run, told_s: float, stall_s: float | None) -> None:
        cause = "loss" if run.by_force and stall_s is not None else "rescale" if run.training else "start"
        run.training = run.nodes
        run.round += 1
        self._emit(
            RoundFormed(
                job=run.job.name,
                round=run.round,
                nodes=tuple(sorted(run.nodes)),
                step=int(run.done),
                took_s=self._clock.now() - told_s,
                stall_s=stall_s,
                cause=cause,
            )
        )

    def _train(self, run: Run) -> None:
        """Train on from now at the present size; agree on when it ends and when it reports."""
        now = self._clock.now()
        run.rate = run.job.curve.at(len(run.nodes))
        run.since_s = now
        if run.rate > 0.0:
            left_s = max(0.0, (run.job.samples - run.done) / run.rate)
            run.finish = self._clock.at(now + left_s, Rank.TRAINING, lambda: self._finished(run))
        if self._reports:
            run.reported = (now, run.done)
            run.report_gap_s = FIRST_REPORT_S
            self._plan_report(run)

    def _plan_report(self, run: Run) -> None:
        run.report = self._clock.at(self._clock.now() + run.report_gap_s, Rank.TRAINING, lambda: self._reported(run))
        run.report_gap_s = min(2 * run.report_gap_s, REPORT_EVERY_S)

    def _reported(self, run: Run) -> None:
        self._account(run)
        self._say(run)
        self._plan_report(run)

    def _say(self, run: Run) -> None:
        now = self._clock.now()
        dt = now - run.reported[0]
        per_s = (run.done - run.reported[1]) / dt
        run.reported = (now, run.done)
        self._progress(run, dt, per_s)

    def _finished(self, run: Run) -> None:
        self._account(run)
        run.done = run.job.samples
        self._over(run)
        self._emit(JobFinished(job=run.job.name))

    def _over(self, run: Run) -> None:
        self._strike(run)
        self._hold(run, frozenset())
        run.rate = 0.0
        run.over = True
        self.tally.finished.append((self._clock.now(), run.job.name))

    def _progress(self, run: Run, dt_s: float, per_s: float) -> None:
        if run.job.noise:
            per_s *= math.exp(run.job.noise * float(self._rng.standard_normal()))
        self._emit(
            Progress(
                job=run.job.name,
                round=run.round,
                n_nodes=len(run.training),
                step=int(run.done),
                epoch=0,
                samples=max(0, int(run.done)),
                dt_s=dt_s,
                samples_per_s=per_s,
            )
        )
