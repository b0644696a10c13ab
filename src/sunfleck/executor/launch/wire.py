"""PURE. Messages between controller, agents and workers, and their one codec (msgpack by msgspec).

Three parties: the controller's `fabric` (one ROUTER socket, CURVE-authenticated), one `agent` per node (DEALER),
and the workers on the node, each on its agent's Unix socket (SOCK_SEQPACKET in a 0700 folder: one packet is one
message; the first packet of a connection is the str of the worker's id). A worker never talks to the controller: the
agent wraps what it says in FromWorker and unwraps ToWorker, without looking inside.

A worker finds its place in its environment: SUNFLECK_WORKER (str of its id), SUNFLECK_JOB, SUNFLECK_NODE,
SUNFLECK_JOB_DIR (checkpoints; reachable from all nodes), SUNFLECK_NODE_CPUS, and SUNFLECK_AGENT_SOCKET (added by
the agent). Without SUNFLECK_AGENT_SOCKET a training script runs alone, as one ordinary process.

A worker is named by (job, node, restart): `WorkerId`. Messages on one connection arrive in the order they were sent.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

from sunfleck.core.model import NodeSpec, Program

PROTOCOL = 1
"""Raised by one with every incompatible change; a Hello of another number is refused with a reason."""


class Message(Struct, frozen=True, kw_only=True, tag=True, tag_field="m"):
    """Base of all messages."""


class WorkerId(Struct, frozen=True, kw_only=True):
    """One process that runs a job's program on a node; `restart` counts the starts on that node."""

    job: str
    node: str
    restart: int

    def __str__(self) -> str:
        return f"{self.job}@{self.node}#{self.restart}"


# -- agent -> controller -----------------------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True):
    """First message of an agent, and again after the controller was silent: who it is and what runs there."""

    protocol: int
    node: NodeSpec
    agent_pid: int
    workers: tuple[WorkerId, ...] = ()


class Heartbeat(Message, frozen=True, kw_only=True):
    """Agent is alive. Sent every `heartbeat_s`; several missed ones mean that the node is lost."""


class WorkerStarted(Message, frozen=True, kw_only=True):
    worker: WorkerId
    pid: int
    warm: bool
    """Forked from a zygote (True) or started as a new interpreter, for the reason in `detail`."""
    detail: str = ""


class WorkerExited(Message, frozen=True, kw_only=True):
    worker: WorkerId
    code: int
    """Exit status; negative: the signal that ended it."""
    last_lines: str = ""
    """Tail of its log when the code is not 0."""


class FromWorker(Message, frozen=True, kw_only=True):
    worker: WorkerId
    payload: AnyWorkerMessage


class Goodbye(Message, frozen=True, kw_only=True):
    """The agent is about to exit; nothing of ours is left on its node."""


# -- controller -> agent -----------------------------------------------------------------------------------------


class Welcome(Message, frozen=True, kw_only=True):
    """Answer to Hello."""

    heartbeat_s: float
    patience_s: float
    """How long the agent keeps its workers running without hearing from a controller before it ends them."""


class Refused(Message, frozen=True, kw_only=True):
    """Answer to Hello: go away, and why."""

    reason: str


class HeartbeatAck(Message, frozen=True, kw_only=True):
    pass


class SayHello(Message, frozen=True, kw_only=True):
    """Answer to whatever else comes from an agent that this controller does not know (it was restarted)."""


class StartWorker(Message, frozen=True, kw_only=True):
    worker: WorkerId
    program: Program
    env: dict[str, str]
    """Added to the program's environment."""
    log_path: str
    """File that takes stdout and stderr (appended)."""
    limited: bool = True
    """Whether it counts against the node's CPU quota; helper processes of ours do not."""


class ToWorker(Message, frozen=True, kw_only=True):
    worker: WorkerId
    payload: AnyWorkerCommand


class StopWorker(Message, frozen=True, kw_only=True):
    """TERM to the worker's process group now, KILL after grace_s (0: KILL now)."""

    worker: WorkerId
    grace_s: float


class LeaveNode(Message, frozen=True, kw_only=True):
    """End every worker within grace_s, then say Goodbye and exit."""

    grace_s: float


# -- worker -> controller (inside FromWorker) --------------------------------------------------------------------


class WorkerMessage(Struct, frozen=True, kw_only=True, tag=True, tag_field="m"):
    """Base of what workers say."""


class StoreReady(WorkerMessage, frozen=True, kw_only=True):
    """From the node's store process (elastic.store): the rendezvous store listens on this TCP port of the node."""

    port: int


