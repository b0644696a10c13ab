"""The loop that is the same in every mode: wait -> handle -> record -> dispatch.

The engine owns no decision and no adapter: it is given a controller, a clock with its inbox, and something that
obeys each kind of command. Events of one turn are recorded before any command of that turn is obeyed, so that a
journal is never behind the world.
"""

from __future__ import annotations

import heapq
import itertools
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from sunfleck.cluster.base import Cluster, Emit
from sunfleck.core.commands import (
    AnyCommand,
    ReleaseNodes,
    RequestNodes,
    RescaleJob,
    Solve,
    StopJob,
    StopPool,
    WakeAt,
)
from sunfleck.core.controller import Controller
from sunfleck.core.events import AnyEvent, PlanFailed, PlanReady, TimeReached
from sunfleck.core.model import Snapshot
from sunfleck.executor.base import Executor
from sunfleck.policy.base import Policy


@dataclass(frozen=True)
class Call:
    """Run something between events, in the engine's thread: how queries read the state. Leaves no record."""

    action: Callable[[Controller, float], None]


@dataclass(frozen=True)
class Post:
    """An event whose sender wants to know when it is on record."""

    event: AnyEvent
    done: Callable[[], None]


Item: TypeAlias = AnyEvent | Call | Post


class Clock(Protocol):
    """Time and the inbox, wall or virtual."""

    def now(self) -> float:
        """Seconds; never goes back."""

    def put(self, item: Item) -> None:
        """Hand the engine something. Thread-safe on the wall clock."""

    def wait(self, until: float | None) -> Sequence[Item]:
        """Block until something is there or `until` has come (then empty). Items in order of arrival."""


class Planner(Protocol):
    def solve(self, snapshot: Snapshot) -> None:
        """Have PlanReady or PlanFailed of the snapshot's generation put into the inbox, sooner or later."""

    def stop(self) -> None: ...


class Observer(Protocol):
    def on_event(self, time_s: float, event: AnyEvent) -> None:
        """Every event, once, in order, after the controller has handled it and before its commands are obeyed."""

    def on_turn_end(self) -> None:
        """The turn's events are complete: make them durable."""


class WallClock:
    """Real time. Seconds since the Unix epoch, held back where the system's clock is set back."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._last = 0.0

    def now(self) -> float:
        self._last = max(self._last, time.time())
        return self._last

    def put(self, item: Item) -> None:
        self._inbox.put(item)

    def wait(self, until: float | None) -> Sequence[Item]:
        try:
            timeout = None if until is None else max(0.0, until - self.now())
            items = [self._inbox.get(timeout=timeout)]
        except queue.Empty:
            return ()
        while True:
            try:
                items.append(self._inbox.get_nowait())
            except queue.Empty:
                return items


def solve_now(policy: Policy, snapshot: Snapshot) -> PlanReady | PlanFailed:
    """One bounded call of the policy; whatever it raises becomes an event."""
    began = time.perf_counter()
    try:
        plan = policy.plan(snapshot)
    except Exception as error:
        traceback.print_exc()
        return PlanFailed(generation=snapshot.generation, error=f"{type(error).__name__}: {error}")
    return PlanReady(generation=snapshot.generation, plan=plan, solve_s=time.perf_counter() - began)


class ThreadPlanner:
    """Solves in a thread of its own, so that reflexes never wait for the optimiser."""

    def __init__(self, policy: Policy, emit: Emit) -> None:
        self._policy = policy
        self._emit = emit
        self._snapshots: queue.SimpleQueue[Snapshot | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="planner", daemon=True)
        self._thread.start()

    def solve(self, snapshot: Snapshot) -> None:
        self._snapshots.put(snapshot)

    def stop(self) -> None:
        self._snapshots.put(None)
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while (snapshot := self._snapshots.get()) is not None:
            self._emit(solve_now(self._policy, snapshot))


class Engine:
    """Runs until the controller says StopPool, or `interrupt` is called."""

    def __init__(
        self,
        controller: Controller,
        clock: Clock,
        planner: Planner,
        cluster: Cluster,
        executor: Executor,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.controller = controller
        self.clock = clock
        self.planner = planner
        self.cluster = cluster
        self.executor = executor
        self.observers = observers
        self.stopped = False
        self.faults: list[str] = []
        """What went wrong inside the engine itself, newest last; shown by `status`."""
        self._wakes: list[float] = []

    def run(self) -> None:
        while not self.stopped:
            self.turn()

    def turn(self) -> None:
        """One round of the loop: everything that has arrived, then one batch of commands."""
        items: Sequence[Item] = self.clock.wait(self._wakes[0] if self._wakes else None)
        now = self.clock.now()
        due = False
        while self._wakes and self._wakes[0] <= now:
            heapq.heappop(self._wakes)
            due = True
        commands: list[AnyCommand] = []
        recorded: list[Callable[[], None]] = []
        left = sum(not isinstance(item, Call) for item in items) + due
        for item in itertools.chain(items, [TimeReached()] if due else []):
            left -= not isinstance(item, Call)
            if isinstance(item, Call):
                self._guard(item.action, self.controller, now)
            elif isinstance(item, Post):
                commands += self._handle(item.event, now, left > 0)
                recorded.append(item.done)
            else:
                commands += self._handle(item, now, left > 0)
        for observer in self.observers:
            observer.on_turn_end()
        for done in recorded:
            self._guard(done)
        for command in commands:
            self._guard(self._obey, command)

    def interrupt(self) -> None:
        """End the loop after the present turn. Thread-safe."""

        def stop(controller: Controller, now: float) -> None:
            self.stopped = True

        self.clock.put(Call(stop))

    def _handle(self, event: AnyEvent, now: float, more: bool) -> list[AnyCommand]:
        try:
            commands = self.controller.handle(event, now, more)
        except Exception as error:
            # A bug of ours. Training goes on without us; the story must not be lost.
            self._fault(f"{type(event).__name__}: {type(error).__name__}: {error}")
            return []
        for observer in self.observers:
            observer.on_event(now, event)
        return commands

    def _obey(self, command: AnyCommand) -> None:
        match command:
            case Solve():
                self.planner.solve(command.snapshot)
            case RescaleJob():
                self.executor.rescale(command.job, command.spec, command.nodes, command.grace_s)
            case StopJob():
                self.executor.stop_job(command.job, command.grace_s, command.save)
            case ReleaseNodes():
                self.cluster.release(command.nodes)
            case RequestNodes():
                self.cluster.request(command.n_nodes)
            case WakeAt():
                heapq.heappush(self._wakes, command.time_s)
            case StopPool():
                self.stopped = True

    def _guard(self, action: Callable[..., None], *args: object) -> None:
        """An adapter that raises must not take the controller down with it."""
        try:
            action(*args)
        except Exception as error:
            self._fault(f"{type(error).__name__}: {error}")

    def _fault(self, what: str) -> None:
        traceback.print_exc(file=sys.stderr)
        self.faults = [*self.faults[-19:], what]
