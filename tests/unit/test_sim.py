"""The simulator: the deployed controller on virtual time, with results that can be worked out by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sunfleck.core.controller import Controller
from sunfleck.core.errors import InvalidRequest
from sunfleck.core.events import AnyEvent
from sunfleck.core.state import violations
from sunfleck.policy.curves import by_key
from sunfleck.policy.registry import make
from sunfleck.policy.scaling import PiecewiseCurve
from sunfleck.sim import run as sim_run
from sunfleck.sim.clock import OutOfTime, Rank, VirtualClock
from sunfleck.sim.report import figures, table
from sunfleck.sim.run import Outcome, World, run_elastic, run_published
from sunfleck.sim.synthetic import generate
from sunfleck.sim.trace import IdleTrace, Interval, from_intervals
from sunfleck.sim.workload import (
    SimJob,
    TrueCosts,
    hpo,
    make_job,
    nas,
    parse_curves,
    parse_jobs,
    static_rate,
    true_curves,
    workload,
)

LINEAR = PiecewiseCurve.through({1: 10.0, 8: 80.0})
COSTS = TrueCosts(start_s=3.0, rescale_up_s=1.0, rescale_down_s=0.5, preempt_s=2.0)
AT_ONCE = World(decision_s=0.0, handback_s=0.0)


def job(i: int = 0, submit_s: float = 0.0, samples: float = 1e9, **options: object) -> SimJob:
    return make_job(i, "any", submit_s, samples=samples, curve=LINEAR, costs=COSTS, **options)  # type: ignore[arg-type]


def told(jobs: list[SimJob], **options: object):  # type: ignore[no-untyped-def]
    return make("optimum", curves=by_key(true_curves(jobs)), n_scales=0, t_fwd_s=60.0, **options)


class Invariants:
    """Observer that checks the controller's state after every event."""

    def __init__(self) -> None:
        self.controller: Controller | None = None
        self.n_events = 0

    def on_event(self, time_s: float, event: AnyEvent) -> None:
        self.n_events += 1
        assert self.controller is not None
        assert violations(self.controller.state) == [], event

    def on_turn_end(self) -> None:
        pass


@pytest.fixture
def invariants(monkeypatch: pytest.MonkeyPatch) -> Invariants:
    observer = Invariants()

    class Watched(Controller):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)  # type: ignore[arg-type]
            observer.controller = self

    monkeypatch.setattr(sim_run, "Controller", Watched)
    return observer


# -- clock -------------------------------------------------------------------------------------------------------


def test_entries_of_an_instant_run_by_rank_and_then_in_order() -> None:
    clock, seen = VirtualClock(), []

    def note(name: str) -> Callable[[], None]:
        return lambda: seen.append((clock.now(), name))

    clock.at(2.0, Rank.PLAN, note("plan"))
    clock.at(2.0, Rank.CLUSTER, note("first"))
    clock.at(2.0, Rank.CLUSTER, note("second"))
    clock.at(1.0, Rank.USER, note("user"))
    clock.at(1.5, Rank.USER, note("struck out")).cancel()
    clock.at(2.0, Rank.TRAINING, note("training"))
    assert clock.wait(1.7) == ()
    assert (clock.now(), seen) == (1.7, [(1.0, "user")])
    clock.at(0.5, Rank.USER, note("late"))
    clock.wait(3.0)
    assert seen[1:] == [(1.7, "late"), (2.0, "training"), (2.0, "first"), (2.0, "second"), (2.0, "plan")]
    with pytest.raises(OutOfTime):
        clock.wait(None)


# -- elastic semantics, by hand ----------------------------------------------------------------------------------


def trained(trace: IdleTrace, jobs: list[SimJob], world: World = AT_ONCE, **options: object) -> Outcome:
    outcome = run_elastic(trace, jobs, told(jobs, **options), world, known_costs=True)
    assert outcome.faults == []
    return outcome


