"""PURE. The allocator's problem, a multiple-choice knapsack, and its exact solution by dynamic programming.

Every job offers a table of sizes it may take and what each is worth; one size per job is chosen so that the total
worth is largest and the sizes sum to at most the number of nodes. Nodes being interchangeable, this has the same
optima as the node-indexed MILP of MalleTrain and FreeTrain (ICPE 2024, CCGrid 2023). With f_j(m) the best worth of
the first j jobs on m nodes,

    f_j(m) = max over k in sizes_j of  f_{j-1}(m - k) + v_j(k)

which is one contiguous add and one maximum over m for each (j, k).

Two reductions come first; neither changes the optimum.

1. Lagrangian bound. For any price p >= 0 of a node, L(p) = p M + sum_j max_k (v_j(k) - p k) bounds the optimum from
   above. A size whose choice lowers L below the worth of a known allocation cannot be part of an optimal one and is
   struck out (Dudzinski and Walukiewicz, EJOR 28, 1987). Mostly a handful of sizes per job is left.
2. Reach. f_j(m) is only needed where the remaining jobs can still bring m to M: between M - (their largest sizes) and
   M - (their smallest sizes); and it is constant beyond the sum of the first j jobs' largest sizes.

Ties, in this order, deterministic: jobs choose in order of arrival; among sizes that leave the total worth the same
(to 1e-10 of it), a job that runs keeps its size, then takes the size nearest to it; a job that does not run takes
the size that is worth most to itself, then the smallest such.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TIE = 1e-10
"""Worths that differ by less than this fraction of the total are equal."""
_PRICE_STEPS = 40
_FILL_STEPS = 64


@dataclass(frozen=True, eq=False)
class Table:
    """One job's choices: ascending sizes (0 first, unless the job must not stop) and their worth."""

    sizes: Ints
    values: Floats
    current: int = 0
    """The size it has now, for ties and for the incumbent."""

    @staticmethod
    def of(sizes: Sequence[int], values: Sequence[float], current: int = 0) -> Table:
        return Table(np.asarray(sizes, dtype=np.int64), np.asarray(values, dtype=np.float64), current)

    def value_at(self, size: int) -> float:
        """Worth of one of its sizes. Raises KeyError for any other."""
        i = int(np.searchsorted(self.sizes, size))
        if i == len(self.sizes) or self.sizes[i] != size:
            raise KeyError(size)
        return float(self.values[i])


@dataclass(frozen=True)
class Allocation:
    """A size per table, in the order of the tables; objective, bound and gap as HiGHS names them."""

    sizes: tuple[int, ...]
    objective: float
    bound: float
    gap: float = 0.0
    solver: str = "dp"
    note: str = ""


class Infeasible(ValueError):
    """The smallest sizes of all jobs together exceed the nodes."""


def solve(tables: Sequence[Table], n_nodes: int, *, reduce: bool = True) -> Allocation:
    """The optimal allocation of `n_nodes` nodes. Raises Infeasible when the smallest sizes do not fit.

    Time O(sum_j |sizes_j| n_nodes) at worst, a few numpy calls per size left by the reductions; memory
    8 len(tables) n_nodes bytes. `reduce=False` skips the Lagrangian reduction (for tests and measurements).
    """
    if sum(int(t.sizes[0]) for t in tables) > n_nodes:
        raise Infeasible(f"the smallest sizes of {len(tables)} jobs together exceed {n_nodes} nodes")
    if not tables:
        return Allocation((), 0.0, 0.0)
    choices = _reduced(tables, n_nodes) if reduce else [(t.sizes, t.values) for t in tables]
    sizes = _dynamic_program(choices, [t.current for t in tables], n_nodes)
    objective = float(sum(t.value_at(k) for t, k in zip(tables, sizes, strict=True)))
    return Allocation(tuple(sizes), objective, objective)


def _dynamic_program(choices: Sequence[tuple[Ints, Floats]], current: Sequence[int], n_nodes: int) -> list[int]:
    """The forward recursion over jobs in reverse order of arrival, then the choices in order of arrival."""
    # `lows[j] .. highs[j]`: numbers of nodes at which f of jobs j .. last is needed.
    n = len(choices)
    lows, highs = [0] * (n + 1), [0] * (n + 1)
    lows[0] = highs[0] = n_nodes
    for j, (sizes, _) in enumerate(choices):
        lows[j + 1] = max(0, lows[j] - int(sizes[-1]))
        highs[j + 1] = highs[j] - int(sizes[0])
    best = _forward(choices, lows, highs)
    left = n_nodes
    chosen: list[int] = []
    tie = TIE * max(abs(float(best[0][-1])), 1e-300)
    for j, (sizes, values) in enumerate(choices):
        fits = sizes <= left
        candidate, worth = sizes[fits], values[fits]
        rest = best[j + 1]
        at = np.minimum(left - candidate - lows[j + 1], len(rest) - 1)
        usable = at >= 0
        total = np.where(usable, rest[np.maximum(at, 0)] + worth, -np.inf)
        tied = np.flatnonzero(total >= total.max() - tie)
        chosen.append(_prefer(candidate[tied], worth[tied], current[j], tie))
        left -= chosen[-1]
    return chosen


