"""PURE. How long nodes will stay: what the cluster has announced, and survival statistics where it is silent.

Fragments (one idle node over one idle interval) are heavy-tailed: on Summit their median is 475 s and their mean
1,192 s, so a node that has stayed long will probably stay longer than one that has just come. The hazard of leaving
is estimated by age from the pool's own history (Kaplan and Meier, JASA 53, 1958: fragments still running count as
survivors up to their age), in half-octaves of age, starting from a prior worth `PRIOR_FRAGMENTS` fragments of that
published shape, so that the first day of a pool already has a forecast.
"""

from __future__ import annotations

from math import erf

import numpy as np
from numpy.typing import NDArray

from sunfleck.core.model import NodeName, NodeView, PoolHistory, Snapshot

Floats = NDArray[np.float64]

N_BUCKETS = 48
"""Half-octaves: ages up to 2**24 s, half a year."""
EDGES: Floats = np.concatenate(([0.0], 2.0 ** (np.arange(1, N_BUCKETS + 1) / 2.0)))
"""Bucket i holds ages in [EDGES[i], EDGES[i + 1])."""
PRIOR_FRAGMENTS = 20.0
PRIOR_MEDIAN_S = 475.0
PRIOR_LOG_SPREAD = 1.5
"""Log-normal fit to the published lengths: p50 475 s, p90 3,269 s."""
LONGEST_S = 150.0
"""A decision is never assumed to stand longer: the next join, leave or completion revises it. On Summit's trace at the
published costs 150 s does as well as the best fixed horizon (120 s) and better than 100 or 300 s."""
FAR_S = 3600.0
"""Stays are told apart up to here."""


def _prior() -> Floats:
    z = (np.log(np.maximum(EDGES, 1e-9)) - np.log(PRIOR_MEDIAN_S)) / (PRIOR_LOG_SPREAD * 2.0**0.5)
    cumulative = np.array([0.5 * (1.0 + erf(float(v))) for v in z])
    cumulative[-1] = 1.0
    return PRIOR_FRAGMENTS * np.diff(cumulative)


_PRIOR = _prior()


class Forecast:
    """Stays of the nodes of one snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._now_s = snapshot.now_s
        nodes = snapshot.nodes
        ages = np.maximum(snapshot.now_s - np.array([n.joined_s for n in nodes], dtype=np.float64), 0.0)
        self._cumulative, self._survival = survival(snapshot.history, ages)
        known = np.array([np.inf if n.leaves_s is None else max(0.0, n.leaves_s - self._now_s) for n in nodes])
        self._announced: dict[NodeName, float] = {n.name: float(k) for n, k in zip(nodes, known, strict=True)}
        expected = np.minimum(self._within(ages, FAR_S), known)
        self._expected: dict[NodeName, float] = {n.name: float(e) for n, e in zip(nodes, expected, strict=True)}
        within = np.minimum(self._within(ages, LONGEST_S), known)
        self._horizon_s = float(within.mean()) if len(nodes) else LONGEST_S

    def _within(self, ages: Floats, limit_s: float) -> Floats:
        """Expected time until leaving or until `limit_s` from now, by age."""
        start = np.interp(ages, EDGES, self._cumulative)
        end = np.interp(ages + limit_s, EDGES, self._cumulative)
        alive = np.maximum(np.interp(ages, EDGES, self._survival), 1e-12)
        return np.minimum((end - start) / alive, limit_s)

    def stay_s(self, node: NodeView) -> float:
        """Expected seconds it stays from now on: at most an hour, or until its announced leave."""
        return self._expected[node.name]

    def announced_s(self, node: NodeName) -> float:
        """Seconds until its announced leave; infinite when nothing is announced."""
        return self._announced[node]

    @property
    def horizon_s(self) -> float:
        """How long a decision about these nodes will stand, on average: their expected stay within LONGEST_S."""
        return self._horizon_s


def survival(history: PoolHistory, ages_s: Floats) -> tuple[Floats, Floats]:
    """(integral of the survival function from 0, survival function), both at EDGES."""
    ended = _PRIOR.copy()
    counts = np.asarray(history.ended[:N_BUCKETS], dtype=np.float64)
    ended[: len(counts)] += counts
    at_risk = np.cumsum(ended[::-1])[::-1].copy()
    if len(ages_s):
        # A node of this age has survived all buckets below its own, and half of that on average.
        bucket = np.minimum(np.searchsorted(EDGES, ages_s, side="right") - 1, N_BUCKETS - 1)
        alive = np.bincount(bucket, minlength=N_BUCKETS).astype(np.float64)
        at_risk += np.cumsum(alive[::-1])[::-1] - 0.5 * alive
    hazard = np.clip(ended / np.maximum(at_risk, 1e-12), 0.0, 1.0)
    alive_at = np.concatenate(([1.0], np.cumprod(1.0 - hazard)))
    widths = np.diff(EDGES)
    integral = np.concatenate(([0.0], np.cumsum(0.5 * (alive_at[1:] + alive_at[:-1]) * widths)))
    return integral, alive_at
