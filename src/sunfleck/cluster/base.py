"""What a cluster adapter is: it says which nodes are ours and takes them back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from sunfleck.core.events import AnyEvent

Emit = Callable[[AnyEvent], None]
"""Puts an event into the engine's inbox. Thread-safe."""


class Cluster(Protocol):
    """Reports NodesJoined, NodesReclaimed, NodesLost and NodesReleased through `emit` given at construction."""

    def start(self) -> None:
        """Begin to offer nodes. Returns at once."""

    def request(self, n_nodes: int) -> None:
        """We could use `n_nodes` nodes in all."""

    def release(self, nodes: Sequence[str]) -> None:
        """Hand these nodes back now; report NodesReleased when nothing of ours is left on them."""

    def stop(self) -> None:
        """Hand everything back, end every process and thread of ours, remove what was made. Blocks, at most seconds."""
