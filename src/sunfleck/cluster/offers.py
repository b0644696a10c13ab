"""PURE. When virtual nodes are idle, and therefore ours: the schedule that a local cluster follows."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct


class Offer(Struct, frozen=True, kw_only=True):
    """Node number `node` is ours from start_s to end_s (seconds after the epoch of the schedule); it is asked back at
    end_s and must be free within grace_s after it."""

    start_s: float
    end_s: float
    node: int
    grace_s: float = 1.0


class Timetable:
    """The offers of one node, in order."""

    def __init__(self, offers: Sequence[Offer]) -> None:
        """Raises ValueError when two of them overlap or one is empty."""
        self.offers = sorted(offers, key=lambda offer: offer.start_s)
        for offer in self.offers:
            if offer.end_s <= offer.start_s:
                raise ValueError(f"offer of node {offer.node} ends at {offer.end_s:g} s, before it starts")
        for first, second in zip(self.offers, self.offers[1:], strict=False):
            if second.start_s < first.end_s:
                raise ValueError(f"offers of node {first.node} overlap at {second.start_s:g} s")

    def at(self, time_s: float) -> Offer | None:
        """The offer in force at this time."""
        for offer in self.offers:
            if offer.start_s <= time_s < offer.end_s:
                return offer
        return None

    def next_change_s(self, time_s: float) -> float | None:
        """The first start or end after this time."""
        times = [t for offer in self.offers for t in (offer.start_s, offer.end_s) if t > time_s]
        return min(times, default=None)
