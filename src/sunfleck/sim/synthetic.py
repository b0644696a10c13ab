"""PURE. A seeded generator of idle traces that behave like the holes in a real supercomputer's schedule.

Followed are the published statistics of Summit (4,734 nodes, 14.9 days; arXiv:2106.12091, ICPE 2024):

| statistic | published | how well it is followed (4,734 nodes, 14.9 days) |
|---|---|---|
| fragment length p10/25/50/75/90/99 | 91/162/475/1397/3269/9246 s | drawn from these quantiles; within 25 % each |
| mean fragment length | 1,192 s | within 15 % |
| fragments below 600 s, their share of idle time | 56 %, 11 % | within 5 and 3 points |
| idle share of all node-time | 8.27 % | the rate of joins is solved for it; within 10 % |
| join / leave instants an hour | 41 / 31 | joins within 20 %; leaves up to twice as many as published |
| idle nodes p5/25/50/75/95 | 1/13/81/502/1732 | the shape: p50 below half the mean, p95 above 2.5 means |

Method: groups of nodes join at exponential intervals. The logarithm of a group's size is the sum of a slow random
walk with return (an Ornstein-Uhlenbeck process: the machine drains for large jobs for hours, then is full for hours)
and of independent noise. A large group breaks up into blocks, as the jobs that take the nodes again are smaller;
a block's nodes share one fragment length. Ends of long fragments are moved to a common grid, as one large job takes
the nodes of several groups.
Not followed: which nodes go together (groups are drawn at random among the busy ones), time of day, and weekdays.
"""

from __future__ import annotations

import heapq
from statistics import NormalDist

import numpy as np

from .trace import Floats, IdleTrace, Ints, from_arrays
from .trace_stats import describe

SUMMIT_LENGTH_S = (
    (0.0, 10.0),
    (0.10, 91.0),
    (0.25, 162.0),
    (0.50, 475.0),
    (0.75, 1397.0),
    (0.90, 3269.0),
    (0.99, 9246.0),
    (1.0, 12000.0),
)
"""Quantile -> fragment length. Between them the logarithm is linear; the ends are ours (sampling was 10 s)."""
SUMMIT_IDLE_SHARE = 0.0827
SUMMIT_NODES = 4734
SUMMIT_NODES_PER_JOIN = 28.8

_SLOW_SIGMA = 2.0
_SLOW_S = 5 * 3600.0
"""Deviation and correlation time of the slow part of the logarithm of group sizes."""
_WISH = 1.4
"""Groups wish for so many times their mean size, as the largest of them find fewer busy nodes than they want."""
_MOST_FACTOR = 50.0
"""Bound of the correction to the rate of joins."""
_STEP_S = 600.0
"""Step at which the slow part is drawn."""
_FAST_SIGMA = 1.2
"""Deviation of its independent part. Together they give the published median far below the mean of idle nodes."""
_LONG_S, _GRID_S = 600.0, 300.0
"""Fragments longer than the first end on multiples of the second."""


def fragment_lengths(rng: np.random.Generator, n: int) -> Floats:
    """`n` lengths in whole seconds from the published quantiles."""
    q, length = zip(*SUMMIT_LENGTH_S, strict=True)
    return np.asarray(np.round(np.exp(np.interp(rng.random(n), q, np.log(length)))), dtype=np.float64)


def generate(
    *,
    n_nodes: int = SUMMIT_NODES,
    duration_s: float = 14.9 * 86400,
    seed: int = 0,
    idle_share: float = SUMMIT_IDLE_SHARE,
    nodes_per_join: float | None = None,
) -> IdleTrace:
    """A trace of `n_nodes` nodes `n0000`, `n0001`, ... over [0, duration_s]; the same for the same arguments.

    `idle_share` is the wanted mean share of idle nodes (0 < share < 1). `nodes_per_join` is the mean size of a
    joining group; unless given it is Summit's 28.8, smaller on smaller machines in proportion to the square root
    of the number of nodes (which is what Summit's own subsets show), never below 1."""
    if not 0 < idle_share < 1:
        raise ValueError(f"the idle share lies between 0 and 1, not {idle_share}")
    if n_nodes < 1 or duration_s <= 0:
        raise ValueError("a trace needs nodes and a duration")
    mean_size = nodes_per_join or max(1.0, SUMMIT_NODES_PER_JOIN * (n_nodes / SUMMIT_NODES) ** 0.5)
    mean_size *= _WISH
    mean_length = float(fragment_lengths(np.random.default_rng(0), 20000).mean())
    # Little's law for a machine that always has enough busy nodes; then corrected by what came of it, because
    # large groups find fewer busy nodes than they want and the edges cut fragments off.
    rate = idle_share * n_nodes / (mean_size * mean_length)
    width = len(str(n_nodes - 1))
    names = tuple(f"n{i:0{max(width, 4)}d}" for i in range(n_nodes))
    first_rate = rate
    best = trace = _run(n_nodes, duration_s, seed, rate, mean_size, names)
    for _ in range(4):
        got = trace.mean_idle_nodes / n_nodes
        if abs(got / idle_share - 1) < 0.05:
            break
        # The odds, not the share: the rate of joins works on the busy nodes only. Within bounds, as short traces of
        # few nodes may hold next to nothing by chance.
        odds = max(got / (1 - min(got, 0.999)), 1e-6)
        rate = min(rate * idle_share / (1 - idle_share) / odds, _MOST_FACTOR * first_rate)
        trace = _run(n_nodes, duration_s, seed, rate, mean_size, names)
        if abs(trace.mean_idle_nodes - idle_share * n_nodes) < abs(best.mean_idle_nodes - idle_share * n_nodes):
            best = trace
    return best


