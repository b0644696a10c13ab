"""Scaling curves from 0, 1, 2 and many measured points."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sunfleck.core.model import ScaleStats
from sunfleck.policy.scaling import PiecewiseCurve, fit, linear_curve, relative_error


def stats(n_nodes: int, per_s: float, n_reports: int = 20, spread: float = 0.01) -> ScaleStats:
    """Measurements with a mean of exactly per_s and the given relative spread of single reports."""
    result = ScaleStats(n_nodes=n_nodes)
    for i in range(n_reports):
        sign = 0.0 if i == 2 * (n_reports // 2) else (1.0 if i % 2 else -1.0)
        result = result.add(per_s * (1.0 + spread * sign), 1.0)
    return result


def amdahl(a: float, c: float = 0.0, scale: float = 100.0) -> dict[int, float]:
    return {n: scale / (a + (1 - a) / n + c * math.log(n)) for n in (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)}


def test_no_point_gives_a_nearly_linear_shape_in_an_arbitrary_unit() -> None:
    curve = fit(())
    assert curve.at(0) == 0.0
    assert curve.at(1) == pytest.approx(1.0)
    assert 7.0 < curve.at(8) < 8.0
    gains = np.diff(curve.table(64))
    assert (gains > 0).all()
    assert (np.diff(gains) < 0).all(), "strictly concave: unknown jobs share nodes equally"
    assert not curve.measured(1)


def test_one_point_is_exact_and_extrapolated_optimistically() -> None:
    curve = fit((stats(4, 400.0),))
    assert curve.at(4) == pytest.approx(400.0)
    assert curve.measured(4)
    assert not curve.measured(5)
    assert 90.0 < curve.at(1) < 115.0
    assert 700.0 < curve.at(8) <= 800.0


def test_two_points_believe_a_serial_part() -> None:
    true = amdahl(0.2)
    curve = fit((stats(1, true[1]), stats(4, true[4])))
    assert curve.at(1) == pytest.approx(true[1])
    assert curve.at(4) == pytest.approx(true[4])
    assert curve.at(8) == pytest.approx(true[8], rel=0.15)


@pytest.mark.parametrize(("a", "c"), [(0.0, 0.0), (0.02, 0.0), (0.15, 0.0), (0.3, 0.05), (0.01, 0.02), (0.5, 0.2)])
def test_four_points_extrapolate_to_twice_their_range(a: float, c: float) -> None:
    true = amdahl(a, c)
    curve = fit(tuple(stats(n, true[n]) for n in (1, 2, 3, 4)))
    for n in (1, 2, 3, 4):
        assert curve.at(n) == pytest.approx(true[n], rel=1e-9)
    assert curve.at(6) == pytest.approx(true[6], rel=0.10)
    assert curve.at(8) == pytest.approx(true[8], rel=0.15)


def test_a_retrograde_curve_is_believed() -> None:
    points = {1: 100.0, 2: 120.0, 3: 110.0, 4: 95.0}
    curve = fit(tuple(stats(n, v) for n, v in points.items()))
    assert curve.at(2) == pytest.approx(120.0)
    assert curve.at(4) == pytest.approx(95.0)
    assert curve.at(8) < 110.0, "what falls at the edge is not assumed to rise beyond it"


def test_points_between_measured_ones_are_interpolated_without_cliffs() -> None:
    true = amdahl(0.05, 0.01)
    curve = fit(tuple(stats(n, true[n]) for n in (1, 4, 16)))
    for n in (2, 3, 6, 8, 12):
        assert curve.at(n) == pytest.approx(true[n], rel=0.05)


def test_a_single_noisy_report_moves_the_curve_only_a_little() -> None:
    true = amdahl(0.05)
    known = tuple(stats(n, true[n]) for n in (1, 2, 4))
    outlier = ScaleStats(n_nodes=3).add(0.6 * true[3], 1.0)
    curve = fit((*known, outlier))
    assert not curve.measured(3)
    assert curve.at(3) > 0.75 * true[3]


def test_relative_error_is_finite_from_the_first_report_and_shrinks() -> None:
    assert relative_error(ScaleStats(n_nodes=1)) == math.inf
    errors = [relative_error(stats(1, 50.0, n_reports=n)) for n in (1, 2, 4, 16)]
    assert errors == sorted(errors, reverse=True)
    assert 0.0 < errors[-1] < errors[0] < math.inf
    assert relative_error(ScaleStats(n_nodes=1, n_reports=3, mean_per_s=0.0)) == math.inf


def test_vectorised_over_any_shape() -> None:
    curve = fit((stats(1, 10.0), stats(2, 19.0)))
    assert curve.per_s(np.arange(6).reshape(2, 3)).shape == (2, 3)
    assert curve.table(5)[0] == 0.0
    assert curve.table(5)[2] == pytest.approx(curve.at(2))


@given(
    st.dictionaries(
        st.integers(1, 64), st.floats(1e-3, 1e7, allow_nan=False, allow_infinity=False), min_size=0, max_size=8
    ),
    st.integers(1, 30),
    st.floats(0.0, 0.5),
)
def test_any_measurements_give_a_usable_curve(points: dict[int, float], n_reports: int, spread: float) -> None:
    curve = fit(tuple(stats(n, v, n_reports, spread) for n, v in points.items()))
    table = curve.table(128)
    assert table[0] == 0.0
    assert np.isfinite(table).all()
    assert (table[1:] > 0.0).all()
    for n, v in points.items():
        if curve.measured(n):
            assert curve.at(n) == pytest.approx(v, rel=1e-6)


def test_unusable_measurements_are_left_out() -> None:
    broken = ScaleStats(n_nodes=2, n_reports=3, mean_per_s=0.0)
    assert fit((broken, stats(1, 10.0))).at(2) > 15.0


def test_given_points_are_joined_by_straight_lines() -> None:
    curve = PiecewiseCurve.through({1: 10.0, 4: 31.0})
    assert list(curve.per_s([0, 1, 2, 4, 9])) == [0.0, 10.0, 17.0, 31.0, 31.0]
    assert curve.measured(4)
    assert not curve.measured(2)
    assert curve.efficiency(4) == pytest.approx(31 / 40)
    assert linear_curve(3.0, 8).at(8) == 24.0
    with pytest.raises(ValueError, match="scaling curve"):
        PiecewiseCurve.through({0: 1.0})


def test_optimism_grows_beyond_what_is_known_and_touches_nothing_else() -> None:
    true = amdahl(0.05)
    scales = tuple(stats(n, true[n]) for n in (1, 2, 4))
    plain, hopeful = fit(scales), fit(scales, optimism=0.02)
    for n in (1, 2, 3, 4):
        assert hopeful.at(n) == pytest.approx(plain.at(n))
    assert hopeful.at(8) == pytest.approx(1.02 * plain.at(8), rel=1e-6)
    assert hopeful.at(64) == pytest.approx(1.02**4 * plain.at(64), rel=1e-6)
    assert fit((*scales, stats(8, true[8])), optimism=0.02).at(8) == pytest.approx(true[8])
