"""PURE. Virtual time: the engine's clock and inbox, and an agenda of what is to happen when.

Time stands still while anything is left to be done at an instant, and then jumps to the next entry of the agenda.
Entries of one instant run in the order of their rank, then in the order in which they were made, so that a
simulation depends on nothing but its inputs.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from enum import IntEnum

from sunfleck.engine import Item


class Rank(IntEnum):
    """Order of what happens at the same instant."""

    TRAINING = 0
    """What workers have to say about the time that has passed."""
    CLUSTER = 1
    """Nodes that come and go."""
    USER = 2
    PLAN = 3
    """A plan is ready: after everything that would make it stale."""


Action = Callable[[], None]


class Entry:
    """One line of the agenda; it can be struck out."""

    __slots__ = ("action", "cancelled")

    def __init__(self, action: Action) -> None:
        self.action = action
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class OutOfTime(RuntimeError):
    """Nothing is left on the agenda and nobody waits for a time: the simulation can never end by itself."""


class VirtualClock:
    """The engine's Clock protocol over an agenda."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now = start_s
        self._inbox: list[Item] = []
        self._agenda: list[tuple[float, int, int, Entry]] = []
        self._serial = 0

    def now(self) -> float:
        return self._now

    def put(self, item: Item) -> None:
        self._inbox.append(item)

    def at(self, time_s: float, rank: Rank, action: Action) -> Entry:
        """Run `action` at that time, or at once (this instant) if it is past."""
        self._serial += 1
        entry = Entry(action)
        heapq.heappush(self._agenda, (max(time_s, self._now), rank, self._serial, entry))
        return entry

    def wait(self, until: float | None) -> Sequence[Item]:
        """Run the agenda until there is something in the inbox or `until` has come."""
        agenda = self._agenda
        while not self._inbox:
            while agenda and agenda[0][3].cancelled:
                heapq.heappop(agenda)
            if not agenda or (until is not None and agenda[0][0] > until):
                if until is None:
                    raise OutOfTime(f"nothing is left to happen after {self._now:.3f} s")
                self._now = max(self._now, until)
                return ()
            time_s, _, _, entry = heapq.heappop(agenda)
            self._now = time_s
            entry.action()
        items, self._inbox = self._inbox, []
        return items