def test_a_start_costs_its_time_and_decisions_theirs() -> None:
    trace = from_intervals([Interval(0, 100, "a")])
    assert trained(trace, [job()]).samples == {"j00000": pytest.approx(10 * (100 - 3))}
    slow = World(decision_s=2.0, handback_s=0.0)
    assert trained(trace, [job()], slow).samples == {"j00000": pytest.approx(10 * (100 - 3 - 2))}


def test_growing_and_a_reclaim_stall_the_survivors() -> None:
    trace = from_intervals([Interval(0, 100, "a"), Interval(20, 60, "b")])
    outcome = trained(trace, [job()])
    # 3 s of start, at 20 s one of growing, at 60 s half a second of shrinking.
    assert outcome.samples["j00000"] == pytest.approx(10 * (20 - 3) + 20 * (40 - 1) + 10 * (40 - 0.5))
    assert outcome.tally.used_node_s == pytest.approx(140)
    assert (outcome.tally.n_starts, outcome.tally.n_rescales) == (1, 2)
    assert outcome.tally.lost_reclaim == pytest.approx(0.5 * 10)
    assert outcome.tally.lost_rescale == pytest.approx(3 * 10 + 1 * 20)
    assert outcome.handbacks_s == [0.0]


def test_without_a_word_survivors_pay_more_and_the_last_node_takes_unsaved_work_with_it() -> None:
    no_grace = World(decision_s=0.0, handback_s=0.0, grace_s=None, checkpoint_s=10.0)
    trace = from_intervals([Interval(0, 100, "a"), Interval(0, 60, "b")])
    outcome = trained(trace, [job()], no_grace)
    assert outcome.samples["j00000"] == pytest.approx(20 * (60 - 3) + 10 * (40 - 2))
    gone = from_intervals([Interval(0, 58, "a"), Interval(70, 100, "a")])
    outcome = trained(gone, [job()], no_grace)
    # It trains from 3 s to 58 s, saved every 10 s: at least what it did until 48 s survives, and not all of it.
    survived = outcome.samples["j00000"] - 10 * (30 - 3)
    assert 10 * (48 - 3) <= survived < 10 * (58 - 3)
    assert outcome.tally.lost_reclaim == pytest.approx(10 * (58 - 3) - survived)


def test_with_notice_nothing_trained_is_lost() -> None:
    gone = from_intervals([Interval(0, 58, "a"), Interval(70, 100, "a")])
    outcome = trained(gone, [job()])
    assert outcome.samples["j00000"] == pytest.approx(10 * (58 - 3) + 10 * (30 - 3))


def test_a_completion_is_acted_on_at_once() -> None:
    trace = from_intervals([Interval(0, 100, "a")])
    outcome = trained(trace, [job(0, samples=200.0), job(1)], max_running=1)
    assert outcome.samples["j00000"] == 200.0
    assert outcome.tally.finished == [(23.0, "j00000")]
    assert outcome.samples["j00001"] == pytest.approx(10 * (100 - 23 - 3))


def test_a_slow_hand_back_is_charged_and_a_late_one_forced() -> None:
    trace = from_intervals([Interval(0, 50, "a"), Interval(0, 100, "b")])
    polite = trained(trace, [job()], World(decision_s=0.0, handback_s=1.0, grace_s=5.0))
    assert polite.handbacks_s == [1.0]
    assert polite.n_forced == 0
    rude = trained(trace, [job()], World(decision_s=0.0, handback_s=30.0, grace_s=5.0))
    assert rude.handbacks_s == [5.0]
    assert rude.n_forced == 1


def test_a_node_that_is_idle_again_before_it_was_handed_back_comes_back_after() -> None:
    trace = from_intervals([Interval(0, 50, "a"), Interval(50.5, 100, "a")])
    outcome = trained(trace, [job()], World(decision_s=0.0, handback_s=2.0, grace_s=5.0))
    assert outcome.samples["j00000"] == pytest.approx(10 * (50 - 3) + 10 * (100 - 52 - 3))


# -- published semantics, by hand --------------------------------------------------------------------------------


