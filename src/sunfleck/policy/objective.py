"""PURE. What a size is worth to a job: the objective of MalleTrain's MILP, with the cost of a start.

Over the horizon T_fwd, a job with C nodes now that gets n is worth (SYSTEMS of equations in ICPE 2024, section 4)

    v(n) = T_fwd O(n) - O(C) (R_up [n > C] + R_dw [n < C])          C > 0
    v(n) = (T_fwd - start) O(n)                                     C = 0, n > 0

O is the throughput, raw or normalised: weight * P(n) / P(1), i.e. how many first nodes' worth of work is done. Raw
throughput starves slow models; normalised throughput treats a node-second as equal for all jobs of a weight, and
gives every job a node before it gives anybody a less useful second one.

When min_nodes > 1, P(1) is the fitted curve's extrapolation below the smallest size; it is bounded to what
linear scaling from min_nodes down allows, so that a job cannot claim superlinear speedup where it cannot run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from sunfleck.core.model import JobSpec, JobView

from .knapsack import Floats, Ints, Table
from .scaling import Curve

START_CAP = 0.9
"""A start is charged at most this fraction of the horizon: an idle node is always worth starting a job on."""
RESCALING_FACTOR = 2.0
"""Costs of a job whose change of size is under way: moving it again now costs that move too."""


@dataclass(frozen=True, eq=False)
class Worth:
    """A job's table for the knapsack and the rates O(n) it was made of."""

    table: Table
    rates: Floats
    """O at 0 .. n_max nodes."""

    def rate(self, n: int) -> float:
        return float(self.rates[n]) if n < len(self.rates) else 0.0


def rates_of(spec: JobSpec, curve: Curve, n_max: int, *, normalised: bool) -> Floats:
    """O(n) at 0 .. n_max nodes; in first nodes' worth when normalised, else in samples/s; times the weight."""
    # A power of two, so that a pool that breathes asks for few different tables of one curve.
    length = 1 << n_max.bit_length()
    return _rates(curve, length, max(spec.min_nodes, 1), spec.weight, normalised)[: n_max + 1]


@lru_cache(maxsize=4096)
def _rates(curve: Curve, length: int, smallest: int, weight: float, normalised: bool) -> Floats:
    per_s = curve.table(length - 1)
    unit = max(curve.at(1), curve.at(smallest) / smallest) if normalised else 1.0
    rates = weight * per_s / unit if unit > 0.0 else np.zeros_like(per_s)
    rates.flags.writeable = False
    return rates


@lru_cache(maxsize=4096)
def _sizes(smallest: int, largest: int, multiple: int) -> Ints:
    """0 and the sizes a job may take."""
    sizes = np.array((0, *range(smallest, largest + 1, multiple)), dtype=np.int64)
    sizes.flags.writeable = False
    return sizes


def worth(
    job: JobView,
    curve: Curve,
    n_nodes: int,
    t_fwd_s: float,
    *,
    normalised: bool = True,
    may_stop: bool = True,
    only: int | None = None,
    free_start: bool = False,
) -> Worth:
    """Sizes and worth of one job on a pool of `n_nodes` nodes.

    may_stop: whether size 0 is offered. only: offer exactly this size (a profile). free_start: as in the published
    model, where a job starts from 0 nodes at no cost.
    """
    spec, held = job.spec, len(job.nodes)
    n_max = max(min(spec.max_nodes, n_nodes), held, 1)
    rates = rates_of(spec, curve, n_max, normalised=normalised)
    if only is None:
        sizes = _sizes(spec.min_nodes, min(spec.max_nodes, n_nodes), spec.multiple)
    else:
        sizes = np.array((only,), dtype=np.int64)
    if not may_stop and len(sizes) > 1:
        sizes = sizes[1:]
    costs = job.costs
    factor = RESCALING_FACTOR if job.rescaling else 1.0
    if held >= spec.min_nodes:
        up_s, down_s = costs.rescale_up_s.value_s, costs.rescale_down_s.value_s
        lost_s = np.where(sizes > held, up_s, np.where(sizes < held, down_s, 0.0))
        values = t_fwd_s * rates[sizes] - factor * rates[held] * lost_s
    else:
        start_s = 0.0 if free_start else min(factor * costs.start_s.value_s, START_CAP * t_fwd_s)
        values = (t_fwd_s - start_s) * rates[sizes]
    return Worth(Table(sizes, values, held), rates)
