"""PURE. Which workers a job has, and which of them train together: stimuli in, instructions out.

Every stimulus changes the known facts and then calls one reconciliation, which compares them with the target and says
what to do now. Nothing is decided anywhere else, so every wait has one place and one reason (`reason`).

A worker: booting -> ready -> training -> gone, with `leaving` on the way out, and `unknown` for one that a new
controller finds and has asked who it is. A round is proposed to its members (FormRound), and formed when all of them
have joined. One proposal is in flight at a time; it is superseded at once when a member dies or must leave, while
newcomers wait for it to be formed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from sunfleck.core.events import (
    AnyEvent,
    CheckpointSaved,
    JobCrashed,
    JobFinished,
    JobStopped,
    RoundFormed,
    WorkersLeft,
)
from sunfleck.core.model import JobSpec
from sunfleck.executor.launch.wire import WorkerId

GATHER_S = 0.3
"""Newcomers wait this long for others that are still booting, so that survivors are re-formed once for all of them."""
LOSS_PATIENCE_S = 0.5
"""After a failed collective, how long to wait for the news of who died before the round is formed with all that live."""
SILENCE_S = 10.0
"""How long members of a proposal may stay silent while others have joined or failed; then they hang and are killed."""
UNKNOWN_S = 2.0
"""A worker found by a new controller that has not said where it stands after this long is still on its way there."""
DONE_GRACE_S = 2.0
"""After the first worker has finished its program, how long the others may take."""
RESTART_DELAY_S = 0.25
"""Before a worker that died is started again (the first time: none); doubles with each death in a row, up to ..."""
MAX_RESTART_DELAY_S = 10.0


class Phase(StrEnum):
    UNKNOWN = "unknown"
    BOOTING = "booting"
    READY = "ready"
    TRAINING = "training"
    LEAVING = "leaving"


class Ending(StrEnum):
    NO = "no"
    STOPPING = "stopping"
    FINISHING = "finishing"
    CRASHING = "crashing"
    OVER = "over"


@dataclass
class Worker:
    id: WorkerId
    phase: Phase
    since_s: float
    holds_state: bool = False
    step: int = 0
    left: bool = False
    heard_s: float = 0.0
    """When it last said something of its membership."""
    kill_at_s: float | None = None
    killed: bool = False

    @property
    def name(self) -> str:
        return str(self.id)


@dataclass
class Proposal:
    number: int
    members: tuple[str, ...]
    sent_s: float
    cause: str
    began_s: float = 0.0
    """When the command or the loss that led to it came."""
    joined: dict[str, float | None] = field(default_factory=dict)
    """Members that train in it, with their stall_s."""
    step: int = 0
    formed: bool = False


# -- instructions --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """Start this worker."""

    worker: WorkerId


@dataclass(frozen=True)
class Form:
    """Tell these workers of a round. Without members: save and leave."""

    to: tuple[WorkerId, ...]
    round: int
    members: tuple[WorkerId, ...]


@dataclass(frozen=True)
class End:
    """Tell a worker to end at its next boundary."""

    worker: WorkerId
    save: bool


@dataclass(frozen=True)
class Kill:
    worker: WorkerId


@dataclass(frozen=True)
class Ask:
    """Ask a worker that we do not know who it is."""

    worker: WorkerId


@dataclass(frozen=True)
class Emit:
    event: AnyEvent


Instruction: TypeAlias = Start | Form | End | Kill | Ask | Emit


class Membership:
    """The workers of one job. Methods are stimuli; each returns instructions, in order. `now` is monotonic seconds."""

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
        self._step_s = 0.0
        self._gather_until: float | None = None
        self._end_by: float | None = None
        self._error = ""
        self._out: list[Instruction] = []

    # -- stimuli from the controller -------------------------------------------------------------------------------

    def rescale(self, spec: JobSpec, nodes: Iterable[str], grace_s: float, now: float) -> list[Instruction]:
        """The job shall run on exactly these nodes. Supersedes what was asked before."""
        if self.ending is not Ending.NO:
            return []
        before = set(self.target)
        self.spec, self.target, self._grace_s, self._asked_s = spec, tuple(nodes), grace_s, now
        self._gather_until = None
        empty = before - set(self.target) - {w.id.node for w in self.workers.values()}
        if empty:
            self._out.append(Emit(WorkersLeft(job=self.job, nodes=tuple(sorted(empty)), planned=True)))
        for node in set(self.target) - before:
            self._retry_at.pop(node, None)
        for worker in self.workers.values():
            if worker.phase is Phase.LEAVING and worker.kill_at_s is not None:
                worker.kill_at_s = min(worker.kill_at_s, now + grace_s)
        return self._reconcile(now)

    def stop(self, save: bool, grace_s: float, now: float) -> list[Instruction]:
        """End the job."""
        if self.ending in (Ending.NO, Ending.STOPPING):
            self.ending, self._save, self._grace_s, self.target = Ending.STOPPING, save, grace_s, ()
        return self._reconcile(now)

    # -- stimuli from agents ---------------------------------------------------------------------------------------

    def found(self, worker: WorkerId, now: float) -> list[Instruction]:
        """An agent says that this worker runs on its node (a new controller adopts what it finds)."""
        if str(worker) not in self.workers:
            self.workers[str(worker)] = Worker(worker, Phase.UNKNOWN, now)
            self._restarts[worker.node] = max(self._restarts.get(worker.node, -1), worker.restart)
            self._out.append(Ask(worker))
        return self._reconcile(now)

    def exited(self, worker: WorkerId, code: int, last_lines: str, now: float) -> list[Instruction]:
        """No process of this worker is left. `code` < 0: killed by that signal."""
        gone = self.workers.pop(str(worker), None)
        if gone is None:
            return []
        expected = gone.phase is Phase.LEAVING or gone.left or gone.killed or self.ending is not Ending.NO
        by_itself = code == 0 and not expected
        self._out.append(
            Emit(WorkersLeft(job=self.job, nodes=(worker.node,), planned=expected or by_itself, detail="" if expected else _why(code)))
        )
        if expected:
            if gone.left and worker.node in self.target and gone.phase is not Phase.LEAVING:
                self._retry_at[worker.node] = now + RESTART_DELAY_S  # its node told it to go; the controller will know
            return self._reconcile(now)
        if by_itself:
            return self._finish(now)
        if code > 0:
            where = "before it reached its first epoch" if gone.phase is Phase.BOOTING else "while training"
            return self._crash(f"worker {worker} ended with status {code} {where}\n{last_lines}".rstrip(), now)
        return self._died(worker, _why(code), now)

    def node_lost(self, node: str, now: float) -> list[Instruction]:
        """The node is gone, with whatever ran there."""
        lost = [w for w in self.workers.values() if w.id.node == node]
        for worker in lost:
            del self.workers[worker.name]
        self.target = tuple(n for n in self.target if n != node)
        if lost:
            self._out.append(Emit(WorkersLeft(job=self.job, nodes=(node,), planned=False, detail="node lost")))
        return self._reconcile(now)

    # -- stimuli from workers --------------------------------------------------------------------------------------

    def ready(self, worker: WorkerId, round_number: int, step: int, now: float) -> list[Instruction]:
        known = self._known(worker, now)
        self.round = max(self.round, round_number)
        known.holds_state, known.step, known.heard_s = round_number >= 0, step, now
        if known.phase in (Phase.BOOTING, Phase.UNKNOWN, Phase.READY):
            self._set(known, Phase.READY, now)
        return self._reconcile(now)

    def status(self, worker: WorkerId, round_number: int, members: tuple[str, ...], step: int, now: float) -> list[Instruction]:
        """A worker found by a new controller trains in this round."""
        known = self._known(worker, now)
        known.step, known.holds_state = step, True
        for name in members:  # whoever lives and is a member trains in it, even if it has had no time to say so
            member = self.workers.get(name)
            if member is not None and member.phase is Phase.UNKNOWN:
                self._set(member, Phase.TRAINING, now)
                member.holds_state = True
        if known.phase in (Phase.UNKNOWN, Phase.BOOTING):
            self._set(known, Phase.TRAINING, now)
        if self.proposal is None or self.proposal.number < round_number:
            self.proposal = Proposal(round_number, members, now, "rescale", began_s=now, step=step)
            self.round = max(self.round, round_number)
        if self.proposal.number == round_number:
            self.proposal.joined[known.name] = None
            self._check_formed(now)
        return self._reconcile(now)

    def joined(self, worker: WorkerId, round_number: int, step: int, stall_s: float | None, now: float) -> list[Instruction]:
        known = self.workers.get(str(worker))
        if known is None:
            return []
        known.step, known.holds_state, known.heard_s = step, True, now
        if known.phase in (Phase.READY, Phase.BOOTING, Phase.UNKNOWN):
            self._set(known, Phase.TRAINING, now)
        proposal = self.proposal
        if proposal is not None and proposal.number == round_number:
            proposal.joined[known.name] = stall_s
            proposal.step = max(proposal.step, step)
            self._check_formed(now)
        return self._reconcile(now)

    def peer_lost(self, worker: WorkerId, round_number: int, step: int, now: float) -> list[Instruction]:
        known = self.workers.get(str(worker))
        if known is None:
            return []
        known.step, known.heard_s = step, now
        if self.proposal is not None and self.proposal.number == round_number:
            self.proposal.joined.pop(known.name, None)
            self.proposal.formed = False
            if self._failed_s is None:
                self._failed_s = now
            if known.phase is Phase.TRAINING:
                self._set(known, Phase.READY, now)
        elif self.proposal is None and known.phase is Phase.TRAINING:
            self._set(known, Phase.READY, now)
        return self._reconcile(now)

    def committed(self, step: int, step_s: float) -> list[Instruction]:
        """Training goes on, at `step_s` a step: deaths before this do not count any more."""
        self._step_s = step_s or self._step_s
        if step > self._last_step:
            self._last_step, self._n_deaths = step, 0
        return []

    def left(self, worker: WorkerId, now: float) -> list[Instruction]:
        known = self.workers.get(str(worker))
        if known is not None:
            known.left = True
        return []

    def done(self, worker: WorkerId, now: float) -> list[Instruction]:
        """Its program says that it has ended. Believed when its exit status says the same."""
        return []

    def raised(self, worker: WorkerId, error: str, now: float) -> list[Instruction]:
        """The exit that follows carries the last lines of its log; until then this line stands."""
        if not self._error:
            self._error = f"worker {worker}: {error}"
        return []

    def saved(self, step: int, path: str) -> list[Instruction]:
        return [Emit(CheckpointSaved(job=self.job, step=step, path=path))]

    def tick(self, now: float) -> list[Instruction]:
        """Time has passed."""
        return self._reconcile(now)

    def next_deadline(self) -> float | None:
        """When `tick` has something to do, if nothing else happens."""
        times = [w.kill_at_s for w in self.workers.values() if w.kill_at_s is not None and not w.killed]
        times += list(self._retry_at.values())
        if self._failed_s is not None:
            times.append(self._failed_s + LOSS_PATIENCE_S)
        if self._gather_until is not None:
            times.append(self._gather_until)
        if self._end_by is not None:
            times.append(self._end_by)
        if self.proposal is not None and not self.proposal.formed and self._failed_s is None:
            times.append(self.proposal.sent_s + self._silence_s(self.proposal))
        times += [w.since_s + UNKNOWN_S for w in self.workers.values() if w.phase is Phase.UNKNOWN]
        return min(times, default=None)

    # -- endings ---------------------------------------------------------------------------------------------------

    def _finish(self, now: float) -> list[Instruction]:
        if self.ending is Ending.NO:
            self.ending, self.target, self._end_by = Ending.FINISHING, (), now + DONE_GRACE_S
        return self._reconcile(now)

    def _crash(self, error: str, now: float) -> list[Instruction]:
        if self.ending is Ending.NO:
            self.ending, self.target = Ending.CRASHING, ()
            self._error = f"{self._error}\n{error}" if self._error else error
        return self._reconcile(now)

    def _died(self, worker: WorkerId, why: str, now: float) -> list[Instruction]:
        self._n_deaths += 1
        if self._n_deaths > self.spec.max_restarts:
            return self._crash(
                f"worker {worker}: {why}; workers died {self._n_deaths} times without a committed step between "
                f"(max_restarts is {self.spec.max_restarts})",
                now,
            )
        doubled = RESTART_DELAY_S * 2.0 ** min(self._n_deaths - 2, 16)
        delay = 0.0 if self._n_deaths == 1 else min(MAX_RESTART_DELAY_S, doubled)
        self._retry_at[worker.node] = now + delay
        return self._reconcile(now)

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
        idle = [w for w in must_leave if w not in current and not (w.phase is Phase.READY and w.holds_state)]
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
            worker.killed = True
            self._out.append(Kill(worker.id))

    def _watch_silence(self, proposal: Proposal, now: float) -> None:
        """A member that neither joins nor dies while the others wait for it hangs."""
        if proposal.formed:
            self.reason = f"trains in round {proposal.number}"
            return
        missing = [self.workers[m] for m in proposal.members if m not in proposal.joined]
        self.reason = f"round {proposal.number} is being formed: waiting for {', '.join(w.name for w in missing)}"
        if now < proposal.sent_s + self._silence_s(proposal):
            return
        proposal.sent_s = now
        if proposal.cause == "loss":
            # Everybody else has said that the round before failed.
            silent = [w for w in missing if w.heard_s < proposal.began_s]
        else:
            silent = missing
        if len(silent) < len(proposal.members):
            for worker in silent:
                if not worker.killed:
                    worker.kill_at_s = None
                    self._out.append(Kill(worker.id))

    def _silence_s(self, proposal: Proposal) -> float:
        """Longer than a step, because a worker only listens between steps."""
        return max(SILENCE_S / 2 if proposal.cause == "loss" else SILENCE_S, 5 * self._step_s)

    def _kill_late(self, now: float) -> None:
        for worker in self.workers.values():
            if worker.kill_at_s is not None and now >= worker.kill_at_s and not worker.killed:
                worker.killed = True
                self._out.append(Kill(worker.id))

    def _wind_up(self, now: float) -> None:
        """The job ends: send everybody away, and say so when nobody is left."""
        living = [w for w in self.workers.values() if w.phase is not Phase.LEAVING]
        if self.ending is Ending.STOPPING and self._save:
            if not any(w.phase is Phase.UNKNOWN for w in living):
                self._leave_all(living, now)
        elif self.ending in (Ending.STOPPING, Ending.CRASHING):
            self._dismiss(living, now)
        elif self.ending is Ending.FINISHING and self._end_by is not None and now >= self._end_by:
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

    def _check_formed(self, now: float) -> None:
        proposal = self.proposal
        if proposal is None or proposal.formed or set(proposal.joined) != set(proposal.members):
            return
        proposal.formed = True
        stalls = [s for s in proposal.joined.values() if s is not None]
        nodes = tuple(self.workers[m].id.node for m in proposal.members if m in self.workers)
        if set(nodes) == set(self.target):
            self._asked_s = None
        self._out.append(
            Emit(
                RoundFormed(
                    job=self.job,
                    round=proposal.number,
                    nodes=nodes,
                    step=proposal.step,
                    took_s=max(0.0, now - proposal.began_s),
                    stall_s=max(stalls) if stalls else None,
                    cause=proposal.cause,
                )
            )
        )

    def _known(self, worker: WorkerId, now: float) -> Worker:
        if str(worker) not in self.workers:
            self.workers[str(worker)] = Worker(worker, Phase.UNKNOWN, now)
            self._restarts[worker.node] = max(self._restarts.get(worker.node, -1), worker.restart)
        return self.workers[str(worker)]

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


def _why(code: int) -> str:
    if code < 0:
        return f"killed by signal {-code}"
    return f"ended with status {code}"
