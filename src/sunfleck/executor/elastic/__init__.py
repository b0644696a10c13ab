"""Elastic training: membership and supervisor (in the controller), trainer (in the workers), data and ledger (pure)."""

from __future__ import annotations

WARM = ("torch", "torch._dynamo", "sunfleck.executor.elastic.trainer")
"""What a zygote imports so that a forked worker can train at once: DistributedDataParallel loads torch._dynamo on first
use, which costs a cold process more than a second."""