class Status(WorkerMessage, frozen=True, kw_only=True):
    """Answer to Announce: the round it trains in (-1: none, it waits) and the members of that round."""

    round: int
    members: tuple[str, ...]
    step: int


class Ready(WorkerMessage, frozen=True, kw_only=True):
    """Model, data and optimizer exist; waits for FormRound. `round` is the last one it trained in (-1: none)."""

    round: int
    step: int
    """Step of the state it holds: 0 for a new model."""
    checkpoint_step: int | None
    """Step of the newest valid checkpoint it can load, if any."""
    n_samples: int
    epoch_hash: int
    batch: int


class RoundJoined(WorkerMessage, frozen=True, kw_only=True):
    """It trains in this round from `step` on. stall_s: since its last committed step (None for a newcomer)."""

    round: int
    step: int
    stall_s: float | None


class PeerLost(WorkerMessage, frozen=True, kw_only=True):
    """A collective of this round failed; it keeps its state at `step` and waits for the next FormRound."""

    round: int
    step: int
    error: str


class StepReport(WorkerMessage, frozen=True, kw_only=True):
    """From rank 0 of a round, a few times a second: what was committed since the last report.

    Fields as in core.events.Progress and SamplesCommitted.
    """

    round: int
    world: int
    step: int
    epoch: int
    samples: int
    dt_s: float
    samples_per_s: float | None
    step_s: float
    metrics: dict[str, float]
    spans: tuple[Span, ...] = ()


class Span(Struct, frozen=True, kw_only=True, array_like=True):
    """Ledger entry, within one epoch. Fields as in core.events.SamplesCommitted."""

    epoch: int
    step_from: int
    step_to: int
    cursor_from: int
    cursor_to: int
    n_samples: int
    index_hash: int


class CheckpointWritten(WorkerMessage, frozen=True, kw_only=True):
    step: int
    path: str


class Left(WorkerMessage, frozen=True, kw_only=True):
    """It is not a member of the round that begins at `step`; it exits now."""

    round: int
    step: int


class Done(WorkerMessage, frozen=True, kw_only=True):
    """The program has run to its end."""

    step: int


class Raised(WorkerMessage, frozen=True, kw_only=True):
    """The program raised; the traceback is in the log."""

    step: int
    error: str


# -- controller -> worker (inside ToWorker) ----------------------------------------------------------------------


class WorkerCommand(Struct, frozen=True, kw_only=True, tag=True, tag_field="m"):
    """Base of what workers are told."""


class FormRound(WorkerCommand, frozen=True, kw_only=True):
    """Next membership of the job. A worker that is no member leaves at the boundary; with no members at all, rank 0
    of the old round saves the state first. Rounds are numbered upwards; a higher one supersedes."""

    round: int
    members: tuple[str, ...]
    """str(WorkerId) of each, in order of rank."""
    store_host: str = ""
    store_port: int = 0
    timeout_s: float = 30.0


class EndProgram(WorkerCommand, frozen=True, kw_only=True):
    """Stop at the next boundary; rank 0 saves the state first if `save`."""

    save: bool


class Announce(WorkerCommand, frozen=True, kw_only=True):
    """Say who you are again (Status, Ready or StoreReady): the controller is new."""


class SaveNow(WorkerCommand, frozen=True, kw_only=True):
    """Write a checkpoint at the next boundary and go on."""


AgentMessage: TypeAlias = Hello | Heartbeat | WorkerStarted | WorkerExited | FromWorker | Goodbye
ControllerMessage: TypeAlias = (
    Welcome | Refused | HeartbeatAck | SayHello | StartWorker | ToWorker | StopWorker | LeaveNode
)
AnyWorkerMessage: TypeAlias = (
    StoreReady | Status | Ready | RoundJoined | PeerLost | StepReport | CheckpointWritten | Left | Done | Raised
)
AnyWorkerCommand: TypeAlias = FormRound | EndProgram | Announce | SaveNow

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message | WorkerMessage | WorkerCommand) -> bytes:
    """Message to bytes."""
    return _encoder.encode(message)


class Decoder:
    """Bytes to messages of one direction. Raises msgspec.DecodeError (or ValidationError) on anything else."""

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(kind)

    def __call__(self, data: bytes) -> Any:
        return self._decoder.decode(data)


decode_from_agent = Decoder(AgentMessage)
decode_from_controller = Decoder(ControllerMessage)
decode_from_worker = Decoder(AnyWorkerMessage)
decode_to_worker = Decoder(AnyWorkerCommand)
