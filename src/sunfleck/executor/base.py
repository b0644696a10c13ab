"""What an executor adapter is, and what it stands on: the fabric that reaches the agents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from sunfleck.core.model import JobSpec

from .launch.wire import AgentMessage, ControllerMessage, Hello


class Executor(Protocol):
    """Reports RoundFormed, WorkersLeft, Progress, JobFinished ... through `emit` given at construction."""

    def rescale(self, job: str, spec: JobSpec, nodes: Sequence[str], grace_s: float) -> None:
        """Make the job run on exactly these nodes. Returns at once; supersedes an earlier call under way."""

    def stop_job(self, job: str, grace_s: float, save: bool) -> None:
        """End the job; report JobStopped when every worker is gone."""

    def stop(self) -> None:
        """End whatever still runs. Blocks, at most seconds."""


class AgentListener(Protocol):
    """Called in the fabric's thread. Must not block."""

    def on_agent_joined(self, hello: Hello) -> None:
        """An agent said Hello (again): its node is reachable now, with these workers on it."""

    def on_agent_message(self, node: str, message: AgentMessage) -> None:
        """Anything else that it says, in order."""

    def on_agent_lost(self, node: str, reason: str) -> None:
        """It missed its heartbeats, or said Goodbye (reason `goodbye`)."""


class Timer(Protocol):
    def cancel(self) -> None: ...


class Agents(Protocol):
    """The agents as the controller's process sees them. One thread of its own runs all callbacks, so listeners need
    no locks; `send` and `call_later` may only be used there, `post` from anywhere."""

    def subscribe(self, listener: AgentListener) -> None: ...

    def post(self, action: Callable[[], None]) -> None:
        """Run `action` in the fabric's thread, soon."""

    def send(self, node: str, message: ControllerMessage) -> None:
        """Queue a message for the node's agent; dropped silently when the node is not connected."""

    def call_later(self, delay_s: float, action: Callable[[], None]) -> Timer: ...

    def now(self) -> float:
        """Monotonic seconds."""