def best_by_nodes(tables: Sequence[Table], n_nodes: int) -> Floats:
    """The best worth of all tables together on at most m nodes, for m = 0 .. n_nodes (-inf where none is feasible)."""
    choices = [(t.sizes, t.values) for t in tables]
    n = len(choices)
    return _forward(choices, [0] * (n + 1), [n_nodes] * (n + 1))[0]


def _forward(choices: Sequence[tuple[Ints, Floats]], lows: Sequence[int], highs: Sequence[int]) -> list[Floats]:
    """f of jobs j .. last, at lows[j] .. highs[j] nodes, for every j; of no job at all, which is 0, at the end."""
    n = len(choices)
    best: list[Floats] = [np.zeros(0)] * n + [np.zeros(highs[n] - lows[n] + 1)]
    buffer = np.empty(highs[0] + 1)
    reach = 0
    for j in range(n - 1, -1, -1):
        sizes, values = choices[j]
        before, offset = best[j + 1], lows[j + 1]
        low, high = lows[j], highs[j]
        reach += int(sizes[-1])
        top = max(low, min(high, reach))  # beyond, f is constant
        f = np.full(high - low + 1, -np.inf)
        for k, value in zip(sizes.tolist(), values.tolist(), strict=True):
            start = max(low, k)
            if start > top:
                break
            length = top - start + 1
            source = start - k - offset
            out = buffer[:length]
            np.add(before[source : source + length], value, out=out)
            target = f[start - low : top - low + 1]
            np.maximum(target, out, out=target)
        f[top - low + 1 :] = f[top - low]
        best[j] = f
    return best


def _prefer(sizes: Ints, values: Floats, current: int, tie: float) -> int:
    """One of several sizes with which the total is the same; see the module's docstring."""
    if len(sizes) == 1:
        return int(sizes[0])
    if current > 0:
        return int(sizes[np.argmin(np.abs(sizes - current))])
    return int(sizes[np.flatnonzero(values >= values.max() - tie)[0]])


def _reduced(tables: Sequence[Table], n_nodes: int) -> list[tuple[Ints, Floats]]:
    """The sizes of each job that can be part of an optimal allocation."""
    width = max(len(t.sizes) for t in tables)
    sizes = np.zeros((len(tables), width), dtype=np.int64)
    values = np.full((len(tables), width), -np.inf)
    for row, t in enumerate(tables):
        sizes[row, : len(t.sizes)] = t.sizes
        values[row, : len(t.sizes)] = t.values
    values[sizes > n_nodes] = -np.inf
    rows = np.arange(len(tables))

    def priced(price: float) -> tuple[Floats, Ints, int]:
        net = values - price * sizes
        pick = net.argmax(axis=1)  # the first, i.e. smallest, of equals
        return net, pick, int(sizes[rows, pick].sum())

    price, (net, pick, used) = 0.0, priced(0.0)
    if used > n_nodes:
        low, high = 0.0, 2.0 * float(np.abs(values[np.isfinite(values)]).max()) + 1.0
        net, pick, used = priced(high)
        price = high
        for _ in range(_PRICE_STEPS + 20):
            middle = 0.5 * (low + high)
            trial = priced(middle)
            if trial[2] <= n_nodes:
                high, price, (net, pick, used) = middle, middle, trial
                if used == n_nodes:
                    break  # complementary slackness: the pick is optimal and the bound is met
            else:
                low = middle
            if high - low <= 1e-13 * high:
                break
    if used > n_nodes:  # cannot happen with finite values: at the highest price everybody takes the least
        return [(t.sizes, t.values) for t in tables]
    bound = price * n_nodes + float(net[rows, pick].sum())
    incumbent = _filled(sizes, values, pick, n_nodes - used)
    loss = net[rows, pick][:, None] - net
    slack = 2.0 * TIE * max(abs(bound), abs(incumbent))
    keep = (bound - loss >= incumbent - slack) & np.isfinite(values)
    return [(sizes[row, mask], values[row, mask]) for row, mask in enumerate(keep)]


def _filled(sizes: Ints, values: Floats, pick: Ints, left: int) -> float:
    """Worth of an allocation after giving the `left` nodes out greedily: a lower bound of the optimum."""
    rows = np.arange(len(pick))
    pick = pick.copy()
    for _ in range(_FILL_STEPS):
        gain = values - values[rows, pick][:, None]
        extra = sizes - sizes[rows, pick][:, None]
        gain[extra > left] = -np.inf
        best = int(gain.argmax())
        row, column = divmod(best, gain.shape[1])
        if not gain[row, column] > 0.0:
            break
        left -= int(extra[row, column])
        pick[row] = column
    return float(values[rows, pick].sum())
