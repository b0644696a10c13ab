"""Measurements of a job: a bounded memory, and drifts that make it forget."""

from __future__ import annotations

import random

import pytest

from sunfleck.core.model import ScaleStats
from sunfleck.core.scales import MEMORY_REPORTS, observe
from sunfleck.policy.scaling import fit, relative_error


def run(
    scales: dict[int, ScaleStats], n_nodes: int, per_s: float, count: int, noise: float = 0.1, seed: int = 1
) -> int:
    """Reports of one size; returns how many drifts were seen."""
    rng = random.Random(seed)
    return sum(observe(scales, n_nodes, per_s * max(0.05, rng.gauss(1.0, noise)), 0.5) for _ in range(count))


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1, 0.3])
def test_noise_is_no_drift(noise: float) -> None:
    scales: dict[int, ScaleStats] = {}
    assert sum(run(scales, 4, 100.0, 3000, noise, seed) for seed in range(3)) == 0
    assert scales[4].mean_per_s == pytest.approx(100.0, rel=0.03)
    assert scales[4].n_reports == MEMORY_REPORTS


@pytest.mark.parametrize("factor", [0.5, 1.6])
def test_a_drift_is_seen_and_the_past_forgotten(factor: float) -> None:
    scales: dict[int, ScaleStats] = {}
    for n in (1, 2, 4):
        run(scales, n, 100.0 * n**0.9, 200)
    assert run(scales, 4, factor * 100.0 * 4**0.9, 25) == 1
    assert scales[4].mean_per_s == pytest.approx(factor * 100.0 * 4**0.9, rel=0.15)
    low, high = sorted((factor, 1.0))
    assert low * 95.0 < scales[1].mean_per_s < high * 98.0 if factor < 1 else scales[1].mean_per_s > 110.0
    assert scales[1].n_reports == 1
    assert relative_error(scales[1]) > 0.05
    curve = fit(tuple(scales[n] for n in sorted(scales)))
    assert curve.at(8) == pytest.approx(factor * 100.0 * 8**0.9, rel=0.4)
    assert not curve.measured(1)


def test_slow_change_is_followed() -> None:
    scales: dict[int, ScaleStats] = {}
    for i in range(4000):
        observe(scales, 2, 100.0 + i * 0.01, 0.5)
    assert scales[2].mean_per_s == pytest.approx(140.0, rel=0.06)