def _run(
    n_nodes: int, duration_s: float, seed: int, rate: float, mean_size: float, names: tuple[str, ...]
) -> IdleTrace:
    rng = np.random.default_rng(seed)
    busy = np.arange(n_nodes)
    n_busy = n_nodes
    returns: list[tuple[float, int, Ints]] = []
    starts: list[Ints] = []
    ends: list[Ints] = []
    nodes: list[Ints] = []
    # Start in the past, so that time 0 finds the machine in its usual state.
    now, serial = -min(20000.0, duration_s), 0
    mu = np.log(mean_size) - (_SLOW_SIGMA**2 + _FAST_SIGMA**2) / 2
    slow = _slow_path(rng, duration_s - now)
    began_s = now
    while True:
        now += rng.exponential(1.0 / rate)
        if now >= duration_s:
            break
        while returns and returns[0][0] <= now:
            _, _, block = heapq.heappop(returns)
            busy[n_busy : n_busy + block.size] = block
            n_busy += block.size
        wish = np.exp(mu + slow[int((now - began_s) / _STEP_S)] + _FAST_SIGMA * rng.standard_normal())
        size = min(max(1, round(float(wish))), n_busy)
        if size == 0:
            continue
        picks = rng.choice(n_busy, size, replace=False)
        chosen = busy[picks].copy()
        keep = np.ones(n_busy, bool)
        keep[picks] = False
        busy[: n_busy - size] = busy[:n_busy][keep]
        n_busy -= size
        joined_s = float(np.round(now))
        for block in _blocks(rng, chosen):
            length = float(fragment_lengths(rng, 1)[0])
            until = joined_s + length
            if length > _LONG_S:
                until = float(np.ceil(until / _GRID_S - 0.5)) * _GRID_S
            heapq.heappush(returns, (until, serial, block))
            serial += 1
            lo, hi = max(joined_s, 0.0), min(until, duration_s)
            if hi > lo:
                starts.append(np.full(block.size, lo))
                ends.append(np.full(block.size, hi))
                nodes.append(block)
    if not starts:
        empty = np.empty(0)
        return from_arrays(empty, empty, empty.astype(np.int64), names, begin_s=0.0, end_s=duration_s)
    return from_arrays(
        np.concatenate(starts),
        np.concatenate(ends),
        np.concatenate(nodes).astype(np.int64),
        names,
        begin_s=0.0,
        end_s=duration_s,
    )


def _slow_path(rng: np.random.Generator, duration_s: float) -> Floats:
    """The slow part at every _STEP_S. Its values are moved, in their order, onto the quantiles of the normal
    distribution: the sizes depend on it exponentially, and one seed's largest excursion would decide all figures."""
    n = int(duration_s / _STEP_S) + 2
    keeps = float(np.exp(-_STEP_S / _SLOW_S))
    path = np.empty(n)
    path[0] = rng.standard_normal()
    noise = rng.standard_normal(n) * (1 - keeps**2) ** 0.5
    for i in range(1, n):
        path[i] = path[i - 1] * keeps + noise[i]
    ranks = np.argsort(np.argsort(path))
    normal = NormalDist()
    table = np.array([normal.inv_cdf((i + 0.5) / n) for i in range(n)])
    return np.asarray(_SLOW_SIGMA * table[ranks], dtype=np.float64)


def _blocks(rng: np.random.Generator, chosen: Ints) -> list[Ints]:
    """The group in blocks: what one later job takes again together. About the square root of its size in number."""
    n = chosen.size
    n_blocks = 1 + int(rng.poisson(0.35 * (n**0.5 - 1)))
    if n_blocks == 1 or n == 1:
        return [chosen]
    cuts = np.sort(rng.choice(np.arange(1, n), min(n_blocks - 1, n - 1), replace=False))
    return np.split(chosen, cuts)


def header(trace: IdleTrace, command: str) -> list[str]:
    """Comment lines for a generated file: where it comes from and how its figures compare with the published."""
    s = describe(trace)
    length = "/".join(f"{s.length_s[q]:.0f}" for q in sorted(s.length_s))
    idle = "/".join(f"{s.idle_nodes[q]:g}" for q in sorted(s.idle_nodes))
    return [
        f"generated by: {command}",
        f"{s.n_nodes} nodes, {s.span_s:.0f} s, {s.n_fragments} fragments, mean idle nodes {s.idle_nodes_mean:.2f}",
        f"fragment length p10/25/50/75/90/99 = {length} s (published for Summit: 91/162/475/1397/3269/9246),"
        f" mean {s.length_mean_s:.0f} s (1192)",
        f"idle nodes p5/25/50/75/95 = {idle}; {s.join_events_per_h:.1f} join and {s.leave_events_per_h:.1f} leave"
        f" instants an hour; {s.nodes_per_join:.1f} nodes a join, {s.nodes_per_leave:.1f} a leave",
    ]
