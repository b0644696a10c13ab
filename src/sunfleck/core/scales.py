"""PURE. What a job's throughput reports teach about it, and when to forget what they taught.

Reports at one size are a running mean (`ScaleStats`) with a bounded memory. A job may change while it runs: longer
sequences, another phase of training, a slower file system. A drift is seen where a short exponential average leaves
the long mean by more than chance allows; the size then starts anew from the recent reports, and what is known of the
job's other sizes is scaled by the same factor and trusted no more than one report each, so that the curve keeps its
shape until they are measured again.
"""

from __future__ import annotations

from .model import ScaleStats

RECENT = 0.2
"""Weight of the newest report in the short average; it remembers about ten."""
DRIFT_SIGMAS = 4.0
"""How many standard deviations of the short average count as a drift ..."""
DRIFT_RATIO = 0.15
"""... if they are also this large a change."""
SETTLED_REPORTS = 20
"""Reports at a size before a drift can be told from noise."""
MEMORY_REPORTS = 500
"""Older reports fade."""


def observe(scales: dict[int, ScaleStats], n_nodes: int, samples_per_s: float, dt_s: float) -> bool:
    """Add one report to a job's measurements, in place. Returns whether a drift was seen."""
    before = scales.get(n_nodes) or ScaleStats(n_nodes=n_nodes)
    stats = before.add(samples_per_s, dt_s)
    if stats.n_reports > MEMORY_REPORTS:
        keep = MEMORY_REPORTS / stats.n_reports
        stats = ScaleStats(
            n_nodes=n_nodes,
            n_reports=MEMORY_REPORTS,
            mean_per_s=stats.mean_per_s,
            m2=stats.m2 * keep,
            trained_s=stats.trained_s,
            recent_per_s=stats.recent_per_s,
        )
    scales[n_nodes] = stats
    if stats.n_reports < SETTLED_REPORTS or not stats.mean_per_s > 0.0:
        return False
    spread = (stats.m2 / (stats.n_reports - 1)) ** 0.5 * (RECENT / (2.0 - RECENT)) ** 0.5
    moved = abs(stats.recent_per_s - stats.mean_per_s)
    if moved <= max(DRIFT_SIGMAS * spread, DRIFT_RATIO * stats.mean_per_s):
        return False
    factor = stats.recent_per_s / stats.mean_per_s
    for n, other in scales.items():
        scales[n] = ScaleStats(
            n_nodes=n, n_reports=1, mean_per_s=other.mean_per_s * factor, recent_per_s=other.mean_per_s * factor
        )
    return True
