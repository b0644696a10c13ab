"""Elastic training: membership and supervisor (in the controller), trainer (in the workers), data and ledger (pure)."""

from __future__ import annotations

WARM = "sunfleck.elastic"
"""What a zygote with torch imports besides, so that a forked worker can train at once: DistributedDataParallel loads
torch._dynamo on first use, which costs a cold process more than a second."""


def warmed(modules: tuple[str, ...]) -> tuple[str, ...]:
    """Modules to import before workers are forked. Jobs and stores of equal ones share a zygote."""
    return modules if WARM in modules or "torch" not in modules else (*modules, WARM)
