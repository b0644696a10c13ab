"""PURE. What a size is worth to a job: the objective of MalleTrain's MILP, with what it leaves out.

Over the horizon T (T_fwd), a job that has C nodes now and gets n is worth

    v(n) = T O(n) - O(C) (R_up [n > C] + R_dw [n < C])          C > 0      (ICPE 2024)
    v(n) = (T - start) O(n)                                     C = 0, n > 0

O is the throughput, raw or normalised: weight * P(n) / P(1), i.e. how many first nodes' worth of work is done. Raw
throughput starves slow models; normalised throughput treats a node-second as equal for all jobs of a weight, and
gives every job a node before it gives anybody a less useful second one.

Nodes that are known to leave at t < T are worth less: with f of its n nodes leaving, a job loses

    (T - t) (O(n) - O(n - f)) + R_dw O(n) [f > 0]

A job with a deadline and a known end is worth more up to the throughput r that it needs to be in time:
O(n) + URGENCY * weight * min(P(n), r) / P(1), as long as r can be reached at all.

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
LEAST = 1e-3
"""Fraction of its worth that a size keeps however soon its nodes leave."""
URGENCY = 4.0
"""Worth of a sample that a deadline needs, beyond its own."""


@dataclass(frozen=True, eq=False)
class Worth:
    """A job's table for the knapsack and the rates O(n) it was made of."""

    table: Table
    rates: Floats
    """O at 0 .. n_max nodes."""

    def rate(self, n: int) -> float:
        return float(self.rates[n]) if n < len(self.rates) else 0.0


@dataclass(frozen=True, kw_only=True)
class Fragile:
    """Nodes known to leave within the horizon: how many a job holds, what share of the others', and when."""

    held: int = 0
    share: float = 0.0
    """Of the nodes that it may get in addition."""
    leaves_in_s: float = 0.0


def rates_of(spec: JobSpec, curve: Curve, n_max: int, *, normalised: bool, urgent_per_s: float = 0.0) -> Floats:
    """O(n) at 0 .. n_max nodes; in first nodes' worth when normalised, else in samples/s; times the weight.

    urgent_per_s: throughput that the job's deadline needs (0: none).
    """
    # A power of two, so that a pool that breathes asks for few different tables of one curve.
    length = 1 << n_max.bit_length()
    rates = _rates(curve, length, max(spec.min_nodes, 1), spec.weight, normalised)[: n_max + 1]
    if urgent_per_s <= 0.0:
        return rates
    per_s = curve.table(n_max)
    unit = per_s[1] if normalised and n_max >= 1 and per_s[1] > 0.0 else 1.0
    return rates + URGENCY * spec.weight * np.minimum(per_s, urgent_per_s) / unit


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


def needed_per_s(job: JobView, curve: Curve, n_max: int, now_s: float) -> float:
    """Throughput the job needs to meet its deadline; 0 without a deadline, or when it cannot be met any more."""
    spec = job.spec
    if spec.deadline_s is None or spec.total_samples is None or not job.scales:
        return 0.0
    left_s = job.submitted_s + spec.deadline_s - now_s
    left = spec.total_samples - job.samples
    if left_s <= 0.0 or left <= 0.0:
        return 0.0
    needed = left / left_s
    return needed if needed <= float(curve.table(n_max).max()) else 0.0


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
    free_rescale: bool = False,
    fragile: Fragile | None = None,
    now_s: float = 0.0,
) -> Worth:
    """Sizes and worth of one job on a pool of `n_nodes` nodes.

    may_stop: whether size 0 is offered. only: offer exactly this size (a profile). free_start: as in the published
    model, where a job starts from 0 nodes at no cost. free_rescale: changes of size cost nothing either.
    """
    spec, held = job.spec, len(job.nodes)
    n_max = max(min(spec.max_nodes, n_nodes), held, 1)
    urgent = needed_per_s(job, curve, n_max, now_s) if spec.deadline_s is not None else 0.0
    rates = rates_of(spec, curve, n_max, normalised=normalised, urgent_per_s=urgent)
    if only is None:
        sizes = _sizes(spec.min_nodes, min(spec.max_nodes, n_nodes), spec.multiple)
    else:
        sizes = np.array((only,), dtype=np.int64)
    if not may_stop and len(sizes) > 1:
        sizes = sizes[1:]
    costs = job.costs
    factor = RESCALING_FACTOR if job.rescaling else 1.0
    down_s = 0.0 if free_rescale else costs.rescale_down_s.value_s
    up_s = 0.0 if free_rescale else costs.rescale_up_s.value_s
    if held >= spec.min_nodes:
        lost_s = np.where(sizes > held, up_s, np.where(sizes < held, down_s, 0.0))
        values = t_fwd_s * rates[sizes] - factor * rates[held] * lost_s
    else:
        free = free_start or free_rescale
        start_s = 0.0 if free else min(factor * costs.start_s.value_s, START_CAP * t_fwd_s)
        values = (t_fwd_s - start_s) * rates[sizes]
    if fragile is not None and fragile.leaves_in_s < t_fwd_s:
        more = np.maximum(sizes - held, 0)
        kept = np.maximum(fragile.held - np.maximum(held - sizes, 0), 0)
        leaving = kept + fragile.share * more
        after = np.interp(sizes - leaving, np.arange(len(rates)), rates)
        loss = (t_fwd_s - fragile.leaves_in_s) * (rates[sizes] - after) + down_s * rates[sizes] * np.minimum(leaving, 1)
        # Never below nothing: a node that leaves soon is still worth using until then.
        values = np.where(sizes > 0, np.maximum(values - loss, np.minimum(values, LEAST * values)), values)
    return Worth(Table(sizes, values, held), rates)