def test_published_books() -> None:
    costs = TrueCosts(0.0, 2.0, 1.0, 1.0)
    jobs = [job(samples=1e9).with_costs(costs)]
    # 0 s: 1 node. 10 s: 2 nodes (pays 2 s at 10/s). 30 s: 1 node (pays 1 s at 20/s). Ends at 50 s.
    trace = from_intervals([Interval(0, 50, "a"), Interval(10, 30, "b")])
    outcome = run_published(trace, jobs, told(jobs))
    assert outcome.samples["j00000"] == pytest.approx(10 * 10 + 20 * 20 - 2 * 10 + 20 * 10 - 1 * 20)
    assert outcome.faults == []


def test_published_completions_are_noticed_at_instants_only_and_clipped() -> None:
    jobs = [job(0, samples=50.0), job(1)]
    trace = from_intervals([Interval(0, 40, "a"), Interval(20, 40, "b")])
    outcome = run_published(trace, jobs, told(jobs, max_running=1))
    assert outcome.samples["j00000"] == 50.0  # done after 5 s, noticed at 20 s
    assert outcome.tally.finished == [(20.0, "j00000")]
    assert outcome.samples["j00001"] == pytest.approx(20 * 20)


# -- always ------------------------------------------------------------------------------------------------------

POLICIES = ("optimum", "equal-share", "greedy", "rigid", "freetrain-linear", "malletrain")


def policy_named(name: str, jobs: list[SimJob]):  # type: ignore[no-untyped-def]
    needs = name in ("greedy", "freetrain-linear")
    return make(name, curves=by_key(true_curves(jobs))) if needs else make(name)


@pytest.mark.parametrize("name", POLICIES)
def test_a_day_of_a_small_machine_breaks_no_invariant(name: str, invariants: Invariants) -> None:
    trace = generate(n_nodes=24, duration_s=20_000, seed=4, idle_share=0.3)
    jobs = [
        make_job(
            i, m, 600.0 * i, samples=4e6, min_nodes=1 + i % 2, max_nodes=16, multiple=1 + i % 2, costs=COSTS, noise=0.02
        )
        for i, m in enumerate(["alexnet", "vgg16", "shufflenet", "resnet18"] * 3)
    ]
    outcome = run_elastic(trace, jobs, policy_named(name, jobs), World(seed=1), observers=[invariants])
    assert outcome.faults == []
    assert invariants.n_events > 200
    row = figures(trace, jobs, outcome, None)
    assert row.samples > 0
    assert 0 < row.node_use <= 1.0 + 1e-9
    assert row.E <= 1.0 + 1e-6 or name == "rigid"
    assert all(0 <= done <= j.samples for done, j in zip(outcome.samples.values(), jobs, strict=True))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10_000), st.booleans(), st.sampled_from([None, 0.0, 0.03, 4.0]))
def test_any_trace_and_any_grace_breaks_no_invariant(
    invariants: Invariants, seed: int, published: bool, grace_s: float | None
) -> None:
    trace = generate(n_nodes=10, duration_s=4_000, seed=seed, idle_share=0.4, nodes_per_join=4.0)
    jobs = [job(i, 300.0 * i, samples=3e4, max_nodes=6) for i in range(6)]
    if published:
        outcome = run_published(trace, jobs, told(jobs, max_running=3), measured=True, observers=[invariants])
    else:
        world = World(grace_s=grace_s, handback_s=0.5, seed=seed)
        outcome = run_elastic(trace, jobs, make("optimum"), world, observers=[invariants])
    assert outcome.faults == []
    assert outcome.tally.used_node_s <= trace.idle_node_s + sum(outcome.handbacks_s) + 1e-6


