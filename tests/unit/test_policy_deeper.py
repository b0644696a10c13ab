"""Forecasts, horizon, fragile nodes, priorities, deadlines, users and kinds of nodes."""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sunfleck.core.model import Cost, Costs, JobSpec, JobView, NodeView, Plan, PoolHistory, ScaleStats, Snapshot
from sunfleck.policy import kinds, registry
from sunfleck.policy.forecast import EDGES, LONGEST_S, Forecast, survival
from sunfleck.policy.knapsack import Infeasible, Table

from .policy_world import check_plan, snapshots


def job(name: str, n_held: int = 0, first: int = 0, *, view: dict[str, Any] | None = None, **spec: Any) -> JobView:
    held = tuple(f"n{i:02d}" for i in range(first, first + n_held))
    scales = tuple(ScaleStats(n_nodes=n, n_reports=50, mean_per_s=100.0 * n**0.8, trained_s=99.0) for n in range(1, 13))
    fields: dict[str, Any] = {"scales": scales, "submitted_s": 0.0, **(view or {})}
    return JobView(
        job=name, spec=JobSpec(name=name, **{"max_nodes": 12, **spec}), nodes=held, started=n_held > 0, **fields
    )


def pool(n_nodes: int, *jobs: JobView, **more: Any) -> Snapshot:
    owner = {n: j.job for j in jobs for n in j.nodes}
    leaves = more.pop("leaves", {})
    kind = more.pop("kind", {})
    names = [f"n{i:02d}" for i in range(n_nodes)]
    nodes = tuple(NodeView(name=n, job=owner.get(n), leaves_s=leaves.get(n), kind=kind.get(n, "node")) for n in names)
    return Snapshot(generation=1, now_s=1000.0, nodes=nodes, jobs=jobs, **more)


def plan(world: Snapshot, **options: Any) -> Plan:
    made = registry.make("optimum", **{"n_scales": 0, "t_fwd_s": 60.0, **options}).plan(world)
    check_plan(world, made)
    return made


def counts(made: Plan) -> dict[str, int]:
    return defaultdict(int, {p.job: len(p.nodes) for p in made.jobs})


def nodes(made: Plan, name: str) -> tuple[str, ...]:
    return next(p.nodes for p in made.jobs if p.job == name)


# -- forecast ----------------------------------------------------------------------------------------------------


def test_survival_follows_what_was_seen() -> None:
    rng = np.random.default_rng(1)
    stays = rng.exponential(600.0, 3000)
    history = PoolHistory().joined(0.0).left(stays.tolist())
    integral, alive = survival(history, np.zeros(0))
    for t in (100.0, 600.0, 1500.0):
        assert np.interp(t, EDGES, alive) == pytest.approx(np.exp(-t / 600.0), abs=0.05)
    assert integral[-1] == pytest.approx(600.0, rel=0.1)
    assert (np.diff(alive) <= 0.0).all()
    assert alive[0] == 1.0


def test_nodes_that_still_run_count_as_survivors() -> None:
    history = PoolHistory(since_s=0.0).left([50.0] * 100)
    _, pessimistic = survival(history, np.zeros(0))
    _, better = survival(history, np.full(300, 5000.0))
    assert np.interp(60.0, EDGES, better) > np.interp(60.0, EDGES, pessimistic) + 0.3


def test_heavy_tails_make_old_nodes_stay() -> None:
    world = Snapshot(
        generation=1,
        now_s=10_000.0,
        nodes=(
            NodeView(name="old", joined_s=0.0),
            NodeView(name="new", joined_s=9_990.0),
            NodeView(name="said", joined_s=0.0, leaves_s=10_030.0),
        ),
        jobs=(),
    )
    forecast = Forecast(world)
    old, new, said = (forecast.stay_s(n) for n in world.nodes)
    assert old > new > 30.0
    assert said == 30.0
    assert forecast.announced_s("said") == 30.0
    assert forecast.announced_s("old") == float("inf")


