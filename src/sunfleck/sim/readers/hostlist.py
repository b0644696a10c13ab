"""Slurm's hostlists to names of nodes. Plain lists need nothing; ranges are ClusterShell's business."""

from __future__ import annotations

from functools import lru_cache

from sunfleck.core.errors import InvalidRequest

NONE = {"", "none", "(null)", "n/a", "none assigned", "unknown"}
"""What Slurm prints for a job that never had a node."""


@lru_cache(maxsize=65536)
def expand(hostlist: str) -> tuple[str, ...]:
    """Names in `cn[01-03],gpu7`, in order. Raises ValueError when it is malformed, and InvalidRequest when it has
    ranges and ClusterShell is not installed."""
    hostlist = hostlist.strip()
    if hostlist.lower() in NONE:
        return ()
    if "[" not in hostlist:
        return tuple(name.strip() for name in hostlist.split(",") if name.strip())
    try:
        from ClusterShell.NodeSet import NodeSet, NodeSetException  # type: ignore[import-untyped]
    except ImportError as error:
        raise InvalidRequest(
            f"node lists with ranges ({hostlist[:40]}) need ClusterShell: pip install clustershell"
        ) from error
    try:
        return tuple(str(name) for name in NodeSet(hostlist))
    except NodeSetException as error:
        raise ValueError(f"malformed node list {hostlist!r}: {error}") from error
