"""PURE. From counts to nodes, without migration: a job only adds nodes, or only drops some.

Rules, all deterministic:

- A job keeps its nodes as far as its count allows; it drops those that leave soonest (of equals, the last by name).
- Nodes that nobody holds, and those just dropped, are given out latest-leaving first; of equals, nodes that are free
  now come before nodes that another job must leave first.
- Jobs that start choose before jobs that grow, in order of arrival: losing a node costs a growing job a rescale, but a
  job with few nodes may lose all it has.

Where every node is of one kind and nothing is known of departures, this fills idle nodes by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from sunfleck.core.model import JobId, NodeName, NodeView, Snapshot

Stay: TypeAlias = Callable[[NodeView], float]
"""Seconds a node is expected to stay from now on."""


def announced_stay(now_s: float) -> Stay:
    """What the cluster has said, and for ever where it has said nothing."""

    def stay_s(node: NodeView) -> float:
        return float("inf") if node.leaves_s is None else max(0.0, node.leaves_s - now_s)

    return stay_s


def place(
    snapshot: Snapshot,
    counts: Mapping[JobId, int],
    stay_s: Stay | None = None,
    kinds: Mapping[JobId, str] | None = None,
) -> dict[JobId, tuple[NodeName, ...]]:
    """Nodes of each job of the snapshot, sorted by name, so that job j has counts[j] of them (0 when missing).

    kinds: the kind of node that a job may add, where kinds matter. Raises ValueError when the counts exceed the nodes.
    """
    stay_s = stay_s or announced_stay(snapshot.now_s)
    nodes = {node.name: node for node in snapshot.nodes}
    stays = {name: stay_s(node) for name, node in nodes.items()}
    # A queue may hold thousands that have nothing and get nothing.
    jobs = [job for job in snapshot.jobs if job.nodes or counts.get(job.job)]
    if sum(counts.get(job.job, 0) for job in jobs) > len(nodes):
        raise ValueError(f"{sum(counts.values())} nodes planned, but there are {len(nodes)}")

    kept: dict[JobId, list[NodeName]] = {}
    taken: set[NodeName] = set()
    for job in jobs:
        held = [name for name in job.nodes if name in nodes and name not in taken]
        count = counts.get(job.job, 0)
        if count < len(held):
            held.sort(key=lambda name: (-stays[name], name))
            held = held[:count]
        kept[job.job] = held
        taken.update(held)

    ranked = [node for node in snapshot.nodes if node.name not in taken]
    ranked.sort(key=lambda node: (-stays[node.name], node.job is not None, node.name), reverse=True)
    free: dict[str, list[NodeView]] = {}
    for node in ranked:
        free.setdefault(node.kind if kinds is not None else "", []).append(node)
    starting = [job for job in jobs if not kept[job.job]]
    growing = [job for job in jobs if kept[job.job]]
    for job in (*starting, *growing):
        held = kept[job.job]
        while len(held) < counts.get(job.job, 0):
            held.append(free[kinds.get(job.job, "") if kinds is not None else ""].pop().name)
    placed: dict[JobId, tuple[NodeName, ...]] = dict.fromkeys([job.job for job in snapshot.jobs], ())
    placed.update((job, tuple(sorted(names))) for job, names in kept.items())
    return placed
