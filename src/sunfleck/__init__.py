"""sunfleck: train neural networks on the idle nodes of a cluster, and launch thousands of processes in seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "InvalidRequest",
    "Job",
    "Pool",
    "PoolUnavailable",
    "SunfleckError",
    "Target",
    "__version__",
    "connect",
    "elastic",
    "up",
]

if TYPE_CHECKING:
    from sunfleck import elastic
    from sunfleck.api import Job, Pool, connect, up
    from sunfleck.core.errors import InvalidRequest, PoolUnavailable, SunfleckError
    from sunfleck.core.model import Target


def __getattr__(name: str) -> Any:
    """Import on first use: `import sunfleck` alone must cost nothing and need neither torch nor a running pool."""
    import importlib

    if name == "elastic":
        return importlib.import_module("sunfleck.elastic")
    if name in ("Job", "Pool", "connect", "up"):
        return getattr(importlib.import_module("sunfleck.api"), name)
    if name in ("SunfleckError", "InvalidRequest", "PoolUnavailable"):
        return getattr(importlib.import_module("sunfleck.core.errors"), name)
    if name == "Target":
        return importlib.import_module("sunfleck.core.model").Target
    raise AttributeError(f"module 'sunfleck' has no attribute {name!r}")
