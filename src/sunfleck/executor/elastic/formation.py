"""PURE. Reconciliation of a job's workers with its target: who shall train together now, and what is to be done for it.

Called after every stimulus (membership.py), it compares what is with what is wanted. Nothing is decided anywhere else,
so every wait has one place and one reason (`reason`).
"""

from __future__ import annotations

from sunfleck.core.events import AnyEvent, JobCrashed, JobFinished, JobStopped
from sunfleck.core.model import JobSpec
from sunfleck.executor.launch.wire import WorkerId

from .roster import (
    GATHER_S,
    KILL_AGAIN_S,
    LOSS_PATIENCE_S,
    SILENCE_S,
    UNKNOWN_S,
    Emit,
    End,
    Ending,
    Form,
    Instruction,
    Kill,
    Phase,
    Proposal,
    Start,
    Worker,
)


class Formation:
    """The facts about one job's workers, and their reconciliation. `now` is monotonic seconds everywhere."""

    def __init__(self, job: str, spec: JobSpec, last_round: int = -1) -> None:
        """`last_round`: highest round number this job has ever used; numbers only go up."""
        self.job = job
        self.spec = spec
        self.target: tuple[str, ...] = ()
        self.workers: dict[str, Worker] = {}
        self.proposal: Proposal | None = None
        self.round = last_round
        self.ending = Ending.NO
        self.reason = "no nodes yet"
        self._grace_s = 5.0
        self._asked_s: float | None = None
        self._save = True
        self._restarts: dict[str, int] = {}
        self._n_deaths = 0
        self._last_step = 0
        self._retry_at: dict[str, float] = {}
        self._failed_s: float | None = None
        self._lost_all = False
        self._losing_since: float | None = None
        """When a collective first failed, with no round formed since."""
        self._watched_s = 0.0
        self.step_s = 0.0
        self._gather_until: float | None = None
        self._end_by: float | None = None
        self._error = ""
        self._out: list[Instruction] = []

    def next_deadline(self) -> float | None:
        """When `tick` has something to do, if nothing else happens."""
        times = [w.kill_at_s for w in self.workers.values() if w.kill_at_s is not None]
        times += list(self._retry_at.values())
        if self._failed_s is not None:
            times.append(self._failed_s + LOSS_PATIENCE_S)
        if self._gather_until is not None:
            times.append(self._gather_until)
        if self._end_by is not None:
            times.append(self._end_by)
        if self.proposal is not None and not self.proposal.formed and self._failed_s is None:
            times.append(self._silence_ends(self.proposal))
        times += [w.since_s + UNKNOWN_S for w in self.workers.values() if w.phase is Phase.UNKNOWN]
        return min(times, default=None)

    # -- reconciliation --------------------------------------------------------------------------------------------

    def _reconcile(self, now: float) -> list[Instruction]:
        if self.ending is Ending.NO:
            self._start_missing(now)
            self._propose(now)
        else:
            self._wind_up(now)
        self._kill_late(now)
        out, self._out = self._out, []
        return out

    def _start_missing(self, now: float) -> None:
        occupied = {w.id.node for w in self.workers.values()}
        for node in self.target:
            if node in occupied:
                continue
            if self._retry_at.get(node, now) > now:
                continue
            self._retry_at.pop(node, None)
            self._restarts[node] = self._restarts.get(node, -1) + 1
            worker = Worker(WorkerId(job=self.job, node=node, restart=self._restarts[node]), Phase.BOOTING, now)
            self.workers[worker.name] = worker
            self._out.append(Start(worker.id))
        for node in list(self._retry_at):
            if node not in self.target:
                del self._retry_at[node]

    def _propose(self, now: float) -> None:
        for worker in self.workers.values():
            if worker.phase is Phase.UNKNOWN and now >= worker.since_s + UNKNOWN_S:
                self._set(worker, Phase.BOOTING, now)
        if any(w.phase is Phase.UNKNOWN for w in self.workers.values()):
            self.reason = "waiting for the workers found running to say where they stand"
            return
        target = set(self.target)
        proposal = self.proposal
        current = [self.workers[m] for m in proposal.members if m in self.workers] if proposal else []
        if proposal is not None and not current:
            self.proposal, proposal, self._lost_all = None, None, True
            self._failed_s = None
        n_dead = len(proposal.members) - len(current) if proposal else 0
        must_leave = [w for w in self.workers.values() if w.id.node not in target and w.phase is not Phase.LEAVING]
        if not target:
            self._leave_all(must_leave, now)
            return
        idle = [w for w in must_leave if w.phase is not Phase.TRAINING and not w.holds_state]
        self._dismiss(idle, now)
        must_leave = [w for w in must_leave if w not in idle]
        desired = self._desired(current, target)
        names = tuple(w.name for w in desired)
        if not desired:
            self._leave_all(must_leave, now)
            self.reason = self._boot_reason(now)
            return
        if not self._holders(desired) and self._holders(must_leave):
            # Nobody who knows anything stays: the state goes through a checkpoint, which the newcomers load.
            self._leave_all(must_leave, now)
            return
        if not self._holders(desired) and any(
            w.phase is Phase.LEAVING and w.holds_state and not w.left and not w.killed for w in self.workers.values()
        ):
            self.reason = "waiting for the workers that leave to save the state"
            return
        if proposal is not None and names == proposal.members and n_dead == 0:
            if self._failed_s is None:
                self._watch_silence(proposal, now)
                return
            if now < self._failed_s + LOSS_PATIENCE_S:
                self.reason = "a collective failed; waiting to learn who is lost"
                return
            self._send(desired, must_leave, "loss", now)
            return
        must_leave += [w for w in current if w not in desired and w not in must_leave and w.phase is not Phase.LEAVING]
        shrinks = bool(must_leave) or n_dead > 0
        grows = proposal is None or bool(set(names) - set(proposal.members))
        if grows and not shrinks:
            if proposal is not None and not proposal.formed and self._failed_s is None:
                self._watch_silence(proposal, now)
                self.reason = f"round {proposal.number} is being formed; newcomers wait for it"
                return
            if self._still_gathering(now):
                return
        self._gather_until = None
        if n_dead or self._failed_s is not None or self._lost_all:
            cause = "loss"
        else:
            cause = "rescale" if self._holders(desired) else "start"
        self._send(desired, must_leave, cause, now)

    def _desired(self, current: list[Worker], target: set[str]) -> list[Worker]:
        """Who shall train together now: members that stay first, in their order, then newcomers in the target's order;
        cut to a size that the job may have."""
        can = (Phase.READY, Phase.TRAINING)
        stay = [w for w in current if w.id.node in target and w.phase in can]
        place = {node: i for i, node in enumerate(self.target)}
        new = sorted(
            (w for w in self.workers.values() if w not in stay and w.id.node in target and w.phase in can),
            key=lambda w: (not w.holds_state, place[w.id.node]),
        )
        both = stay + new
        sizes = self.spec.sizes(len(both))
        return both[: sizes[-1]] if sizes else []

    def _still_gathering(self, now: float) -> bool:
        booting = [w for w in self.workers.values() if w.phase is Phase.BOOTING]
        if not booting:
            return False
        if self._gather_until is None:
            self._gather_until = now + GATHER_S
        if now >= self._gather_until:
            return False
        self.reason = f"waiting up to {GATHER_S} s for {', '.join(w.name for w in booting)}, to change size only once"
        return True

    def _send(self, desired: list[Worker], must_leave: list[Worker], cause: str, now: float) -> None:
        self.round += 1
        members = tuple(w.id for w in desired)
        leaving = [w for w in must_leave if w.phase is Phase.TRAINING]
        self._dismiss([w for w in must_leave if w.phase is not Phase.TRAINING], now)
        for worker in leaving:
            self._set(worker, Phase.LEAVING, now)
            worker.kill_at_s = now + self._grace_s
        began = self._failed_s if cause == "loss" else self._asked_s
        self.proposal = Proposal(
            self.round, tuple(w.name for w in desired), now, cause, began_s=now if began is None else began
        )
        self._failed_s, self._lost_all = None, False
        self._out.append(Form(to=tuple(w.id for w in (*desired, *leaving)), round=self.round, members=members))
        self.reason = f"round {self.round} is being formed"

    def _leave_all(self, workers: list[Worker], now: float) -> None:
        """Save and leave every node."""
        self.reason = "no nodes"
        in_round = [w for w in workers if w.phase is Phase.TRAINING]
        parked = [w for w in workers if w.phase is Phase.READY and w.holds_state]
        if in_round:
            self.round += 1
            # Members that lost a peer meanwhile are told too: they save what they hold.
            told = in_round + parked
            self._out.append(Form(to=tuple(w.id for w in told), round=self.round, members=()))
        else:
            told = parked
            newest = max((w.step for w in parked), default=0)
            saver = next((w for w in parked if w.step == newest), None)
            for worker in parked:
                self._out.append(End(worker.id, save=worker is saver))
        for worker in told:
            self._set(worker, Phase.LEAVING, now)
            worker.kill_at_s = now + self._grace_s
        self._dismiss([w for w in workers if w not in told], now)
        if workers:
            self.proposal = None
            self._failed_s = None

    def _dismiss(self, workers: list[Worker], now: float) -> None:
        """End workers that hold nothing worth saving."""
        for worker in workers:
            if worker.phase is Phase.LEAVING:
                continue
            self._set(worker, Phase.LEAVING, now)
            self._kill(worker, now)

    def _kill(self, worker: Worker, now: float) -> None:
        """Until its end is reported: a worker that was only just being started may have missed the first order."""
        worker.killed, worker.kill_at_s = True, now + KILL_AGAIN_S
        self._out.append(Kill(worker.id))

    def _watch_silence(self, proposal: Proposal, now: float) -> None:
        """A member that neither joins nor dies while the others wait for it hangs."""
        if proposal.formed:
            self.reason = f"trains in round {proposal.number}"
            return
        missing = [self.workers[m] for m in proposal.members if m not in proposal.joined]
        self.reason = f"round {proposal.number} is being formed: waiting for {', '.join(w.name for w in missing)}"
        if now < self._silence_ends(proposal):
            return
        proposal.sent_s = self._watched_s = now
        if proposal.cause == "loss":
            # Everybody else has said that the round before failed.
            since_s = proposal.began_s if self._losing_since is None else self._losing_since
            silent = [w for w in missing if w.heard_s < since_s]
            heard = [w for w in missing if w not in silent]
            if self._holders(silent) and not self._holders(heard):
                return  # it is the newcomers who lost patience; those who train may be in a long evaluation
        else:
            silent = missing
        if len(silent) < len(proposal.members):
            for worker in silent:
                if not worker.killed:
                    self._kill(worker, now)

    def _silence_ends(self, proposal: Proposal) -> float:
        """Longer than a step, because a worker only listens between steps. After a loss it counts from the last time
        that everybody trained, through rounds that could not be formed."""
        if proposal.cause != "loss":
            return proposal.sent_s + max(SILENCE_S, 5 * self.step_s)
        since_s = proposal.sent_s if self._losing_since is None else max(self._losing_since, self._watched_s)
        return since_s + max(SILENCE_S / 2, 5 * self.step_s)

    def _kill_late(self, now: float) -> None:
        for worker in self.workers.values():
            if worker.kill_at_s is not None and now >= worker.kill_at_s:
                self._kill(worker, now)

    def _wind_up(self, now: float) -> None:
        """The job ends: send everybody away, and say so when nobody is left."""
        living = [w for w in self.workers.values() if w.phase is not Phase.LEAVING]
        if self.ending is Ending.STOPPING and self._save:
            if not any(w.phase is Phase.UNKNOWN for w in living):
                self._leave_all(living, now)
        elif self.ending in (Ending.STOPPING, Ending.CRASHING) or (
            self.ending is Ending.FINISHING and self._end_by is not None and now >= self._end_by
        ):
            self._dismiss(living, now)
        if self._end_by is not None and now >= self._end_by:
            self._end_by = None
        if self.workers or self.ending is Ending.OVER:
            return
        event: AnyEvent
        if self.ending is Ending.FINISHING:
            event = JobFinished(job=self.job)
        elif self.ending is Ending.CRASHING:
            event = JobCrashed(job=self.job, error=self._error)
        else:
            event = JobStopped(job=self.job)
        self.ending, self.reason = Ending.OVER, "ended"
        self._out.append(Emit(event))

    # -- parts -----------------------------------------------------------------------------------------------------

    def _holders(self, workers: list[Worker]) -> bool:
        return any(w.holds_state for w in workers)

    def _boot_reason(self, now: float) -> str:
        booting = [w for w in self.workers.values() if w.phase is Phase.BOOTING]
        if booting:
            longest = max(now - w.since_s for w in booting)
            return f"waiting for {len(booting)} worker(s) to reach the first epoch (the oldest for {longest:.0f} s)"
        return f"too few workers are ready: the job takes at least {self.spec.min_nodes}"

    def _set(self, worker: Worker, phase: Phase, now: float) -> None:
        worker.phase, worker.since_s = phase, now
