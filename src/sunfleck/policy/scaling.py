"""PURE. Scaling curves: the throughput a job has, or is assumed to have, at n nodes.

The model is the time per sample of data-parallel training at a constant global batch,

    T(n) = a + b/n + c log(n)          [s per sample], a, b, c >= 0, throughput = 1 / T(n)

b is the work that is shared by the nodes, a what every node does alike (input, optimizer, fixed latencies) and c the
gradient exchange, which grows with the depth of the reduction tree. With a and b alone this is Amdahl's law; with c
the curve turns down beyond n = b/c, so a retrograde curve is believed as soon as it is seen.

The fit is a weighted linear least-squares problem in (a, b, c): relative errors, weighted by the confidence of each
point, plus two weak prior equations (see `PRIOR_*`) that make it well posed for any number of points. Few points are
therefore extrapolated optimistically, nearly linearly, and many points overrule the prior. Non-negativity is exact:
the best of the 7 possible active sets is taken, each solved in closed form.

Whatever the model says, a point whose confidence interval is tight stays exactly as measured; between such points
the ratio measured / modelled is interpolated over log(n), and beyond the outermost one it is held, so that the curve
has no cliff at the edge of what is known.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from sunfleck.core.model import ScaleStats

Floats = NDArray[np.float64]

TIGHT = 0.05
"""Relative standard error up to which a measured point is taken as it is."""
PRIOR_NOISE = 0.15
PRIOR_NOISE_REPORTS = 3.0
"""Spread of single reports assumed before any is seen, relative to the mean, and its weight in reports. Without it two
reports that happen to agree would pass for certainty; with it, whoever stops at a relative error of `TIGHT` is off by
less than that on average, whether single reports scatter by 2 % or by 30 %."""
PRIOR_SERIAL = 0.005
PRIOR_SERIAL_SPREAD = 0.2
"""Prior of a / T(1): mean and spread. 0.005 is the middle of the seven networks measured on Summit (0.0015 .. 0.02)."""
PRIOR_LOG_SPREAD = 0.05
"""Prior spread of c / T(1) around 0."""
MODEL_ERROR = 0.03
"""How far real machines are off any such curve, relative: however sure a measurement is, the fit need not hit it."""
LEAST_ONE_NODE = 0.5
"""T(1) is at least this fraction of the time at the smallest measured size: what was not measured below a retrograde
range is not assumed to be a multiple faster."""


def relative_error(stats: ScaleStats) -> float:
    """Relative standard error of a mean throughput; infinite when there is no usable report.

    The variance of single reports is estimated with a prior (`PRIOR_NOISE`), as the posterior mean of a scaled
    inverse chi-squared distribution would be, so that it is finite from the first report on and never 0.
    """
    if stats.n_reports < 1 or not stats.mean_per_s > 0.0:
        return float("inf")
    prior = PRIOR_NOISE_REPORTS * (PRIOR_NOISE * stats.mean_per_s) ** 2
    variance = (prior + max(stats.m2, 0.0)) / (PRIOR_NOISE_REPORTS + stats.n_reports - 1)
    return float((variance / stats.n_reports) ** 0.5 / stats.mean_per_s)


class Curve(ABC):
    """Throughput in samples/s as a function of the number of nodes; 0 at 0 nodes. Subclasses define `per_s`."""

    @abstractmethod
    def per_s(self, n: object) -> Floats:
        """Samples/s at `n` nodes: a number or an array of numbers >= 0 (any shape is kept)."""

    def at(self, n: float) -> float:
        """Samples/s at `n` nodes, as a plain number."""
        return float(self.per_s(n))

    def table(self, n_max: int) -> Floats:
        """Samples/s at 0, 1 .. n_max nodes."""
        return self.per_s(np.arange(n_max + 1))

    def measured(self, n: int) -> bool:
        """Whether the value at `n` nodes was measured with confidence (False: assumed)."""
        return False

    def efficiency(self, n: int) -> float:
        """Throughput per node relative to one node: P(n) / (n P(1)); 1 at n = 1."""
        return self.at(n) / (n * self.at(1)) if n > 0 else 0.0


@dataclass(frozen=True, eq=False)
class FittedCurve(Curve):
    """The model of this module with the measured points laid over it."""

    a: float
    b: float
    c: float
    known: frozenset[int] = frozenset()
    """Sizes whose value is exactly as measured."""
    log_n: Floats = field(default_factory=lambda: np.zeros(0), repr=False)
    log_ratio: Floats = field(default_factory=lambda: np.zeros(0), repr=False)
    """log(measured / modelled throughput) over log(n), at the sizes where there is a report."""

    def per_s(self, n: object) -> Floats:
        sizes = np.asarray(n, dtype=np.float64)
        safe = np.maximum(sizes, 1.0)
        log_n = np.log(safe)
        per_s = 1.0 / (self.a + self.b / safe + self.c * log_n)
        if self.log_n.size:
            per_s = per_s * np.exp(np.interp(log_n, self.log_n, self.log_ratio))
        return np.where(sizes >= 1.0, per_s, np.maximum(sizes, 0.0) * per_s)

    def measured(self, n: int) -> bool:
        return n in self.known


@dataclass(frozen=True)
class PiecewiseCurve(Curve):
    """Given points, joined by straight lines from (0, 0); level beyond the last point."""

    sizes: tuple[float, ...]
    values_per_s: tuple[float, ...]

    @staticmethod
    def through(points: Mapping[int, float] | Iterable[tuple[int, float]]) -> PiecewiseCurve:
        """Points as (nodes, samples/s), in any order. Raises ValueError for a size < 1 or a negative throughput."""
        pairs = sorted(dict(points).items())
        if not pairs or pairs[0][0] < 1 or any(not value >= 0.0 for _, value in pairs):
            raise ValueError(f"a scaling curve needs points (nodes >= 1, samples/s >= 0), not {pairs}")
        return PiecewiseCurve(tuple(float(n) for n, _ in pairs), tuple(float(v) for _, v in pairs))

    def per_s(self, n: object) -> Floats:
        xs = np.array((0.0, *self.sizes))
        ys = np.array((0.0, *self.values_per_s))
        return np.asarray(np.interp(np.asarray(n, dtype=np.float64), xs, ys))

    def measured(self, n: int) -> bool:
        return float(n) in self.sizes


def linear_curve(one_node_per_s: float, n_max: int) -> PiecewiseCurve:
    """Perfect scaling up to n_max nodes: what somebody who knows nothing would claim."""
    return PiecewiseCurve((1.0, float(max(n_max, 2))), (one_node_per_s, one_node_per_s * max(n_max, 2)))


@lru_cache(maxsize=4096)
def fit(scales: tuple[ScaleStats, ...], tight: float = TIGHT, optimism: float = 0.0) -> FittedCurve:
    """The curve of a job from what was measured at each size; works for any number of points, 0 included.

    optimism: relative gain assumed per doubling beyond the largest measured size, on top of the model, so that a
    promising size gets tried in normal running, and is then known.

    Without any report the unit is arbitrary (one node trains 1 sample/s): shapes can be compared, rates cannot.
    """
    points = sorted(
        ((s.n_nodes, s.mean_per_s, relative_error(s)) for s in scales if s.n_nodes >= 1 and s.n_reports >= 1),
        key=lambda point: point[0],
    )
    points = [p for p in points if np.isfinite(p[2]) and np.isfinite(p[1])]
    if not points:
        return FittedCurve(PRIOR_SERIAL, 1.0 - PRIOR_SERIAL, 0.0)
    sizes = np.array([p[0] for p in points], dtype=np.float64)
    time_s = 1.0 / np.array([p[1] for p in points], dtype=np.float64)
    errors = np.array([p[2] for p in points], dtype=np.float64)
    a, b, c = _non_negative_fit(sizes, time_s, errors)
    modelled_s = a + b / sizes + c * np.log(sizes)
    # A loose point pulls the curve only as far as it can be trusted.
    trust = np.minimum(1.0, (tight / errors) ** 2)
    log_ratio = np.log(modelled_s / time_s) * trust
    known = frozenset(int(n) for n, error in zip(sizes, errors, strict=True) if error <= tight)
    log_sizes = np.log(sizes)
    if optimism > 0.0:
        doublings = 20.0
        log_sizes = np.append(log_sizes, log_sizes[-1] + doublings * np.log(2.0))
        log_ratio = np.append(log_ratio, log_ratio[-1] + doublings * np.log1p(optimism))
    return FittedCurve(a, b, c, known, log_sizes, log_ratio)


def _non_negative_fit(sizes: Floats, time_s: Floats, errors: Floats) -> tuple[float, float, float]:
    """Coefficients (a, b, c) >= 0 of T(n) that minimise the weighted squared relative errors plus the prior."""
    unit = float(time_s[0] * sizes[0])  # about T(1); makes the coefficients dimensionless
    weight = 1.0 / np.hypot(errors, MODEL_ERROR)
    observed = time_s / unit
    basis = np.stack((np.ones_like(sizes), 1.0 / sizes, np.log(sizes)), axis=1)
    rows = np.vstack(
        (
            basis * (weight / observed)[:, None],
            (1.0 / PRIOR_SERIAL_SPREAD, 0.0, 0.0),
            (0.0, 0.0, 1.0 / PRIOR_LOG_SPREAD),
        )
    )
    target = np.concatenate((weight, (PRIOR_SERIAL / PRIOR_SERIAL_SPREAD, 0.0)))
    normal = (rows.T @ rows).tolist()
    right = (rows.T @ target).tolist()
    least = LEAST_ONE_NODE * float(observed[0])
    best: tuple[float, list[float]] | None = None
    for size in (3, 2, 1):
        for active in combinations(range(3), size):
            x = _solve(normal, right, active)
            if x is None or min(x) < 0.0 or x[0] + x[1] < least:
                continue
            # At a stationary point the loss is a constant less x . right.
            loss = -sum(v * r for v, r in zip(x, right, strict=True))
            if best is None or loss < best[0]:
                best = (loss, x)
        if best is not None and size == 3:
            break  # the problem is convex: a feasible unconstrained optimum is the optimum
    if best is None:
        return 0.0, unit, 0.0
    a, b, c = (v * unit for v in best[1])
    return a, b, c


def _solve(normal: list[list[float]], right: list[float], active: Sequence[int]) -> list[float] | None:
    """The normal equations of the active coefficients, by elimination; 0 elsewhere; None where they are singular, as
    for log(n) alone when n = 1 is the only size. In plain numbers: for three unknowns a call of numpy costs more.
    """
    rows = [[normal[i][j] for j in active] + [right[i]] for i in active]
    n = len(rows)
    for p in range(n):
        pivot = rows[p][p]
        if not pivot > 1e-14 * normal[active[p]][active[p]]:
            return None
        for q in range(p + 1, n):
            factor = rows[q][p] / pivot
            rows[q] = [v - factor * u for v, u in zip(rows[q], rows[p], strict=True)]
    x = [0.0, 0.0, 0.0]
    for p in range(n - 1, -1, -1):
        rest = sum(rows[p][q] * x[active[q]] for q in range(p + 1, n))
        x[active[p]] = (rows[p][n] - rest) / rows[p][p]
    return x
