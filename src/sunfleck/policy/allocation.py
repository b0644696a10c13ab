"""PURE. From the jobs' tables to sizes: priority classes, users and kinds of nodes around the exact knapsack.

- Classes: a higher class is served as if the lower ones were not there, then the next with what is left: the optimum
  in lexicographic order.
- Users: with fair_share a in (0, 1], the worth of user u's jobs together, x_u, counts as s^a x_u^(1 - a) / (1 - a)
  (at a = 1: s log(1 + x_u / s)), s being an equal share of what all could have. This is alpha-fairness; being a
  function of x_u alone it needs each user's best worth at every number of nodes, which the recursion yields anyway:
  a knapsack of knapsacks, still exact.
- Kinds: nodes of different kinds are not interchangeable. A job trains at the pace of its slowest node, so it never
  mixes kinds; a job that runs stays on its kind, one that starts may choose. See `kinds`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sunfleck.core.model import JobId, JobView, Snapshot

from . import kinds, knapsack
from .knapsack import Floats, Table


@dataclass(frozen=True)
class Found:
    """A size per job, in the order of the jobs; kinds: on which kind of node, where that matters."""

    sizes: tuple[int, ...]
    objective: float
    bound: float
    gap: float = 0.0
    solver: str = "dp"
    kinds: Mapping[JobId, str] | None = None


def allocate(snapshot: Snapshot, jobs: Sequence[JobView], tables: Sequence[Table], fair_share: float = 0.0) -> Found:
    """The best sizes. Raises knapsack.Infeasible when the smallest sizes do not fit."""
    kind_names = sorted({node.kind for node in snapshot.nodes})
    if len(kind_names) > 1:
        return _by_kind(snapshot, jobs, tables)
    classes = sorted({job.spec.priority for job in jobs}, reverse=True)
    sizes = [0] * len(jobs)
    left, objective, bound = len(snapshot.nodes), 0.0, 0.0
    for index, priority in enumerate(classes):
        members = [j for j, job in enumerate(jobs) if job.spec.priority == priority]
        # What may not be stopped below this class stays possible.
        lower = set(classes[index + 1 :])
        reserved = sum(int(t.sizes[0]) for t, job in zip(tables, jobs, strict=True) if job.spec.priority in lower)
        chosen, worth = _class(jobs, tables, members, left - reserved, fair_share)
        for j, n in zip(members, chosen, strict=True):
            sizes[j] = n
        left -= sum(chosen)
        objective += worth
        bound += worth
    return Found(tuple(sizes), objective, bound)


def _class(
    jobs: Sequence[JobView], tables: Sequence[Table], members: Sequence[int], n_nodes: int, fair_share: float
) -> tuple[tuple[int, ...], float]:
    mine = [tables[j] for j in members]
    users = list(dict.fromkeys(jobs[j].spec.user for j in members))
    if fair_share <= 0.0 or len(users) < 2:
        found = knapsack.solve(mine, n_nodes)
        return found.sizes, found.objective
    of_user = {user: [i for i, j in enumerate(members) if jobs[j].spec.user == user] for user in users}
    best = {user: knapsack.best_by_nodes([mine[i] for i in of_user[user]], n_nodes) for user in users}
    everything = max(float(np.nanmax(np.where(np.isfinite(b), b, np.nan))) for b in best.values())
    share = max(everything / len(users), 1e-12)
    outer = []
    for user in users:
        feasible = np.flatnonzero(np.isfinite(best[user]))
        if not len(feasible):
            raise knapsack.Infeasible(f"the smallest sizes of {user}'s jobs exceed {n_nodes} nodes")
        current = sum(mine[i].current for i in of_user[user])
        outer.append(Table(feasible, _utility(best[user][feasible], share, fair_share), current))
    shares = knapsack.solve(outer, n_nodes)
    sizes = [0] * len(members)
    worth = 0.0
    for user, n in zip(users, shares.sizes, strict=True):
        inner = knapsack.solve([mine[i] for i in of_user[user]], n)
        worth += inner.objective
        for i, size in zip(of_user[user], inner.sizes, strict=True):
            sizes[i] = size
    return tuple(sizes), worth


def _utility(worth: Floats, share: float, a: float) -> Floats:
    """Alpha-fair utility, extended linearly below 0 (a rescale may cost more than it brings)."""
    x = np.maximum(worth, 0.0)
    if a >= 1.0 - 1e-9:
        positive = share * np.log1p(x / share)
    else:
        positive = share**a * x ** (1.0 - a) / (1.0 - a)
    return np.asarray(positive + np.minimum(worth, 0.0))


def _by_kind(snapshot: Snapshot, jobs: Sequence[JobView], tables: Sequence[Table]) -> Found:
    """Kinds of nodes: classes of jobs in order, each on what the higher ones have left of every kind."""
    kind_of = {node.name: node.kind for node in snapshot.nodes}
    left: dict[str, int] = {}
    for kind in kind_of.values():
        left[kind] = left.get(kind, 0) + 1
    sizes = [0] * len(jobs)
    chosen: dict[JobId, str] = {}
    objective = bound = 0.0
    solver = "dp"
    for priority in sorted({job.spec.priority for job in jobs}, reverse=True):
        members = [j for j, job in enumerate(jobs) if job.spec.priority == priority]
        held = [[kind_of[name] for name in jobs[j].nodes if name in kind_of] for j in members]
        found = kinds.solve([tables[j] for j in members], held, left)
        for j, size, on in zip(members, found.sizes, found.kinds, strict=True):
            sizes[j] = size
            if size and on is not None:
                chosen[jobs[j].job] = on
        left = found.left
        objective += found.objective
        bound += found.bound
        solver = found.solver
    gap = max(0.0, bound - objective) / max(abs(objective), 1e-12)
    return Found(tuple(sizes), objective, bound, gap, solver, chosen)