def test_the_horizon_is_short_in_a_restless_pool() -> None:
    quiet = Snapshot(generation=1, now_s=1e6, nodes=(NodeView(name="a"),), jobs=())
    restless = Snapshot(
        generation=1,
        now_s=1e6,
        nodes=(NodeView(name="a", joined_s=1e6),),
        jobs=(),
        history=PoolHistory(since_s=0.0).left([20.0] * 2000),
    )
    assert Forecast(restless).horizon_s < 30.0 < 120.0 < Forecast(quiet).horizon_s <= LONGEST_S


def test_history_counts_half_octaves() -> None:
    history = PoolHistory().joined(5.0).joined(9.0).left([0.2, 1.0, 1.5, 4.0]).left([1e12])
    assert history.since_s == 5.0
    assert history.n_leave_events == 2
    assert history.ended[:5] == (2, 1, 0, 0, 1)
    assert sum(history.ended) == 5
    assert Forecast(Snapshot(generation=1, now_s=9.0, nodes=(NodeView(name="a"),), jobs=(), history=history))


# -- nodes that leave soon ---------------------------------------------------------------------------------------


def test_no_costly_expansion_onto_nodes_about_to_leave() -> None:
    costs = Costs(rescale_up_s=Cost(value_s=5.0), rescale_down_s=Cost(value_s=5.0))
    running = job("a", 4, view={"costs": costs})
    late = {"n04": 1000.0 + 900.0, "n05": 1000.0 + 900.0}
    soon = {"n04": 1000.0 + 8.0, "n05": 1000.0 + 8.0}
    assert counts(plan(pool(6, running, leaves=late)))["a"] == 6
    assert counts(plan(pool(6, running, leaves=soon)))["a"] == 4
    assert counts(plan(pool(6, running, leaves=soon), forecast=False))["a"] == 6


def test_a_shrinking_job_gives_up_the_nodes_that_leave() -> None:
    running = job("a", 6)
    other = job("b", weight=1.0)
    made = plan(pool(6, running, other, leaves={"n01": 1020.0}), forecast=True)
    assert 0 < counts(made)["a"] < 6
    assert "n01" not in nodes(made, "a")


# -- priorities, deadlines, users --------------------------------------------------------------------------------


def test_a_higher_class_gets_what_it_can_use_first() -> None:
    low, high = job("low", weight=100.0), job("high", priority=1, max_nodes=6)
    assert counts(plan(pool(8, low, high))) == {"low": 2, "high": 6}


def test_a_deadline_that_needs_more_nodes_gets_them_until_it_is_hopeless() -> None:
    def with_deadline(total: float) -> dict[str, int]:
        late = job("late", total_samples=total, deadline_s=2000.0, view={"samples": 0.0})
        return counts(plan(pool(8, late, job("calm"))))

    relaxed, pressed, hopeless = with_deadline(1e3), with_deadline(4.2e5), with_deadline(1e9)
    assert relaxed["late"] == 4
    assert pressed["late"] > 5, "it needs 420 samples/s, about 6 nodes"
    assert hopeless["late"] == 4


def test_fair_share_between_users() -> None:
    crowd = [job(f"ann{i}", user="ann") for i in range(7)]
    world = pool(8, *crowd, job("bob0", user="bob"))
    assert counts(plan(world))["bob0"] == 1
    fair = counts(plan(world, fair_share=1.0))
    assert fair["bob0"] >= 3
    assert sum(fair.values()) == 8


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(snapshots(), st.sampled_from([0.3, 1.0]))
def test_fair_share_keeps_the_promises(world: Snapshot, strength: float) -> None:
    policy = registry.make("optimum", fair_share=strength)
    made = policy.plan(world)
    check_plan(world, made)
    assert policy.plan(world) == made


# -- many jobs ---------------------------------------------------------------------------------------------------


