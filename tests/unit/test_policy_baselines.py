"""Every policy keeps the promises; the baselines do what their names say."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from msgspec import structs

from sunfleck.core.errors import InvalidRequest
from sunfleck.core.model import Cost, Costs, JobSpec, JobView, NodeView, Plan, ScaleStats, Snapshot
from sunfleck.policy import curves, knapsack, registry
from sunfleck.policy.base import Policy
from sunfleck.policy.optimum import Optimum
from sunfleck.policy.scaling import PiecewiseCurve

from .policy_world import check_plan, snapshots

TRUE = PiecewiseCurve.through({1: 100.0, 2: 190.0, 4: 350.0, 8: 600.0, 16: 900.0})


def source(job: JobView) -> PiecewiseCurve:
    return TRUE


def made(name: str, **options: Any) -> Policy:
    if name == "paper-milp":
        pytest.importorskip("highspy", reason="highspy is not installed (pip install sunfleck[milp])")
        options = {"time_limit_s": 2.0, **options}
    needs = name in ("oracle", "freetrain-true", "freetrain-linear", "freetrain-noisy")
    return registry.make(name, **({"curves": source} if needs else {}), **options)


def pool(n_nodes: int, *jobs: JobView) -> Snapshot:
    owner = {n: j.job for j in jobs for n in j.nodes}
    nodes = tuple(NodeView(name=f"n{i:02d}", job=owner.get(f"n{i:02d}")) for i in range(n_nodes))
    return Snapshot(generation=1, now_s=1000.0, nodes=nodes, jobs=jobs)


def job(name: str, n_held: int = 0, first: int = 0, costs: Costs | None = None, **spec: Any) -> JobView:
    held = tuple(f"n{i:02d}" for i in range(first, first + n_held))
    scales = tuple(ScaleStats(n_nodes=n, n_reports=50, mean_per_s=TRUE.at(n), trained_s=99.0) for n in (1, 2, 4, 8, 16))
    return JobView(
        job=name,
        spec=JobSpec(name=name, **{"max_nodes": 16, **spec}),
        submitted_s=0.0,
        nodes=held,
        started=n_held > 0,
        scales=scales,
        costs=costs or Costs(start_s=Cost(value_s=0.0)),
    )


def counts(plan: Plan) -> dict[str, int]:
    """Nodes by job; jobs that a plan does not list have none."""
    return defaultdict(int, {p.job: len(p.nodes) for p in plan.jobs})


@pytest.mark.parametrize("name", [n for n in registry.names() if n != "paper-milp"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(world=snapshots())
def test_every_policy_keeps_the_promises(name: str, world: Snapshot) -> None:
    policy = made(name)
    plan = policy.plan(world)
    check_plan(world, plan)
    assert policy.plan(world) == plan
    assert policy.name == name


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(world=snapshots())
def test_the_published_model_keeps_the_promises(world: Snapshot) -> None:
    check_plan(world, made("paper-milp", time_limit_s=1.0).plan(world))


@pytest.mark.parametrize("held", [(0, 0, 0), (4, 2, 0), (8, 3, 1), (1, 6, 5)])
def test_the_published_model_and_the_recursion_have_one_optimum(held: tuple[int, int, int]) -> None:
    costs = Costs(start_s=Cost(value_s=0.0), rescale_up_s=Cost(value_s=18.0), rescale_down_s=Cost(value_s=12.0))
    views, first = [], 0
    for i, n in enumerate(held):
        views.append(job(f"j{i}", n, first, costs, weight=1.0 + i, min_nodes=1 + i, max_nodes=8))
        first += n
    world = pool(12, *views)
    published = made("paper-milp", t_fwd_s=60.0, curves=source, time_limit_s=20.0).plan(world)
    exact = made("freetrain-true", t_fwd_s=60.0).plan(world)
    check_plan(world, published)
    assert published.gap < 1e-3
    assert published.objective == pytest.approx(exact.objective, rel=1e-3)


def test_the_published_model_out_of_time_keeps_what_runs() -> None:
    world = pool(40, job("a", 16), job("b", 10, 16), max_job := job("c", 3, 26))
    plan = made("paper-milp", time_limit_s=0.0).plan(world)
    check_plan(world, plan)
    assert counts(plan)["a"] > 0
    assert counts(plan)["b"] > 0
    assert counts(plan)[max_job.job] > 0
    assert plan.bound >= plan.objective


def test_equal_share() -> None:
    world = pool(11, job("a"), job("b"), job("c", max_nodes=2))
    assert counts(made("equal-share").plan(world)) == {"a": 4, "b": 4, "c": 2}
    assert counts(made("equal-share", share_remainder=True).plan(world)) == {"a": 5, "b": 4, "c": 2}
    crowd = pool(2, job("a"), job("b"), job("c"))
    assert counts(made("equal-share").plan(crowd)) == {"a": 1, "b": 1, "c": 0}
    assert counts(made("equal-share", max_running=1).plan(world)) == {"a": 11}
    one = pool(3, job("a", min_nodes=1, max_nodes=1, multiple=2))
    assert counts(made("equal-share").plan(one)) == {"a": 1}


def test_greedy_climbs_and_can_be_trapped() -> None:
    even = counts(made("greedy").plan(pool(8, job("a"), job("b"))))
    assert even == {"a": 4, "b": 4}
    cliff = PiecewiseCurve.through({1: 100.0, 2: 101.0, 3: 102.0, 4: 400.0})
    slope = PiecewiseCurve.through({1: 100.0, 2: 150.0, 3: 170.0, 4: 180.0})
    by_name = curves.by_key({"cliff": cliff, "slope": slope})
    world = pool(5, job("cliff", max_nodes=4), job("slope", max_nodes=4))
    assert counts(made("greedy", curves=by_name).plan(world)) == {"cliff": 1, "slope": 4}
    best = registry.make("freetrain-true", curves=by_name).plan(world)
    assert counts(best) == {"cliff": 4, "slope": 1}


def test_rigid_jobs_start_where_they_fit_and_die_with_a_node() -> None:
    world = pool(10, job("a", 4), job("b", 3, 4), job("c"), job("tiny", max_nodes=2))
    plan = made("rigid", n_nodes=4).plan(world)
    assert counts(plan) == {"a": 4, "b": 0, "c": 4, "tiny": 2}
    assert {p.job: p.reason for p in plan.jobs}["b"].startswith("killed")
    assert plan.review_after_s is not None


def test_the_oracle_moves_for_the_smallest_gain() -> None:
    dear = Costs(start_s=Cost(value_s=50.0), rescale_up_s=Cost(value_s=50.0), rescale_down_s=Cost(value_s=50.0))
    world = pool(9, job("a", 8, 0, dear))
    assert counts(made("oracle").plan(world)) == {"a": 9}
    assert counts(registry.make("optimum", n_scales=0, t_fwd_s=60.0).plan(world)) == {"a": 8}


def test_what_users_would_supply() -> None:
    view = job("a")
    assert curves.linear(source)(view).at(8) == pytest.approx(800.0)
    assert curves.linear()(view).at(8) == pytest.approx(8.0)
    wrong = curves.noisy(source, 0.3)(view)
    assert wrong.at(8) == curves.noisy(source, 0.3)(view).at(8), "the same job gives the same answer twice"
    errors = [abs(wrong.at(n) / TRUE.at(n) - 1.0) for n in (1, 2, 4, 8, 16)]
    assert 0.01 < max(errors) <= 0.3
    assert curves.noisy(source)(job("b")).at(8) != wrong.at(8)
    with pytest.raises(KeyError, match="no scaling curve is given for job zzz"):
        curves.by_key({"a": TRUE})(job("zzz"))


def test_malletrain_holds_for_a_fixed_time() -> None:
    policy = registry.make("malletrain", curves=source)
    assert isinstance(policy, Optimum)
    assert policy.options.curves is None
    assert policy.options.max_running == 10
    half = tuple(ScaleStats(n_nodes=n, n_reports=1000, mean_per_s=TRUE.at(n), trained_s=19.0) for n in (1, 2, 3, 4))
    view = JobView(job="a", spec=JobSpec(name="a", max_nodes=8), submitted_s=0.0, scales=half)
    plan = policy.plan(pool(8, view))
    assert plan.profiling is not None
    arrived = JobView(
        job="a",
        spec=view.spec,
        submitted_s=0.0,
        nodes=("n00", "n01", "n02", "n03"),
        started=True,
        scales=half,
        size_since_s=990.0,
    )
    world = structs.replace(pool(8, arrived), profiling=plan.profiling)
    again = policy.plan(world)
    assert again.profiling == plan.profiling, "however sure the mean is"
    assert again.review_after_s is not None
    assert again.review_after_s <= 20.0


def test_true_curves_are_demanded_where_they_are_needed() -> None:
    for name in ("oracle", "freetrain-true", "freetrain-noisy"):
        with pytest.raises(InvalidRequest, match="true scaling curves"):
            registry.make(name)


def test_best_by_nodes_agrees_with_solving_each() -> None:
    tables = [knapsack.Table.of([0, 1, 3], [0.0, 5.0, 11.0]), knapsack.Table.of([2, 4], [3.0, 9.0])]
    best = knapsack.best_by_nodes(tables, 8)
    for m in range(9):
        try:
            assert best[m] == pytest.approx(knapsack.solve(tables, m).objective)
        except knapsack.Infeasible:
            assert best[m] == -float("inf")
