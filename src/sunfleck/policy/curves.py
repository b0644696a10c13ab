"""PURE. Where a policy takes its scaling curves from, other than measurements.

FreeTrain (CCGrid 2023) asks users for them. `true`, `linear` and `noisy` are three qualities of such answers: what a
careful user has measured, what an honest user would guess, and what a user remembers. The true ones exist only where
jobs are simulated, or where somebody has measured them beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TypeAlias
from zlib import crc32

import numpy as np

from sunfleck.core.model import JobView

from .scaling import Curve, PiecewiseCurve, linear_curve

CurveSource: TypeAlias = Callable[[JobView], Curve]


def by_key(curves: Mapping[str, Curve]) -> CurveSource:
    """Curves by the job's id, name or architecture, whichever is found first. Raises KeyError for an unknown job."""

    def curve(job: JobView) -> Curve:
        for key in (job.job, job.spec.name, job.spec.architecture):
            if key in curves:
                return curves[key]
        raise KeyError(f"no scaling curve is given for job {job.job} ({job.spec.name})")

    return curve


def linear(true: CurveSource | None = None) -> CurveSource:
    """Perfect scaling from the true one-node throughput (1 sample/s where that is not known)."""

    def curve(job: JobView) -> Curve:
        return _linear(1.0 if true is None else true(job).at(1), job.spec.max_nodes)

    return curve


def noisy(true: CurveSource, noise: float = 0.3, seed: int = 0) -> CurveSource:
    """Every point of the curve (at 1, 2, 4 .. max nodes) wrong by up to +-noise, uniformly, for each job anew."""

    def curve(job: JobView) -> Curve:
        return _noisy(true(job), job.spec.max_nodes, noise, crc32(job.job.encode()) ^ seed)

    return curve


@lru_cache(maxsize=1024)
def _linear(one_node_per_s: float, max_nodes: int) -> Curve:
    return linear_curve(one_node_per_s, max_nodes)


@lru_cache(maxsize=8192)
def _noisy(true: Curve, max_nodes: int, noise: float, seed: int) -> Curve:
    rng = np.random.default_rng(seed)
    sizes = [1 << i for i in range(max_nodes.bit_length()) if 1 << i < max_nodes] + [max_nodes]
    return PiecewiseCurve.through({n: true.at(n) * (1.0 + noise * float(rng.uniform(-1.0, 1.0))) for n in sizes})
