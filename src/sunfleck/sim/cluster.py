"""PURE. A simulated cluster: the nodes of an idle trace come and go as they did there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sunfleck.cluster.base import Emit
from sunfleck.core.events import NodesJoined, NodesLost, NodesReclaimed, NodesReleased
from sunfleck.core.model import NodeSpec

from .clock import Rank, VirtualClock
from .executor import SimExecutor
from .trace import IdleTrace, TraceEvent


class SimCluster:
    """Offers every idle node at once. With `grace_s` a reclaimed node is asked for and waited for, and taken by force
    when the grace is over; with None it is just gone, without a word, as in the published replay.

    The trace says when the main job wants the node. The time from then until the node is free is charged to us as
    hand-back (`handbacks_s`), and a node is not offered again before it was handed back. `before` is called at every
    instant of the trace, ahead of its nodes."""

    def __init__(
        self,
        trace: IdleTrace,
        clock: VirtualClock,
        emit: Emit,
        workers: SimExecutor,
        grace_s: float | None = 5.0,
        before: Callable[[], None] | None = None,
    ) -> None:
        self._clock = clock
        self._emit = emit
        self._workers = workers
        self._grace_s = grace_s
        self._before = before
        self._events = trace.events()
        self._specs = [NodeSpec(name=name) for name in trace.names]
        self._index = {name: i for i, name in enumerate(trace.names)}
        self._next = 0
        self._leaving: dict[str, float] = {}
        """Reclaimed and not yet handed back -> when it was reclaimed."""
        self._waiting: set[str] = set()
        """Idle again before it was handed back."""
        self.handbacks_s: list[float] = []
        self.n_forced = 0
        """Nodes taken by force at the end of their grace."""

    def start(self) -> None:
        self._schedule()

    def request(self, n_nodes: int) -> None:
        """The trace offers nodes by itself."""

    def release(self, nodes: Sequence[str]) -> None:
        now = self._clock.now()
        handed = [name for name in nodes if name in self._leaving]
        given_up = [name for name in nodes if name not in self._leaving]
        for name in handed:
            self.handbacks_s.append(now - self._leaving.pop(name))
        if handed or given_up:
            worst = max(self.handbacks_s[-len(handed) :]) if handed else None
            self._emit(NodesReleased(nodes=(*handed, *given_up), handback_s=worst))
        again = [name for name in handed if name in self._waiting]
        if again:
            self._waiting.difference_update(again)
            self._join(again)

    def stop(self) -> None:
        self._next = len(self._events)

    def _schedule(self) -> None:
        if self._next < len(self._events):
            self._clock.at(self._events[self._next].time_s, Rank.CLUSTER, self._instant)

    def _instant(self) -> None:
        event = self._events[self._next]
        self._next += 1
        self._schedule()
        if self._before is not None:
            self._before()
        if event.leaves:
            self._leave(event)
        if event.joins:
            specs = [self._specs[i] for i in event.joins]
            late = [spec.name for spec in specs if spec.name in self._leaving]
            self._waiting.update(late)
            self._join([spec.name for spec in specs if spec.name not in self._leaving])

    def _join(self, names: Sequence[str]) -> None:
        if names:
            self._workers.nodes_joined(names)
            self._emit(NodesJoined(nodes=tuple(self._specs[self._index[name]] for name in names)))

    def _leave(self, event: TraceEvent) -> None:
        names = tuple(self._specs[i].name for i in event.leaves)
        if self._grace_s is None:
            self._workers.nodes_vanished(names)
            self._emit(NodesLost(nodes=names, reason="taken by the cluster without notice"))
            return
        self._waiting.difference_update(names)
        fresh = tuple(name for name in names if name not in self._leaving)
        now = self._clock.now()
        self._leaving.update(dict.fromkeys(fresh, now))
        if fresh:
            self._clock.at(now + self._grace_s, Rank.CLUSTER, lambda: self._force(fresh, now))
            self._workers.nodes_seized(fresh)
            self._emit(NodesReclaimed(nodes=fresh, grace_s=self._grace_s, reason="wanted by a main job"))

    def _force(self, names: tuple[str, ...], since_s: float) -> None:
        late = tuple(name for name in names if self._leaving.get(name) == since_s)
        for name in late:
            self.handbacks_s.append(self._clock.now() - self._leaving.pop(name))
        if late:
            self.n_forced += len(late)
            self._workers.nodes_vanished(late)
            self._emit(NodesLost(nodes=late, reason="not handed back within its grace"))
            again = [name for name in late if name in self._waiting]
            self._waiting.difference_update(late)
            self._join(again)
