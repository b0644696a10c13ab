"""The exact allocator against brute force and against HiGHS, and its promises about ties."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sunfleck.policy import knapsack
from sunfleck.policy.knapsack import Table


def brute_force(tables: list[Table], n_nodes: int) -> float:
    best = -np.inf
    for choice in product(*(range(len(t.sizes)) for t in tables)):
        if sum(int(t.sizes[i]) for t, i in zip(tables, choice, strict=True)) <= n_nodes:
            best = max(best, sum(float(t.values[i]) for t, i in zip(tables, choice, strict=True)))
    return float(best)


@st.composite
def table(draw: st.DrawFn, max_size: int = 7, may_pin: bool = True) -> Table:
    """Any worths at all: not concave, negative, with many exact ties (small integers) or arbitrary floats."""
    sizes = sorted(draw(st.sets(st.integers(1, max_size), min_size=1, max_size=5)))
    if not may_pin or draw(st.integers(0, 4)) > 0:
        sizes = [0, *sizes]
    number = st.one_of(st.integers(-3, 9).map(float), st.floats(-1e4, 1e4, allow_nan=False))
    values = [draw(number) for _ in sizes]
    return Table.of(sizes, values, draw(st.sampled_from([0, *sizes])))


@settings(max_examples=300, deadline=None)
@given(st.lists(table(), min_size=0, max_size=5), st.integers(0, 16), st.booleans())
def test_equals_brute_force(tables: list[Table], n_nodes: int, reduce: bool) -> None:
    if sum(int(t.sizes[0]) for t in tables) > n_nodes:
        with pytest.raises(knapsack.Infeasible):
            knapsack.solve(tables, n_nodes, reduce=reduce)
        return
    found = knapsack.solve(tables, n_nodes, reduce=reduce)
    assert sum(found.sizes) <= n_nodes
    assert found.objective == pytest.approx(brute_force(tables, n_nodes), rel=1e-9, abs=1e-6)
    worth = sum(t.value_at(k) for t, k in zip(tables, found.sizes, strict=True))
    assert found.objective == pytest.approx(worth, rel=1e-12, abs=1e-12)


def random_tables(rng: np.random.Generator, n_jobs: int, n_nodes: int) -> list[Table]:
    tables = []
    for _ in range(n_jobs):
        top = int(rng.integers(2, 33))
        step = int(rng.integers(1, 4))
        sizes = np.array([0, *range(int(rng.integers(1, 3)), top + 1, step)])
        values = np.concatenate(([0.0], np.sort(rng.uniform(0, 50, len(sizes) - 1)))) + rng.normal(0, 2, len(sizes))
        tables.append(Table(sizes, values, int(rng.choice(sizes))))
    return tables


@pytest.mark.parametrize("seed", range(12))
def test_equals_highs_on_medium_instances(seed: int) -> None:
    pytest.importorskip("highspy", reason="highspy is not installed (pip install sunfleck[milp])")
    from sunfleck.policy import milp

    rng = np.random.default_rng(seed)
    n_nodes = int(rng.integers(40, 200))
    tables = random_tables(rng, int(rng.integers(10, 40)), n_nodes)
    exact = knapsack.solve(tables, n_nodes)
    other = milp.solve(tables, n_nodes, time_limit_s=20.0)
    assert other.gap <= 1e-8
    assert other.objective == pytest.approx(exact.objective, rel=1e-7)
    assert sum(other.sizes) <= n_nodes


def test_reduction_changes_nothing_but_time() -> None:
    for seed in range(30):
        rng = np.random.default_rng(seed)
        tables = random_tables(rng, 25, 150)
        with_reduction = knapsack.solve(tables, 150)
        without = knapsack.solve(tables, 150, reduce=False)
        assert with_reduction.sizes == without.sizes


def test_highs_out_of_time_keeps_what_runs() -> None:
    pytest.importorskip("highspy", reason="highspy is not installed (pip install sunfleck[milp])")
    from sunfleck.policy import milp

    rng = np.random.default_rng(5)
    tables = random_tables(rng, 60, 400)
    running = [Table(t.sizes, t.values, int(t.sizes[1])) for t in tables]
    found = milp.solve(running, 400, time_limit_s=0.0)
    kept = sum(t.value_at(t.current) for t in running)
    assert sum(found.sizes) <= 400
    assert found.objective >= kept - 1e-9


def test_identical_jobs_are_served_in_order_of_arrival() -> None:
    one = Table.of([0, 4], [0.0, 1.0])
    assert knapsack.solve([one] * 3, 9).sizes == (4, 4, 0)


def test_a_running_job_keeps_its_size_when_nothing_is_gained() -> None:
    flat = Table.of([0, 1, 2, 3], [0.0, 5.0, 5.0, 5.0], current=2)
    assert knapsack.solve([flat], 3).sizes == (2,)
    assert knapsack.solve([flat], 1).sizes == (1,)


def test_a_new_job_takes_no_node_that_gains_nothing() -> None:
    flat = Table.of([0, 1, 2, 3], [0.0, 5.0, 5.0, 5.0])
    assert knapsack.solve([flat], 3).sizes == (1,)


def test_greedy_would_fail_here() -> None:
    """A job that only gains from three nodes together: steepest ascent never gets there."""
    steep = Table.of([0, 1, 2, 3], [0.0, 1.0, 2.0, 9.0])
    smooth = Table.of([0, 1, 2, 3], [0.0, 2.5, 4.0, 5.0])
    assert knapsack.solve([steep, smooth], 3).sizes == (3, 0)


def test_a_table_without_zero_is_never_stopped() -> None:
    worthless = Table.of([2, 3], [-100.0, -200.0], current=3)
    rich = Table.of([0, 1, 2, 3, 4], [0.0, 10.0, 20.0, 30.0, 40.0])
    assert knapsack.solve([worthless, rich], 4).sizes == (2, 2)


def test_no_jobs_and_no_nodes() -> None:
    assert knapsack.solve([], 5).sizes == ()
    assert knapsack.solve([Table.of([0, 1], [0.0, 1.0])], 0).sizes == (0,)


def test_large_instance_is_fast_enough() -> None:
    """Ten times the target, since the machine may be shared: 200 jobs on 5000 nodes."""
    import time

    rng = np.random.default_rng(0)
    sizes = np.arange(65)
    tables = [
        Table(sizes, np.where(sizes > 0, 1 / (s + (1 - s) / np.maximum(sizes, 1)), 0.0))
        for s in rng.uniform(0.001, 0.05, 200)
    ]
    start = time.perf_counter()
    found = knapsack.solve(tables, 5000)
    assert time.perf_counter() - start < 2.0
    assert sum(found.sizes) == 5000
