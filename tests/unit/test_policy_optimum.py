"""The default policy: promises kept on any snapshot, no useful node idle, sensible reasons."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sunfleck.core.errors import InvalidRequest
from sunfleck.core.model import Cost, Costs, JobSpec, JobView, NodeView, Plan, Profiling, ScaleStats, Snapshot
from sunfleck.policy import registry
from sunfleck.policy.forecast import Forecast
from sunfleck.policy.optimum import Optimum, OptimumOptions
from sunfleck.policy.profiler import ProfilerOptions

from .policy_world import check_plan, snapshots

NO_PROFILE = ProfilerOptions(n_scales=0)


def quiet(**options: object) -> Optimum:
    return Optimum(OptimumOptions(profiler=NO_PROFILE, **{"t_fwd_s": 60.0, **options}))  # type: ignore[arg-type]


def scales(points: dict[int, float]) -> tuple[ScaleStats, ...]:
    return tuple(
        ScaleStats(n_nodes=n, n_reports=50, mean_per_s=v, m2=0.0, trained_s=25.0) for n, v in sorted(points.items())
    )


def linear(n_max: int, one: float = 100.0, efficiency: float = 1.0) -> tuple[ScaleStats, ...]:
    return scales({n: one * n**efficiency for n in range(1, n_max + 1)})


def pool(n_nodes: int, *jobs: JobView, profiling: Profiling | None = None) -> Snapshot:
    owner = {n: j.job for j in jobs for n in j.nodes}
    nodes = tuple(NodeView(name=f"n{i:02d}", job=owner.get(f"n{i:02d}")) for i in range(n_nodes))
    return Snapshot(generation=1, now_s=1000.0, nodes=nodes, jobs=jobs, profiling=profiling)


def job(name: str, n_held: int = 0, first: int = 0, **fields: object) -> JobView:
    spec = JobSpec(
        name=name,
        min_nodes=fields.pop("min_nodes", 1),  # type: ignore[arg-type]
        max_nodes=fields.pop("max_nodes", 8),  # type: ignore[arg-type]
        multiple=fields.pop("multiple", 1),  # type: ignore[arg-type]
        weight=fields.pop("weight", 1.0),  # type: ignore[arg-type]
    )
    held = tuple(f"n{i:02d}" for i in range(first, first + n_held))
    return JobView(job=name, spec=spec, submitted_s=0.0, nodes=held, started=n_held > 0, **fields)  # type: ignore[arg-type]


def counts(plan: Plan) -> dict[str, int]:
    """Nodes by job; jobs that a plan does not list have none."""
    return defaultdict(int, {p.job: len(p.nodes) for p in plan.jobs})


def reasons(plan: Plan) -> dict[str, str]:
    return defaultdict(lambda: plan.waits, {p.job: p.reason for p in plan.jobs})


@settings(max_examples=300, deadline=None)
@given(snapshots(), st.sampled_from([None, 1, 3]), st.sampled_from(["normalised", "raw"]), st.integers(0, 5))
def test_any_plan_keeps_the_promises(world: Snapshot, cap: int | None, objective: str, n_scales: int) -> None:
    policy = Optimum(OptimumOptions(max_running=cap, objective=objective, profiler=ProfilerOptions(n_scales=n_scales)))
    plan = policy.plan(world)
    check_plan(world, plan)
    assert {j.job for j in world.jobs if j.nodes} <= {p.job for p in plan.jobs}
    assert plan.waits
    assert policy.plan(world) == plan
    if plan.profiling is not None:
        assert counts(plan)[plan.profiling.job] == plan.profiling.n_nodes
        for view in world.jobs:
            if len(view.nodes) in view.spec.sizes(len(world.nodes)) and cap is None:
                assert counts(plan)[view.job] >= view.spec.min_nodes, "a profile stopped a running job"


@settings(max_examples=150, deadline=None)
@given(snapshots())
def test_no_node_is_idle_whose_use_would_raise_the_objective(world: Snapshot) -> None:
    """Take the plan, and try every single step up with the nodes that are left."""
    policy = quiet()
    plan = policy.plan(world)
    sizes = counts(plan)
    left = len(world.nodes) - sum(sizes.values())
    made = policy.worths(world, world.jobs, None, Forecast(world))
    worths = {view.job: w for view, w in zip(world.jobs, made, strict=True)}
    for view in world.jobs:
        table = worths[view.job].table
        now = table.value_at(sizes[view.job])
        for size, value in zip(table.sizes.tolist(), table.values.tolist(), strict=True):
            if sizes[view.job] < size <= sizes[view.job] + left:
                assert value <= now + 1e-6 * max(1.0, abs(now))


def test_every_job_has_a_node_before_any_has_a_less_useful_second_one() -> None:
    views = [job(f"j{i}", scales=linear(8, one=10.0 ** (i % 4), efficiency=0.8)) for i in range(8)]
    assert set(counts(quiet().plan(pool(8, *views))).values()) == {1}


def test_raw_throughput_starves_slow_models_and_normalised_does_not() -> None:
    fast = job("fast", scales=linear(8, one=7000.0, efficiency=0.9))
    slow = job("slow", scales=linear(8, one=900.0, efficiency=0.95))
    assert counts(quiet(objective="raw").plan(pool(8, fast, slow))) == {"fast": 8, "slow": 0}
    assert counts(quiet().plan(pool(8, fast, slow)))["slow"] >= 4


def test_weights_count() -> None:
    a, b = job("a", scales=linear(8, efficiency=0.5)), job("b", scales=linear(8, efficiency=0.5), weight=2.0)
    plan = counts(quiet().plan(pool(8, a, b)))
    assert plan["b"] > plan["a"] >= 1


def test_a_costly_move_is_not_made_for_a_small_gain() -> None:
    cheap, dear = Cost(value_s=0.1), Cost(value_s=50.0)
    for cost, grows in ((cheap, True), (dear, False)):
        costs = Costs(rescale_up_s=cost, rescale_down_s=cost)
        running = job("a", 4, scales=linear(8, efficiency=0.5), costs=costs)
        assert (counts(quiet().plan(pool(5, running)))["a"] == 5) is grows


def test_a_job_that_is_rescaling_is_moved_less_readily() -> None:
    costs = Costs(rescale_up_s=Cost(value_s=4.0))
    for rescaling, size in ((False, 5), (True, 4)):
        running = job("a", 4, scales=linear(8, efficiency=0.5), costs=costs, rescaling=rescaling)
        assert counts(quiet().plan(pool(5, running)))["a"] == size


def test_an_idle_node_starts_a_job_even_when_starting_is_slow() -> None:
    costs = Costs(start_s=Cost(value_s=500.0))
    assert counts(quiet().plan(pool(2, job("a", costs=costs, max_nodes=1)))) == {"a": 1}


def test_the_cap_admits_in_order_of_arrival() -> None:
    views = [job("a"), job("b", 1), job("c"), job("d")]
    plan = quiet(max_running=2).plan(pool(8, *views))
    assert {name for name, n in counts(plan).items() if n} == {"a", "b"}
    assert "2 jobs run already, which is the limit" in reasons(plan)["d"]


def test_multiples_and_minimum_sizes() -> None:
    plan = counts(quiet().plan(pool(9, job("a", min_nodes=2, max_nodes=32, multiple=2), job("b", max_nodes=1))))
    assert plan == {"a": 8, "b": 1}


def test_reasons_say_why() -> None:
    curve = linear(8, efficiency=0.7)
    plan = quiet().plan(
        pool(
            4,
            job("cnn", scales=curve),
            job("lm", scales=curve),
            job("big", min_nodes=5, max_nodes=9),
            job("flat", 1, scales=scales({1: 100.0, 2: 90.0, 3: 80.0, 4: 70.0})),
        )
    )
    why = reasons(plan)
    assert why["big"] == "queued: min_nodes 5 exceeds the 4 nodes there"
    assert "the optimum" in why["cnn"]
    assert "would gain it 53 %" in why["cnn"]
    assert "worth 100 % to" in why["cnn"]
    assert "no faster" in why["flat"]
    crowded = quiet().plan(pool(1, job("a", 1, scales=curve), job("b", scales=curve)))
    assert "came before it" in reasons(crowded)["b"]
    heavy = quiet().plan(pool(2, job("a", 1, scales=curve, weight=9.0), job("b", scales=curve), job("c", weight=10.0)))
    assert "worth more elsewhere" in reasons(heavy)["b"]
    profiled = Optimum().plan(pool(8, job("a"), job("b")))
    assert reasons(profiled)["a"].startswith("profiling at 4 nodes, then at 3, 2, 1")


def test_the_registry_names_what_is_wrong() -> None:
    policy = registry.make("optimum", t_fwd_s=10.0, n_scales=2)
    assert isinstance(policy, Optimum)
    assert policy.options.t_fwd_s == 10.0
    assert policy.options.profiler.n_scales == 2
    assert registry.make().name == "optimum"
    with pytest.raises(InvalidRequest, match="the policies are: optimum"):
        registry.make("optimun")
    with pytest.raises(InvalidRequest, match="unknown policy option `horizon`"):
        registry.make("optimum", horizon=3)
    with pytest.raises(InvalidRequest, match="t_fwd_s must be above 0"):
        registry.make("optimum", t_fwd_s=0.0)
