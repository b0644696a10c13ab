"""PURE. Idle traces as values: which node was idle when, and what can be done with that.

A *fragment* is one idle node over one idle interval. A trace keeps its fragments as three parallel numpy arrays,
sorted by (start, end, node), each node's fragments disjoint and not touching. Every operation returns a new trace;
times are seconds on the trace's own axis, which `window` and `shift` move.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Interval(NamedTuple):
    """One fragment: `node` is idle from start_s until just before end_s."""

    start_s: float
    end_s: float
    node: str


class TraceEvent(NamedTuple):
    """All that happens at one instant. A node never both joins and leaves at it (such fragments are merged)."""

    time_s: float
    joins: tuple[int, ...]
    """Indices of nodes that become idle, ascending."""
    leaves: tuple[int, ...]
    """Indices of nodes that stop being idle, ascending. They are to be handled before the joins."""


@dataclass(frozen=True)
class IdleTrace:
    """Fragments of the nodes `names` within [begin_s, end_s]. Built by `from_arrays` or `from_intervals` only."""

    start: Floats
    end: Floats
    node: Ints
    names: tuple[str, ...]
    begin_s: float
    end_s: float
    notes: tuple[str, ...] = ()
    """What a reader or an operation had to do to the data, in words, for the user to see."""

    def __len__(self) -> int:
        return int(self.start.size)

    def __iter__(self) -> Iterator[Interval]:
        for start, end, node in zip(self.start.tolist(), self.end.tolist(), self.node.tolist(), strict=True):
            yield Interval(start, end, self.names[node])

    @property
    def span_s(self) -> float:
        return self.end_s - self.begin_s

    @property
    def idle_node_s(self) -> float:
        """Idle node-seconds: the sum of all fragment lengths."""
        return float((self.end - self.start).sum())

    @property
    def mean_idle_nodes(self) -> float:
        """Time average of the number of idle nodes."""
        return self.idle_node_s / self.span_s if self.span_s > 0 else 0.0

    # -- operations ----------------------------------------------------------------------------------------------

    def window(self, start_s: float, duration_s: float) -> IdleTrace:
        """What happens in [start_s, start_s + duration_s], on an axis that begins at 0. Fragments that reach over
        an edge are cut there; nodes keep their indices."""
        if duration_s <= 0:
            raise ValueError(f"a window needs a positive duration, not {duration_s}")
        stop_s = start_s + duration_s
        keep = (self.end > start_s) & (self.start < stop_s)
        return _sorted(
            np.maximum(self.start[keep], start_s) - start_s,
            np.minimum(self.end[keep], stop_s) - start_s,
            self.node[keep],
            self.names,
            0.0,
            duration_s,
            self.notes,
        )

    def first_nodes(self, n: int) -> IdleTrace:
        """Only the first `n` nodes, in the order of `names`."""
        return self.select(range(min(n, len(self.names))))

    def select(self, nodes: Iterable[int | str]) -> IdleTrace:
        """Only these nodes (indices or names), renumbered in the order given. Raises KeyError for an unknown name
        and IndexError for an index that no node has."""
        number = {name: i for i, name in enumerate(self.names)}
        chosen = [number[n] if isinstance(n, str) else int(n) for n in nodes]
        if any(not 0 <= i < len(self.names) for i in chosen):
            raise IndexError(f"this trace has nodes 0 to {len(self.names) - 1}")
        if len(set(chosen)) != len(chosen):
            raise ValueError("a node is selected twice")
        new_index = np.full(len(self.names), -1, dtype=np.int64)
        new_index[chosen] = np.arange(len(chosen))
        node = new_index[self.node] if self.node.size else self.node
        keep = node >= 0
        names = tuple(self.names[i] for i in chosen)
        return _sorted(self.start[keep], self.end[keep], node[keep], names, self.begin_s, self.end_s, self.notes)

    def compress(self, factor: float) -> IdleTrace:
        """The same trace run `factor` times as fast: every time is divided by it."""
        if factor <= 0:
            raise ValueError(f"a compression factor is positive, not {factor}")
        return replace(
            self,
            start=self.start / factor,
            end=self.end / factor,
            begin_s=self.begin_s / factor,
            end_s=self.end_s / factor,
        )

    def shift(self, by_s: float) -> IdleTrace:
        """The same trace, `by_s` seconds later."""
        return replace(
            self,
            start=self.start + by_s,
            end=self.end + by_s,
            begin_s=self.begin_s + by_s,
            end_s=self.end_s + by_s,
        )

    def loop(self, n: int) -> IdleTrace:
        """The trace `n` times in a row. A node idle at the end and again at the beginning just stays idle."""
        if n < 1:
            raise ValueError(f"a trace is repeated at least once, not {n} times")
        by = np.repeat(np.arange(n) * self.span_s, len(self))
        looped = from_arrays(
            np.tile(self.start, n) + by,
            np.tile(self.end, n) + by,
            np.tile(self.node, n),
            self.names,
            begin_s=self.begin_s,
            end_s=self.begin_s + n * self.span_s,
        )
        return replace(looped, notes=self.notes)

    def without(self, spans: Sequence[tuple[float, float]], note: str = "") -> IdleTrace:
        """The trace with these times cut out of every fragment (an outage: nothing could have trained then). The
        axis keeps its length; nobody is idle in the cut-out spans."""
        start, end, node = self.start, self.end, self.node
        for lo, hi in spans:
            across = (start < lo) & (end > hi)
            tail = (np.full(int(across.sum()), hi), end[across], node[across])
            end = np.where((start < lo) & (end > lo), lo, end)
            start = np.where((start >= lo) & (start < hi) & (end > hi), hi, start)
            keep = ~((start >= lo) & (end <= hi)) & (end > start)
            start = np.concatenate([start[keep], tail[0]])
            end = np.concatenate([end[keep], tail[1]])
            node = np.concatenate([node[keep], tail[2]])
        notes = (*self.notes, note) if note else self.notes
        return _sorted(start, end, node, self.names, self.begin_s, self.end_s, notes)

    # -- views ---------------------------------------------------------------------------------------------------

    def events(self) -> list[TraceEvent]:
        """Joins and leaves in order of time, one TraceEvent per instant. Fragments that end where the trace ends
        leave at `end_s` like any other."""
        times = np.concatenate([self.start, self.end])
        node = np.concatenate([self.node, self.node])
        joins = np.concatenate([np.ones(len(self), bool), np.zeros(len(self), bool)])
        order = np.lexsort((node, joins, times))
        times, node, joins = times[order], node[order], joins[order]
        cuts = np.flatnonzero(np.diff(times)) + 1
        bounds = [0, *cuts.tolist(), times.size] if times.size else []
        nodes, is_join, when = node.tolist(), joins.tolist(), times.tolist()
        events = []
        for lo, hi in pairwise(bounds):
            n_leaves = hi - lo - sum(is_join[lo:hi])
            events.append(TraceEvent(when[lo], tuple(nodes[lo + n_leaves : hi]), tuple(nodes[lo : lo + n_leaves])))
        return events

    def idle_counts(self) -> tuple[Floats, Ints]:
        """Step function of the number of idle nodes: `counts[i]` nodes from `times[i]` until `times[i + 1]`, the
        last until `end_s`. Begins at `begin_s`."""
        times = np.concatenate([np.array([self.begin_s]), self.start, self.end])
        delta = np.concatenate([np.zeros(1, np.int64), np.ones(len(self), np.int64), -np.ones(len(self), np.int64)])
        order = np.argsort(times, kind="stable")
        times, counts = times[order], np.cumsum(delta[order])
        last = np.append(np.flatnonzero(np.diff(times)), times.size - 1)
        return times[last], counts[last]


def from_arrays(
    start: Floats,
    end: Floats,
    node: Ints,
    names: Sequence[str],
    *,
    begin_s: float | None = None,
    end_s: float | None = None,
    notes: Sequence[str] = (),
) -> IdleTrace:
    """A trace from raw fragments in any order. Overlapping or touching fragments of one node become one, which is
    said in `notes`; the span is that of the fragments unless given. Raises ValueError for an end before its start."""
    if np.any(end <= start):
        raise ValueError("a fragment must end after it starts")
    said = list(notes)
    start, end, node, n_merged = _merge(start, end, node)
    if n_merged:
        said.append(f"{n_merged} fragments overlapped or touched another of their node and were merged with it")
    lo = float(start.min()) if start.size else 0.0
    hi = float(end.max()) if end.size else 0.0
    begin = lo if begin_s is None else min(begin_s, lo) if start.size else begin_s
    stop = hi if end_s is None else max(end_s, hi)
    return _sorted(start, end, node, tuple(names), begin, stop, tuple(said))


def from_intervals(intervals: Iterable[Interval], names: Sequence[str] | None = None) -> IdleTrace:
    """A trace from Interval values. Nodes are numbered as in `names`, or in order of first appearance."""
    number: dict[str, int] = {name: i for i, name in enumerate(names or ())}
    rows = [(i.start_s, i.end_s, number.setdefault(i.node, len(number))) for i in intervals]
    table = np.array(rows, dtype=np.float64).reshape(-1, 3)
    return from_arrays(table[:, 0], table[:, 1], table[:, 2].astype(np.int64), tuple(number))


def _merge(start: Floats, end: Floats, node: Ints) -> tuple[Floats, Floats, Ints, int]:
    """Union of each node's fragments, and how many fragments that removed."""
    if not start.size:
        return start.astype(np.float64), end.astype(np.float64), node.astype(np.int64), 0
    order = np.lexsort((end, start, node))
    start, end, node = start[order], end[order], node[order]
    # Running maximum of the end within each node: lift each node above all earlier ones, accumulate, lower again.
    base = start.min()
    lift = node * (float(end.max() - base) + 1.0)
    reach = np.maximum.accumulate(end - base + lift) - lift + base
    opens = np.ones(start.size, bool)
    opens[1:] = (node[1:] != node[:-1]) | (start[1:] > reach[:-1])
    first = np.flatnonzero(opens)
    n_merged = start.size - first.size
    if not n_merged:
        return start, end, node, 0
    return start[first], np.maximum.reduceat(end, first), node[first], int(n_merged)


def _sorted(
    start: Floats, end: Floats, node: Ints, names: tuple[str, ...], begin_s: float, end_s: float, notes: Sequence[str]
) -> IdleTrace:
    order = np.lexsort((node, end, start))
    arrays = (start[order].astype(np.float64), end[order].astype(np.float64), node[order].astype(np.int64))
    for array in arrays:
        array.setflags(write=False)
    return IdleTrace(*arrays, names=names, begin_s=float(begin_s), end_s=float(end_s), notes=tuple(notes))