def test_a_long_queue_costs_little_and_every_node_is_used() -> None:
    world = pool(40, *[job(f"j{i:04d}") for i in range(3000)])
    made = plan(world)
    assert len(made.jobs) < 100
    assert all(n in (0, 1) for n in counts(made).values())
    assert sum(counts(made).values()) == 40
    assert [p.job for p in made.jobs if p.nodes] == [f"j{i:04d}" for i in range(40)]
    assert "came before it" in made.waits


def test_large_jobs_at_the_head_of_the_queue_do_not_hide_small_ones() -> None:
    made = plan(pool(5, *[job(f"big{i}", min_nodes=4) for i in range(20)], job("small")))
    assert counts(made)["small"] == 1
    assert counts(made)["big0"] == 4


# -- kinds -------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(snapshots(kinds=True))
def test_promises_with_kinds_of_nodes(world: Snapshot) -> None:
    made = registry.make("optimum", n_scales=0).plan(world)
    check_plan(world, made)
    kind_of = {n.name: n.kind for n in world.nodes}
    before = {j.job: set(j.nodes) for j in world.jobs}
    for planned in made.jobs:
        if set(planned.nodes) - before[planned.job]:
            assert len({kind_of[n] for n in planned.nodes}) == 1, "a job that grows mixes kinds"


def brute_force(tables: list[Table], held: list[list[str]], capacity: dict[str, int]) -> float:
    options = []
    for t, mine in zip(tables, held, strict=True):
        where = sorted(set(mine)) or sorted(capacity)
        options.append(
            [
                (size, kind, value)
                for size, value in zip(t.sizes.tolist(), t.values.tolist(), strict=True)
                for kind in (where if size else where[:1])
            ]
        )
    best = -float("inf")
    for choice in product(*options):
        used = {kind: sum(s for s, k, _ in choice if k == kind) for kind in capacity}
        if all(used[k] <= n for k, n in capacity.items()):
            best = max(best, sum(v for _, _, v in choice))
    return best


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("exact", [True, False])
def test_kinds_against_brute_force(seed: int, exact: bool) -> None:
    if exact:
        pytest.importorskip("highspy", reason="highspy is not installed (pip install sunfleck[milp])")
    rng = np.random.default_rng(seed)
    capacity = {"a": int(rng.integers(1, 7)), "b": int(rng.integers(1, 7))}
    left = dict(capacity)
    tables, held = [], []
    for _ in range(4):
        sizes = [0, *sorted(rng.choice(np.arange(1, 6), 3, replace=False).tolist())]
        values = np.concatenate(([0.0], np.sort(rng.uniform(1, 20, 3))))
        kind = str(rng.choice(["a", "b"]))
        n = int(rng.choice(sizes))
        n = n if n <= left[kind] else 0
        left[kind] -= n
        tables.append(Table.of(sizes, values.tolist(), n))
        held.append([kind] * n)
    found = kinds.solve(tables, held, capacity, exact=exact)
    best = brute_force(tables, held, capacity)
    assert found.bound >= best - 1e-6
    assert sum(found.sizes) + sum(found.left.values()) == sum(capacity.values())
    assert all(n >= 0 for n in found.left.values())
    if exact:
        assert found.objective == pytest.approx(best)
    else:
        assert found.objective >= 0.5 * best


def test_a_running_job_stays_on_its_kind_and_mixtures_do_not_grow() -> None:
    kind = {"n00": "a", "n01": "a", "n02": "b", "n03": "b", "n04": "b"}
    made = plan(pool(5, job("x", 1), kind=kind))
    assert nodes(made, "x") == ("n00", "n01")
    assert counts(plan(pool(5, job("x"), kind=kind)))["x"] == 3, "one that starts may choose the larger kind"
    assert counts(plan(pool(5, job("x", 3), kind=kind)))["x"] == 3, "a mixture from before stays as it is"


def test_jobs_that_may_not_stop_and_do_not_fit_are_said() -> None:
    with pytest.raises(Infeasible):
        kinds.solve([Table.of([3], [1.0], 3)], [["a"] * 3], {"a": 2, "b": 5})
