"""PURE. What a trace is like, in figures: lengths of fragments, idle nodes over time, how they come and go."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from .trace import Floats, IdleTrace, Ints

LENGTH_QUANTILES = (10, 25, 50, 75, 90, 99)
COUNT_QUANTILES = (5, 25, 50, 75, 95)
SHORT_S = 600.0
"""Fragments below this are called short: too short for the restart-based systems to use."""


@dataclass(frozen=True)
class TraceStats:
    """Figures of one trace. `join_events_per_h` counts instants at which nodes join, not nodes."""

    n_nodes: int
    n_fragments: int
    span_s: float
    idle_node_h: float
    idle_share: float
    """Idle node-time / (nodes x span)."""
    length_mean_s: float
    length_s: dict[int, float]
    """Percentile of the fragment lengths -> seconds."""
    idle_nodes: dict[int, float]
    """Percentile over time of the number of idle nodes -> nodes."""
    idle_nodes_mean: float
    zero_share: float
    """Share of the time with no idle node at all."""
    join_events_per_h: float
    leave_events_per_h: float
    nodes_per_join: float
    nodes_per_leave: float
    short_share: float
    """Share of the fragments that are shorter than SHORT_S."""
    short_time_share: float
    """Share of the idle node-time that they hold."""
    burstiness: float
    """Coefficient of variation, over time, of the number of idle nodes: deviation / mean."""

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def describe(trace: IdleTrace) -> TraceStats:
    """Statistics of `trace` over its span. Of an empty trace every figure is 0."""
    length = trace.end - trace.start
    times, counts = trace.idle_counts()
    held = np.diff(np.append(times, trace.end_s))
    mean = trace.mean_idle_nodes
    spread = float(np.sqrt(np.average((counts - mean) ** 2, weights=held))) if held.sum() > 0 else 0.0
    hours = trace.span_s / 3600.0
    # Fragments that the edges of the trace cut off did not join or leave there.
    n_join, joined = _instants(trace.start[trace.start > trace.begin_s])
    n_leave, left = _instants(trace.end[trace.end < trace.end_s])
    short = length < SHORT_S
    total = float(length.sum())
    return TraceStats(
        n_nodes=len(trace.names),
        n_fragments=len(trace),
        span_s=trace.span_s,
        idle_node_h=total / 3600.0,
        idle_share=mean / len(trace.names) if trace.names else 0.0,
        length_mean_s=float(length.mean()) if length.size else 0.0,
        length_s={q: float(np.percentile(length, q)) if length.size else 0.0 for q in LENGTH_QUANTILES},
        idle_nodes={q: _time_quantile(counts, held, q / 100.0) for q in COUNT_QUANTILES},
        idle_nodes_mean=mean,
        zero_share=float(held[counts == 0].sum() / held.sum()) if held.sum() > 0 else 0.0,
        join_events_per_h=n_join / hours if hours > 0 else 0.0,
        leave_events_per_h=n_leave / hours if hours > 0 else 0.0,
        nodes_per_join=joined / n_join if n_join else 0.0,
        nodes_per_leave=left / n_leave if n_leave else 0.0,
        short_share=float(short.mean()) if length.size else 0.0,
        short_time_share=float(length[short].sum() / total) if total > 0 else 0.0,
        burstiness=spread / mean if mean > 0 else 0.0,
    )


def _instants(times: Floats) -> tuple[int, int]:
    return int(np.unique(times).size), int(times.size)


def _time_quantile(counts: Ints, held: Floats, q: float) -> float:
    """Smallest count that is not exceeded for at least a share `q` of the time."""
    if held.sum() <= 0:
        return 0.0
    order = np.argsort(counts, kind="stable")
    reached = np.cumsum(held[order]) / held.sum()
    return float(counts[order][min(int(np.searchsorted(reached, q)), counts.size - 1)])
