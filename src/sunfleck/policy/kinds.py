"""PURE. Allocation where nodes are of several kinds: a multi-dimensional multiple-choice knapsack, solved by HiGHS.

One binary per (job, kind, size), by counts; one row per job, one per kind:

    max sum v_jk x_jck   s.t.  sum_ck x_jck = 1 for every job,   sum_jk k x_jck <= nodes of kind c for every kind c

A job never mixes kinds (it trains at the pace of the slowest), and a running one stays on its kind, since a job only
adds or only drops nodes. A job that holds several kinds, from before kinds were told apart, keeps its size or stops.
Bounded in time, with the same rule as `milp`: the incumbent is used, and it starts from what runs. Where highspy is
not installed, the kinds are solved one by one, largest first: each exactly, the split between them not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from . import knapsack
from .knapsack import Infeasible, Table

TIME_LIMIT_S = 1.0


@dataclass(frozen=True)
class ByKind:
    """Size and kind of each job, and what is left of every kind."""

    sizes: tuple[int, ...]
    kinds: tuple[str | None, ...]
    left: dict[str, int]
    objective: float
    bound: float
    solver: str


@dataclass(frozen=True)
class Choice:
    """One column: a job's size on a kind (None: the mixture it holds, or no node at all)."""

    job: int
    size: int
    kind: str | None
    use: tuple[tuple[str, int], ...]
    value: float


def solve(
    tables: Sequence[Table],
    held: Sequence[Sequence[str]],
    nodes: Mapping[str, int],
    *,
    time_limit_s: float = TIME_LIMIT_S,
    exact: bool = True,
) -> ByKind:
    """The best allocation found. `held[j]`: kinds of the nodes job j holds; `nodes`: how many of each kind are there.

    Raises Infeasible when jobs that may not stop do not fit. exact=False: without HiGHS.
    """
    choices = [c for j, t in enumerate(tables) for c in _choices(j, t, held[j], nodes)]
    if {c.job for c in choices} != set(range(len(tables))):
        raise Infeasible("a job that may not stop does not fit on its kind of node")
    fallback = _one_by_one(tables, choices, nodes)
    # As if all nodes were of one kind: an upper bound.
    relaxed = knapsack.solve(tables, sum(nodes.values())).objective
    try:
        from . import milp
    except ImportError:
        exact = False
    if not exact:
        return _result(fallback, nodes, relaxed, "dp by kind")
    names = sorted(nodes)
    use = np.zeros((len(names), len(choices)))
    for column, c in enumerate(choices):
        for kind, n in c.use:
            use[names.index(kind), column] = n
    start = np.zeros(len(choices))
    chosen = set(fallback)
    for column, c in enumerate(choices):
        start[column] = float(c in chosen)
    picked, bound = milp.pick_one_each(
        np.array([c.job for c in choices]),
        np.array([c.value for c in choices]),
        use,
        np.array([float(nodes[kind]) for kind in names]),
        start,
        time_limit_s=time_limit_s,
    )
    return _result([choices[i] for i in picked], nodes, min(bound, relaxed), "highs")


def _choices(j: int, t: Table, held: Sequence[str], nodes: Mapping[str, int]) -> list[Choice]:
    kinds_held = sorted(set(held))
    result = []
    for size, value in zip(t.sizes.tolist(), t.values.tolist(), strict=True):
        if size == 0:
            result.append(Choice(j, 0, None, (), value))
        elif len(kinds_held) > 1:
            if size == len(held):
                use = tuple((kind, list(held).count(kind)) for kind in kinds_held)
                if all(n <= nodes.get(kind, 0) for kind, n in use):
                    result.append(Choice(j, size, None, use, value))
        else:
            for kind in kinds_held or sorted(nodes):
                if size <= nodes.get(kind, 0):
                    result.append(Choice(j, size, kind, ((kind, size),), value))
    return result


def _one_by_one(tables: Sequence[Table], choices: Sequence[Choice], nodes: Mapping[str, int]) -> list[Choice]:
    """A good feasible choice per job: mixtures stay, then each kind exactly, largest kind first, with the jobs bound
    to it and those still without nodes."""
    of_job: dict[int, list[Choice]] = {}
    for c in choices:
        of_job.setdefault(c.job, []).append(c)
    left = dict(nodes)
    chosen: dict[int, Choice] = {}
    for j, mine in of_job.items():
        mixed = [c for c in mine if c.size and c.kind is None]
        if mixed:
            chosen[j] = mixed[0]
            for kind, n in mixed[0].use:
                left[kind] -= n
    bound_to: dict[str, list[int]] = {kind: [] for kind in nodes}
    free = []
    for j, mine in of_job.items():
        own = {c.kind for c in mine if c.size}
        if j in chosen or not own:
            chosen.setdefault(j, next((c for c in mine if c.size == 0), mine[0]))
        elif len(own) == 1 and (tables[j].current > 0 or tables[j].sizes[0] > 0):
            bound_to[str(next(iter(own)))].append(j)
        else:
            free.append(j)
    for kind in sorted(nodes, key=lambda k: (-nodes[k], k)):
        members = sorted([*bound_to[kind], *(j for j in free if j not in chosen)])
        trial = []
        for j in members:
            mine = [c for c in of_job[j] if c.size == 0 or c.kind == kind]
            trial.append(Table.of([c.size for c in mine], [c.value for c in mine], tables[j].current))
        usable = [(j, t) for j, t in zip(members, trial, strict=True) if len(t.sizes)]
        found = knapsack.solve([t for _, t in usable], max(0, left[kind]))
        for (j, _), size in zip(usable, found.sizes, strict=True):
            if size:
                left[kind] -= size
                chosen[j] = next(c for c in of_job[j] if c.size == size and c.kind == kind)
    for j, mine in of_job.items():
        if j not in chosen:
            stop = next((c for c in mine if c.size == 0), None)
            if stop is None:
                raise Infeasible("jobs that may not stop do not fit on their kinds of nodes")
            chosen[j] = stop
    return [chosen[j] for j in range(len(tables))]


def _result(picked: Sequence[Choice], nodes: Mapping[str, int], bound: float, solver: str) -> ByKind:
    left = dict(nodes)
    for c in picked:
        for kind, n in c.use:
            left[kind] -= n
    worth = sum(c.value for c in picked)
    return ByKind(tuple(c.size for c in picked), tuple(c.kind for c in picked), left, worth, max(bound, worth), solver)
