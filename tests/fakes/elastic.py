"""A training job under test: starts it on fake agents, waits for its events, reads its ledger and its final weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from sunfleck.core.events import (
    AnyEvent,
    DatasetDescribed,
    JobCrashed,
    JobFinished,
    Progress,
    RoundFormed,
    SamplesCommitted,
)
from sunfleck.core.model import JobSpec, Program
from sunfleck.executor.elastic.data import Verdict, verify
from sunfleck.executor.launch.wire import WorkerId
from sunfleck.executor.live import LiveExecutor

from .agents import FakeAgents

SCRIPT = Path(__file__).parents[1] / "system" / "scripts" / "elastic_job.py"
E = TypeVar("E", bound=AnyEvent)


class World:
    """One executor over fake agents, and every event it emits."""

    def __init__(self, agents: FakeAgents, folder: Path) -> None:
        self.agents = agents
        self.folder = folder
        self.events: list[AnyEvent] = []
        self._changed = threading.Condition()
        self.executor = LiveExecutor(agents, self._emit, folder)

    def _emit(self, event: AnyEvent) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def new_controller(self) -> None:
        """The controller dies without a word, and another one starts."""
        self.agents.silence()
        self.executor = LiveExecutor(self.agents, self._emit, self.folder)

    def of(self, kind: type[E], job: str) -> list[E]:
        return [e for e in list(self.events) if isinstance(e, kind) and e.job == job]

    def wait(self, condition: Callable[[], Any], what: str, timeout_s: float = 40.0) -> Any:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not (value := condition()):
                left = deadline - time.monotonic()
                assert left > 0, f"not within {timeout_s} s: {what}\n" + "\n".join(map(str, self.events[-15:]))
                self._changed.wait(min(left, 0.05))
        return value

    def close(self) -> None:
        self.executor.stop()


class Job:
    def __init__(self, world: World, name: str, *args: str, min_nodes: int = 1, max_restarts: int = 3) -> None:
        self.world, self.name = world, name
        self.out = world.folder / f"{name}.pt"
        program = Program(script=str(SCRIPT), args=(*args, "--out", str(self.out)))
        self.spec = JobSpec(name=name, min_nodes=min_nodes, max_nodes=8, program=program, max_restarts=max_restarts)

    def rescale(self, *nodes: str, grace_s: float = 5.0) -> None:
        self.world.executor.rescale(self.name, self.spec, nodes, grace_s)

    def runs_on(self, *nodes: str) -> RoundFormed:
        """Rescale, and wait until it trains there."""
        n = len(self.rounds)
        self.rescale(*nodes)
        return self.wait_round(n, nodes)

    def wait_round(self, after: int, nodes: Sequence[str]) -> RoundFormed:
        def found() -> RoundFormed | None:
            return next((r for r in self.rounds[after:] if set(r.nodes) == set(nodes)), None)

        formed = self.world.wait(found, f"{self.name} trains on {nodes}")
        assert isinstance(formed, RoundFormed)
        return formed

    def trains(self, n_steps: int = 5) -> None:
        """Wait until it has committed some more steps."""
        at = self.step
        self.world.wait(lambda: self.over or self.step >= at + n_steps, f"{self.name} trains on from step {at}")

    def finish(self, timeout_s: float = 60.0) -> None:
        self.world.wait(lambda: self.over, f"{self.name} ends", timeout_s)
        crashed = self.world.of(JobCrashed, self.name)
        assert not crashed, crashed[0].error

    @property
    def over(self) -> bool:
        return bool(self.world.of(JobFinished, self.name) or self.world.of(JobCrashed, self.name))

    @property
    def rounds(self) -> list[RoundFormed]:
        return self.world.of(RoundFormed, self.name)

    @property
    def step(self) -> int:
        return max((p.step for p in self.world.of(Progress, self.name)), default=0)

    @property
    def workers(self) -> list[WorkerId]:
        return self.world.agents.workers(self.name)

    def worker_on(self, node: str) -> WorkerId:
        return next(w for w in self.workers if w.node == node)

    @property
    def ledger(self) -> Verdict:
        described = self.world.of(DatasetDescribed, self.name)
        return verify(self.world.of(SamplesCommitted, self.name), described[-1])
