"""How the CPUs of this machine are shared out among virtual nodes: by quota where we may, else by affinity."""

from __future__ import annotations

import os
from pathlib import Path

from .cgroup import CpuGroups, open_cpu_groups


class Shares:
    """`note` says in words where a node's share is not what it claims; empty when all is well."""

    def __init__(self, pool: str, run_dir: Path, n_nodes: int, node_cpus: float | None) -> None:
        self._pool, self._run_dir, self._n_nodes = pool, run_dir, n_nodes
        self._cpus = sorted(os.sched_getaffinity(0))
        self.node_cpus = node_cpus or min(1.0, len(self._cpus) / n_nodes)
        self._groups: CpuGroups | None = None
        self.note = ""

    @property
    def limited(self) -> bool:
        return self._groups is not None

    def open(self) -> None:
        """Look for a place to set quotas."""
        self._groups = open_cpu_groups(self._pool, self._run_dir)
        asked, there = self._n_nodes * self.node_cpus, len(self._cpus)
        over = f"{self._n_nodes} nodes of {self.node_cpus:g} CPUs share {there}"
        if self._groups is None:
            self.note = (
                "no CPU quota (cgroups are not writable for this user): nodes are bound to CPUs instead, and "
                + (f"are oversubscribed: {over}" if asked > there or self.node_cpus < 1 else "not limited otherwise")
            )
        else:
            self.note = f"nodes are oversubscribed: {over}" if asked > there + 1e-9 else ""

    def procs_file(self, node: str) -> list[Path]:
        """Files that the node's workers write their pid to: none where there are no quotas."""
        return [] if self._groups is None else [self._groups.create(node, self.node_cpus)]

    def lift(self, node: str) -> None:
        """Let the node's workers have what CPUs they can get: they are on their way out and hold nobody up. A worker
        of a whole machine would end its last step as quickly."""
        if self._groups is not None:
            self._groups.create(node, float(len(self._cpus)))

    def cpus_of(self, index: int) -> list[int]:
        """CPUs that node number `index` is bound to; empty: not bound. Nodes take turns around the machine."""
        if self._groups is not None:
            return []
        n = max(1, round(self.node_cpus))
        return sorted({self._cpus[(index * n + i) % len(self._cpus)] for i in range(n)})

    def kill(self, node: str, timeout_s: float) -> bool:
        """Kill what runs in the node's group; True when nothing does (or there is no group to look at)."""
        return self._groups is None or self._groups.kill(node, timeout_s)

    def inherit(self) -> list[int]:
        """Descriptors that agents must hold: as long as one lives, nobody takes our groups for leftovers."""
        return [self._groups.lock] if self._groups is not None and self._groups.lock >= 0 else []

    def close(self) -> None:
        if self._groups is not None:
            self._groups.close()
            self._groups = None
