"""Between memberships and agents: instructions become wire messages, what workers say becomes stimuli and events.

Decides nothing about membership. Runs in the fabric's thread.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sunfleck.core.events import (
    AnyEvent,
    DatasetDescribed,
    JobCrashed,
    Progress,
    SamplesCommitted,
)
from sunfleck.core.model import JobSpec, NodeSpec, Program
from sunfleck.executor.base import Agents, Timer
from sunfleck.executor.launch.wire import (
    AgentMessage,
    Announce,
    AnyWorkerCommand,
    AnyWorkerMessage,
    CheckpointWritten,
    Done,
    EndProgram,
    FormRound,
    FromWorker,
    Hello,
    Left,
    PeerLost,
    Raised,
    Ready,
    RoundJoined,
    StartWorker,
    Status,
    StepReport,
    StopWorker,
    StoreReady,
    ToWorker,
    WorkerExited,
    WorkerId,
    WorkerStarted,
)

from . import warmed
from .membership import Membership
from .roster import Ask, Emit, End, Ending, Form, Instruction, Kill, Start
from .store import JOB as STORE_JOB
from .stores import Stores

log = logging.getLogger(__name__)

MIN_TIMEOUT_S, MAX_TIMEOUT_S = 30.0, 120.0
"""A rank that lets the others wait this long hangs: 30 steps, within these bounds; the longer until steps are measured
(a first step may compile the model)."""


@dataclass
class _Job:
    membership: Membership
    timer: Timer | None = None
    held: Form | None = None
    """A round that waits for a store."""
    described: DatasetDescribed | None = None
    failure: str = ""


class Supervisor:
    """All training jobs of a pool. An AgentListener."""

    def __init__(self, agents: Agents, emit: Callable[[AnyEvent], None], jobs_dir: Path) -> None:
        self._agents = agents
        self._emit = emit
        self._jobs_dir = jobs_dir
        self._jobs: dict[str, _Job] = {}
        self._nodes: dict[str, NodeSpec] = {}
        self._running: dict[str, set[WorkerId]] = {}
        self._stores = Stores(agents, jobs_dir, self._send_held)
        self._on_quiet: Callable[[], None] | None = None

    # -- from the controller ---------------------------------------------------------------------------------------

    def rescale(self, job: str, spec: JobSpec, nodes: Sequence[str], grace_s: float) -> None:
        now = self._agents.now()
        held = self._job(job, spec)
        if len(nodes) > 1 or held.membership.proposal is not None:
            for node in nodes:
                if node in self._nodes:
                    self._stores.want(self._nodes[node], _warm(spec))
        self._obey(job, held.membership.rescale(spec, nodes, grace_s, now))

    def stop_job(self, job: str, grace_s: float, save: bool) -> None:
        held = self._job(job, JobSpec(name=job))
        self._obey(job, held.membership.stop(save, grace_s, self._agents.now()))

    def stop(self, on_quiet: Callable[[], None]) -> None:
        """End every worker and store at once; call `on_quiet` when none is left."""
        self._on_quiet = on_quiet
        for held in self._jobs.values():
            if held.timer is not None:
                held.timer.cancel()
        self._jobs.clear()
        for node, workers in self._running.items():
            for worker in workers:
                self._agents.send(node, StopWorker(worker=worker, grace_s=0.0))
        self._check_quiet()

    def reason(self, job: str) -> str:
        """What a job waits for, in words."""
        held = self._jobs.get(job)
        return held.membership.reason if held is not None else "not running"

    # -- from the agents -------------------------------------------------------------------------------------------

    def on_agent_joined(self, hello: Hello) -> None:
        node = hello.node.name
        self._nodes[node] = hello.node
        before, now = self._running.get(node, set()), set(hello.workers)
        self._running[node] = now
        for worker in before - now:
            self._exited(worker, -9, "its agent does not know it any more")
        for worker in sorted(now - before, key=str):
            if worker.job == STORE_JOB:
                self._stores.found(hello.node, worker)
            elif worker.job in self._jobs:
                self._obey(worker.job, self._jobs[worker.job].membership.found(worker, self._agents.now()))

    def on_agent_message(self, node: str, message: AgentMessage) -> None:
        match message:
            case FromWorker(worker=worker, payload=payload):
                if isinstance(payload, StoreReady):
                    self._stores.ready(worker, payload.port)
                elif worker.job in self._jobs:
                    self._hear(worker, payload)
            case WorkerStarted(worker=worker):
                self._running.setdefault(node, set()).add(worker)
            case WorkerExited(worker=worker):
                self._running.get(node, set()).discard(worker)
                self._exited(worker, message.code, message.last_lines)
                self._check_quiet()

    def on_agent_lost(self, node: str, reason: str) -> None:
        self._nodes.pop(node, None)
        self._running.pop(node, None)
        self._stores.node_lost(node)
        for job in list(self._jobs):
            self._obey(job, self._jobs[job].membership.node_lost(node, self._agents.now()))
        self._check_quiet()

    # -- parts -----------------------------------------------------------------------------------------------------

    def _job(self, job: str, spec: JobSpec) -> _Job:
        held = self._jobs.get(job)
        if held is None:
            held = self._jobs[job] = _Job(Membership(job, spec, self._last_round(job)))
            now = self._agents.now()
            for workers in self._running.values():
                for worker in sorted(workers, key=str):
                    if worker.job == job:
                        self._obey(job, held.membership.found(worker, now))
        return held

    def _exited(self, worker: WorkerId, code: int, last_lines: str) -> None:
        if worker.job == STORE_JOB:
            self._stores.gone(worker)
        elif worker.job in self._jobs:
            membership = self._jobs[worker.job].membership
            self._obey(worker.job, membership.exited(worker, code, last_lines, self._agents.now()))

    def _hear(self, worker: WorkerId, payload: AnyWorkerMessage) -> None:
        job, now = worker.job, self._agents.now()
        held = self._jobs[job]
        membership = held.membership
        out: list[Instruction] = []
        match payload:
            case Ready():
                self._describe(job, held, payload)
                out = membership.ready(worker, payload.round, payload.step, now)
            case Status():
                out = membership.status(worker, payload.round, payload.members, payload.step, now)
            case RoundJoined():
                out = membership.joined(worker, payload.round, payload.step, payload.stall_s, now)
            case PeerLost():
                store = payload.error.startswith("the store at ")
                if store:
                    host, _, port = payload.error.removeprefix("the store at ").split(" ", 1)[0].rpartition(":")
                    self._stores.distrust(host, int(port) if port.isdigit() else 0)
                out = membership.peer_lost(worker, payload.round, payload.step, now, store=store)
            case StepReport():
                self._progress(job, payload)
                out = membership.committed(payload.step, payload.step_s)
            case CheckpointWritten():
                out = membership.saved(payload.step, payload.path)
            case Left():
                out = membership.left(worker, now)
            case Done():
                out = membership.done(worker, now)
            case Raised():
                out = membership.raised(worker, payload.error, now)
        self._obey(job, out)

    def _describe(self, job: str, held: _Job, ready: Ready) -> None:
        described = DatasetDescribed(job=job, n_samples=ready.n_samples, epoch_hash=ready.epoch_hash, batch=ready.batch)
        if described != held.described:
            held.described = described
            self._emit(described)

    def _progress(self, job: str, report: StepReport) -> None:
        for span in report.spans:
            self._emit(
                SamplesCommitted(
                    job=job,
                    round=report.round,
                    epoch=span.epoch,
                    step_from=span.step_from,
                    step_to=span.step_to,
                    cursor_from=span.cursor_from,
                    cursor_to=span.cursor_to,
                    n_samples=span.n_samples,
                    index_hash=span.index_hash,
                )
            )
        if report.dt_s <= 0 and report.spans:
            return  # an earlier round's ledger, said again
        self._emit(
            Progress(
                job=job,
                round=report.round,
                n_nodes=report.world,
                step=report.step,
                epoch=report.epoch,
                samples=report.samples,
                dt_s=report.dt_s,
                samples_per_s=report.samples_per_s,
                metrics=report.metrics,
            )
        )

    # -- instructions ----------------------------------------------------------------------------------------------

    def _obey(self, job: str, instructions: Sequence[Instruction]) -> None:
        held = self._jobs.get(job)
        if held is None:
            return
        for instruction in instructions:
            match instruction:
                case Start(worker=worker):
                    self._start(job, held, worker)
                case Form():
                    self._form(job, held, instruction)
                case End(worker=worker, save=save):
                    self._tell(worker, EndProgram(save=save))
                case Kill(worker=worker):
                    self._agents.send(worker.node, StopWorker(worker=worker, grace_s=0.0))
                case Ask(worker=worker):
                    self._tell(worker, Announce())
                case Emit(event=event):
                    self._emit(self._with_log(event))
        if held.membership.ending is Ending.OVER:
            if held.timer is not None:
                held.timer.cancel()
            del self._jobs[job]
            return
        self._arm(job, held)

    def _arm(self, job: str, held: _Job) -> None:
        if held.timer is not None:
            held.timer.cancel()
            held.timer = None
        deadline = held.membership.next_deadline()
        if deadline is not None:

            def tick() -> None:
                held.timer = None
                if self._jobs.get(job) is held:
                    self._obey(job, held.membership.tick(self._agents.now()))

            held.timer = self._agents.call_later(max(0.001, deadline - self._agents.now()), tick)

    def _start(self, job: str, held: _Job, worker: WorkerId) -> None:
        program = held.membership.spec.program or Program()
        program = msgspec.structs.replace(program, warm=warmed(program.warm))
        folder = self._jobs_dir / job
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        node = self._nodes.get(worker.node) or NodeSpec(name=worker.node)
        env = {
            "SUNFLECK_WORKER": str(worker),
            "SUNFLECK_JOB": job,
            "SUNFLECK_NODE": worker.node,
            "SUNFLECK_NODE_HOST": node.host,
            "SUNFLECK_NODE_CPUS": str(node.cpus),
            "SUNFLECK_JOB_DIR": str(folder),
        }
        self._running.setdefault(worker.node, set()).add(worker)
        self._agents.send(
            worker.node,
            StartWorker(worker=worker, program=program, env=env, log_path=str(self.log_path(worker))),
        )

    def log_path(self, worker: WorkerId) -> Path:
        return self._jobs_dir / worker.job / "logs" / f"{worker.node}.log"

    def _form(self, job: str, held: _Job, form: Form) -> None:
        self._write_round(job, form.round)
        held.held = None
        host, port = "", 0
        if len(form.members) > 1:
            for member in form.members:
                if member.node in self._nodes:
                    self._stores.want(self._nodes[member.node], _warm(held.membership.spec))
            address = self._stores.pick(tuple(m.node for m in form.members))
            if address is None:
                held.held = form
                return
            host, port = address
        command = FormRound(
            round=form.round,
            members=tuple(str(m) for m in form.members),
            store_host=host,
            store_port=port,
            timeout_s=_timeout_s(held.membership.step_s),
        )
        for worker in form.to:
            self._tell(worker, command)

    def _send_held(self) -> None:
        """A store is up: rounds that waited for one can be formed."""
        for job, held in list(self._jobs.items()):
            if held.held is not None:
                self._form(job, held, held.held)

    def _tell(self, worker: WorkerId, command: AnyWorkerCommand) -> None:
        self._agents.send(worker.node, ToWorker(worker=worker, payload=command))

    def _with_log(self, event: AnyEvent) -> AnyEvent:
        if isinstance(event, JobCrashed):
            return msgspec.structs.replace(event, error=f"{event.error}\nlogs: {self._jobs_dir / event.job / 'logs'}")
        return event

    def _check_quiet(self) -> None:
        if self._on_quiet is not None and not any(self._running.values()):
            on_quiet, self._on_quiet = self._on_quiet, None
            on_quiet()

    # -- round numbers survive the controller ------------------------------------------------------------------------

    def _last_round(self, job: str) -> int:
        try:
            return int((self._jobs_dir / job / "round").read_text())
        except (OSError, ValueError):
            return -1

    def _write_round(self, job: str, number: int) -> None:
        """The ledger orders rounds by number, so a job that is resumed by a new controller must not reuse one. A full
        disk must not keep a round from being formed: the few digits then go where the last ones are."""
        folder = self._jobs_dir / job
        beside = folder / f".round.{os.getpid()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                beside.write_text(str(number))
                os.replace(beside, folder / "round")
            except OSError:
                beside.unlink(missing_ok=True)
                with (folder / "round").open("r+") as file:
                    file.write(str(number))
        except OSError as error:
            log.warning("the number of round %d of %s cannot be kept: %s", number, job, error.strerror)


def _warm(spec: JobSpec) -> tuple[str, ...]:
    return warmed((spec.program or Program()).warm)


def _timeout_s(step_s: float) -> float:
    return min(MAX_TIMEOUT_S, max(MIN_TIMEOUT_S, 30 * step_s)) if step_s > 0 else MAX_TIMEOUT_S
