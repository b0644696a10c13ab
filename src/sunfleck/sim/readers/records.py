"""PURE. From records of jobs to the holes between them, and the outages among the holes.

With the names of its nodes in every record, a node is idle when no job has it. Without them (SWF, many dumps) the
recorded number of nodes is taken from virtual ones: a job gets the free nodes of the lowest numbers. The number of idle
nodes over time is then as recorded, and only which of them are idle is a guess.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..trace import Floats, IdleTrace, Ints, from_arrays

SLACK_S = 60.0
OUTAGE_SHARE = 0.98
OUTAGE_S = 600.0
"""An outage: this share of all nodes idle for at least this long."""


@dataclass(frozen=True)
class JobRecord:
    """A job as a scheduler remembers it. `end_s` is None while it runs; times in seconds on one axis."""

    job: str
    submit_s: float
    start_s: float
    end_s: float | None
    n_nodes: int
    requested_s: float | None = None
    """Its time limit."""
    nodes: tuple[str, ...] = ()
    state: str = ""


def idle_by_name(
    records: Sequence[JobRecord], begin_s: float, end_s: float, names: Iterable[str] = (), notes: Sequence[str] = ()
) -> IdleTrace:
    """Holes of the named nodes (those in `names` and all that records name) within [begin_s, end_s], from 0."""
    number: dict[str, int] = {name: i for i, name in enumerate(names)}
    start: list[float] = []
    end: list[float] = []
    node: list[int] = []
    for record in records:
        until = end_s if record.end_s is None else record.end_s
        for name in record.nodes:
            index = number.setdefault(name, len(number))
            if until > record.start_s:
                start.append(record.start_s)
                end.append(until)
                node.append(index)
    busy = from_arrays(np.array(start), np.array(end), np.array(node, np.int64), tuple(number))
    return _complement(busy.start, busy.end, busy.node, tuple(number), begin_s, end_s, notes)


def idle_by_count(
    records: Sequence[JobRecord], n_nodes: int, begin_s: float, end_s: float, notes: Sequence[str] = ()
) -> IdleTrace:
    """Holes of `n_nodes` virtual nodes. Recorded times are rounded, so that a job may begin seconds before another has
    ended: it gets those nodes too (SLACK_S). Jobs that find too few even so get what there is, which is said."""
    width = max(len(str(n_nodes - 1)), 4)
    names = tuple(f"n{i:0{width}d}" for i in range(n_nodes))
    free = np.ones(n_nodes, bool)
    ends: list[tuple[float, int, Ints]] = []
    start: list[Floats] = []
    end: list[Floats] = []
    node: list[Ints] = []
    short, n_short = 0, 0
    for serial, record in enumerate(sorted(records, key=lambda r: r.start_s)):
        until = end_s if record.end_s is None else record.end_s
        while ends and ends[0][0] <= record.start_s:
            free[heapq.heappop(ends)[2]] = True
        if until <= record.start_s:
            continue
        chosen = np.flatnonzero(free)[: record.n_nodes]
        while chosen.size < record.n_nodes and ends and ends[0][0] <= record.start_s + SLACK_S:
            free[heapq.heappop(ends)[2]] = True
            chosen = np.flatnonzero(free)[: record.n_nodes]
        if chosen.size < record.n_nodes:
            n_short += 1
            short = max(short, record.n_nodes - chosen.size)
        free[chosen] = False
        heapq.heappush(ends, (until, serial, chosen))
        start.append(np.full(chosen.size, record.start_s))
        end.append(np.full(chosen.size, until))
        node.append(chosen)
    said = list(notes)
    if n_short:
        said.append(f"{n_short} jobs found fewer free nodes than recorded (by up to {short}) and got what there was")
    if not start:
        return _complement(np.empty(0), np.empty(0), np.empty(0, np.int64), names, begin_s, end_s, said)
    return _complement(np.concatenate(start), np.concatenate(end), np.concatenate(node), names, begin_s, end_s, said)


def nodes_used(records: Sequence[JobRecord]) -> int:
    """Most nodes in use at once, but for a thousandth of the time."""
    times = np.array([r.start_s for r in records] + [r.start_s if r.end_s is None else r.end_s for r in records])
    delta = np.array([r.n_nodes for r in records] + [0 if r.end_s is None else -r.n_nodes for r in records])
    if times.size < 2:
        return int(delta.max(initial=0))
    order = np.lexsort((delta, times))
    used, held = np.cumsum(delta[order])[:-1], np.diff(times[order])
    by_use = np.argsort(used, kind="stable")
    time_below = np.cumsum(held[by_use])
    return int(used[by_use][min(int(np.searchsorted(time_below, 0.999 * time_below[-1])), used.size - 1)])


def outages(trace: IdleTrace, share: float = OUTAGE_SHARE, least_s: float = OUTAGE_S) -> list[tuple[float, float]]:
    """Spans in which practically every node is idle: nothing runs because nothing can."""
    times, counts = trace.idle_counts()
    out = counts >= share * len(trace.names)
    spans: list[tuple[float, float]] = []
    stops = np.append(times[1:], trace.end_s)
    for is_out, lo, hi in zip(out.tolist(), times.tolist(), stops.tolist(), strict=True):
        if not is_out:
            continue
        if spans and spans[-1][1] == lo:
            spans[-1] = (spans[-1][0], hi)
        else:
            spans.append((lo, hi))
    return [(lo, hi) for lo, hi in spans if hi - lo >= least_s]


def without_outages(trace: IdleTrace) -> IdleTrace:
    """The trace with its outages cut out, and a note that says so."""
    spans = outages(trace)
    if not spans:
        return trace
    hours = sum(hi - lo for lo, hi in spans) / 3600.0
    note = (
        f"{len(spans)} outages of {hours:.1f} h in all (at least {OUTAGE_SHARE:.0%} of the nodes idle for "
        f"{OUTAGE_S / 60:.0f} minutes or more) were cut out"
    )
    return trace.without(spans, note)


def _complement(
    start: Floats, end: Floats, node: Ints, names: tuple[str, ...], begin_s: float, end_s: float, notes: Sequence[str]
) -> IdleTrace:
    """Where no interval of a node lies, from begin_s to end_s, on an axis from 0."""
    n = len(names)
    every = np.arange(n)
    # A job of no length at either edge of each node makes each hole one between two neighbours.
    lo = np.concatenate([start, np.full(n, begin_s), np.full(n, end_s)])
    hi = np.concatenate([end, np.full(n, begin_s), np.full(n, end_s)])
    who = np.concatenate([node, every, every])
    order = np.lexsort((hi, lo, who))
    lo, hi, who = lo[order], hi[order], who[order]
    lift = who * (2.0 * (abs(end_s) + abs(begin_s) + float(np.abs(hi).max(initial=0.0)) + 1.0))
    reach = np.maximum.accumulate(hi + lift) - lift
    left = np.maximum(reach[:-1], begin_s)
    right = np.minimum(lo[1:], end_s)
    hole = (who[1:] == who[:-1]) & (right > left)
    return from_arrays(
        left[hole] - begin_s,
        right[hole] - begin_s,
        who[1:][hole],
        names,
        begin_s=0.0,
        end_s=end_s - begin_s,
        notes=notes,
    )
