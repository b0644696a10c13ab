"""PURE. The vocabulary of membership: workers and their phases, proposals of rounds, and what can be instructed."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from sunfleck.core.events import AnyEvent
from sunfleck.executor.launch.wire import WorkerId

GATHER_S = 0.3
"""Newcomers wait this long for others that are still booting, so that survivors stop once for all of them."""
LOSS_PATIENCE_S = 0.5
"""After a failed collective, how long to wait for news of who died before the round is formed with all that live."""
SILENCE_S = 10.0
"""How long members of a proposal may stay silent while others have joined or failed; then they hang and are killed."""
KILL_AGAIN_S = 1.0
"""A worker whose end has not been reported this long after it was to be killed is killed again."""
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