@pytest.mark.parametrize("published", [True, False])
def test_a_seed_gives_the_same_result_twice(published: bool) -> None:
    trace = generate(n_nodes=24, duration_s=10_000, seed=2, idle_share=0.3)
    jobs = nas(12, samples=2e6, noise=0.05)

    def once(seed: int) -> str:
        if published:
            outcome = run_published(trace, jobs, make("optimum", max_running=4), seed=seed, measured=True)
        else:
            outcome = run_elastic(trace, jobs, make("optimum"), World(seed=seed))
        return repr((outcome.samples, outcome.tally, outcome.n_plans, outcome.handbacks_s))

    assert once(3) == once(3)
    assert once(3) != once(4)


def test_knowing_curves_and_no_costs_is_an_upper_bound() -> None:
    trace = generate(n_nodes=40, duration_s=30_000, seed=6, idle_share=0.3)
    jobs = [j.with_costs(COSTS) for j in hpo(30, samples=4e6)]
    free = [j.with_costs(TrueCosts(0, 0, 0, 0)) for j in jobs]
    oracle = run_elastic(trace, free, make("oracle", curves=by_key(true_curves(jobs))), AT_ONCE)
    rows = []
    for name in ("optimum", "equal-share"):
        outcome = run_elastic(trace, jobs, make(name), World())
        rows.append(figures(trace, jobs, outcome, None, oracle))
        assert rows[-1].H is not None
        assert rows[-1].H <= 1.001
    assert rows[0].H is not None
    assert rows[0].H > 0.9
    text = table(rows)
    assert text.splitlines()[0].startswith("policy")
    assert len(text.splitlines()) == 3
    assert rows[0].as_dict()["policy"] == "optimum"


# -- workloads ---------------------------------------------------------------------------------------------------


def test_workloads_by_name_and_from_the_published_list(tmp_path) -> None:  # type: ignore[no-untyped-def]
    assert [j.submit_s for j in workload("hpo:3")] == [0, 36, 72]
    assert [j.spec.architecture for j in workload("nas:8")][6:] == ["mobilenet", "alexnet"]
    text = "job,model,Tsub_s,Tcup,Tcdw,Jmin,Jmax,Pmax\nB,vgg16,9,17.5,11.25,1.000,64.000,100.0\n"
    text += "A,mnasnet1,0,17,11,2,8,50\n"
    first, second = parse_jobs(text)
    assert (first.name, first.spec.min_nodes, first.spec.max_nodes, first.samples) == ("A", 2, 8, 50)
    assert second.costs.rescale_up_s == 17.5
    path = tmp_path / "jobs.csv"
    path.write_text(text)
    curves = tmp_path / "curves.csv"
    curves.write_text("model,nodes,samples_per_s\nvgg16,1,5\nvgg16,2,9\n")
    mine = workload(str(path), curves_path=str(curves), noise=0.1)
    assert mine[1].curve.at(2) == 9
    assert mine[1].noise == 0.1
    for wrong in ("hpo:x", "nas:0", str(tmp_path / "absent.csv")):
        with pytest.raises(InvalidRequest):
            workload(wrong)
    with pytest.raises(InvalidRequest, match="line 2"):
        parse_jobs("job,model,Tsub_s\na,nonet,0\n".replace("nonet", ""))
    with pytest.raises(InvalidRequest, match="known are"):
        parse_jobs("job,model,Tsub_s\na,nonet,0\n")
    with pytest.raises(InvalidRequest, match="line 3"):
        parse_curves("model,nodes,samples_per_s\na,1,2\na,b,c\n")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(1, 50), min_size=4, max_size=4), min_size=1, max_size=3), st.integers(0, 7))
def test_the_static_optimum_is_that_of_a_brute_force(tables: list[list[int]], n_nodes: int) -> None:
    jobs = [
        make_job(i, "x", 0.0, max_nodes=4, curve=PiecewiseCurve.through({k + 1: float(v) for k, v in enumerate(row)}))
        for i, row in enumerate(tables)
    ]
    best = max(
        sum(j.curve.at(n) for j, n in zip(jobs, sizes, strict=True))
        for sizes in itertools.product(range(5), repeat=len(jobs))
        if sum(sizes) <= n_nodes
    )
    assert static_rate(jobs, n_nodes) == pytest.approx(best)
