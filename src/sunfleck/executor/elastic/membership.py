"""PURE. Which workers a job has, and which of them train together: stimuli in, instructions out.

Every stimulus changes the known facts and then calls the one reconciliation (formation.py).

A worker: booting -> ready -> training -> gone, with `leaving` on the way out, and `unknown` for one that a new
controller finds and has asked who it is. A round is proposed to its members (FormRound), and formed when all of them
have joined. One proposal is in flight at a time; it is superseded at once when a member dies or must leave, while
newcomers wait for it to be formed.
"""

from __future__ import annotations

from collections.abc import Iterable

from sunfleck.core.events import CheckpointSaved, RoundFormed, WorkersLeft
from sunfleck.core.model import JobSpec
from sunfleck.executor.launch.wire import WorkerId

from .formation import Formation
from .roster import (
    DONE_GRACE_S,
    LOSS_PATIENCE_S,
    MAX_RESTART_DELAY_S,
    RESTART_DELAY_S,
    Ask,
    Emit,
    Ending,
    Instruction,
    Phase,
    Proposal,
    Worker,
)


class Membership(Formation):
    """The workers of one job. Methods are stimuli; each returns instructions, in order."""

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
            if worker.phase is Phase.LEAVING and worker.kill_at_s is not None and not worker.killed:
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
            Emit(
                WorkersLeft(
                    job=self.job,
                    nodes=(worker.node,),
                    planned=expected or by_itself,
                    detail="" if expected else _why(code),
                )
            )
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

    def status(
        self, worker: WorkerId, round_number: int, members: tuple[str, ...], step: int, now: float
    ) -> list[Instruction]:
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

    def joined(
        self, worker: WorkerId, round_number: int, step: int, stall_s: float | None, now: float
    ) -> list[Instruction]:
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

    def peer_lost(
        self, worker: WorkerId, round_number: int, step: int, now: float, *, store: bool = False
    ) -> list[Instruction]:
        """A collective failed there, or (`store`) the store could not be reached: then nobody needs to have died."""
        known = self.workers.get(str(worker))
        if known is None:
            return []
        known.step, known.heard_s = step, now
        if self.proposal is not None and self.proposal.number == round_number:
            self.proposal.joined.pop(known.name, None)
            self.proposal.formed = False
            if self._losing_since is None:
                self._losing_since = now
            if self._failed_s is None:
                self._failed_s = now - LOSS_PATIENCE_S if store else now
            if known.phase is Phase.TRAINING:
                self._set(known, Phase.READY, now)
        elif self.proposal is None and known.phase is Phase.TRAINING:
            self._set(known, Phase.READY, now)
        return self._reconcile(now)

    def committed(self, step: int, step_s: float) -> list[Instruction]:
        """Training goes on, at `step_s` a step: deaths before this do not count any more."""
        self.step_s = step_s or self.step_s
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

    # -- parts ------------------------------------------------------------------------------------------------------

    def _check_formed(self, now: float) -> None:
        proposal = self.proposal
        if proposal is None or proposal.formed or set(proposal.joined) != set(proposal.members):
            return
        proposal.formed, self._losing_since = True, None
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


def _why(code: int) -> str:
    if code < 0:
        return f"killed by signal {-code}"
    return f"ended with status {code}"
