"""Views and the numbers of a run: hand-worked histories, and sweeps checked against counting instant by instant."""

from __future__ import annotations

import math
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant

from sunfleck.core import events as ev
from sunfleck.core.model import JobPhase, JobSpec, NodeSpec, Plan, PlannedJob, Profiling, Target
from sunfleck.observers.summary import most_held, node_seconds, percentile, summary
from sunfleck.observers.timelines import RESOLUTION
from sunfleck.observers.views import PoolView, fold
from tests.scenario.test_controller_chaos import Chaos

Entry = tuple[float, ev.AnyEvent]


def joined(*names: str, **holding: str) -> ev.NodesJoined:
    return ev.NodesJoined(nodes=tuple(NodeSpec(name=name) for name in names), holding=holding)


def submitted(job: str, min_nodes: int = 1, max_nodes: int = 4, multiple: int = 1) -> ev.JobSubmitted:
    return ev.JobSubmitted(
        job=job, spec=JobSpec(name=f"name-{job}", min_nodes=min_nodes, max_nodes=max_nodes, multiple=multiple)
    )


def formed(job: str, *nodes: str, round: int = 0, cause: str = "start", stall_s: float | None = None) -> ev.RoundFormed:
    return ev.RoundFormed(job=job, round=round, nodes=nodes, step=0, took_s=1.0, stall_s=stall_s, cause=cause)


def left(job: str, *nodes: str, planned: bool = True, detail: str = "") -> ev.WorkersLeft:
    return ev.WorkersLeft(job=job, nodes=nodes, planned=planned, detail=detail)


def reclaimed(*nodes: str) -> ev.NodesReclaimed:
    return ev.NodesReclaimed(nodes=nodes, grace_s=0.5)


def released(*nodes: str, handback_s: float | None = None) -> ev.NodesReleased:
    return ev.NodesReleased(nodes=nodes, handback_s=handback_s)


def progress(job: str, samples: int, n_nodes: int = 1, rate: float | None = None, **metrics: float) -> ev.Progress:
    return ev.Progress(
        job=job,
        round=0,
        n_nodes=n_nodes,
        step=samples // 10,
        epoch=samples // 100,
        samples=samples,
        dt_s=1.0,
        samples_per_s=rate,
        metrics=metrics,
    )


HISTORY: list[Entry] = [
    (0.0, ev.PoolStarted(pool="p", version="1")),
    (0.0, joined("n1", "n2")),
    (10.0, submitted("A", 1, 4)),
    (12.0, formed("A", "n1", "n2")),
    (18.0, progress("A", 300, 2, 50.0, loss=2.0)),
    (20.0, joined("n3", "n4")),
    (21.0, submitted("B", 2, 2)),
    (22.0, formed("A", "n1", "n2", "n3", "n4", round=1, cause="rescale", stall_s=0.4)),
    (29.0, progress("A", 900, 4, 90.0, loss=1.0, accuracy=0.75)),
    (30.0, left("A", "n3", "n4")),
    (30.0, formed("A", "n1", "n2", round=2, cause="rescale", stall_s=0.2)),
    (31.0, formed("B", "n3", "n4")),
    (35.0, progress("B", 100, 2, None, loss=5.0)),
    (40.0, reclaimed("n2")),
    (40.25, left("A", "n2")),
    (40.25, formed("A", "n1", round=3, cause="rescale", stall_s=0.1)),
    (40.25, released("n2", handback_s=0.25)),
    (50.0, ev.NodesLost(nodes=("n4",), reason="heartbeats missed")),
    (50.0, left("B", "n4", planned=False, detail="node lost")),
    (50.0, left("B", "n3")),
    (59.0, progress("A", 1200, 1, 30.0, loss=0.5, accuracy=0.9)),
    (60.0, ev.JobFinished(job="A")),
    (65.0, reclaimed("n3")),
    (65.5, released("n3", handback_s=0.5)),
    (70.0, joined("n2")),
    (72.0, formed("B", "n1", "n2", round=1)),
    (80.0, ev.JobCrashed(job="B", error="ValueError: no")),
    (90.0, ev.PoolStopRequested()),
    (91.0, released("n1", "n2", handback_s=9.0)),
]
"""Worked out by hand.

offered: 10-20 2 nodes, 20-40 4, 40-50 3 (n2 reclaimed), 50-60 2 (n4 lost), 60-65 2 (B takes both), 65-70 none (B needs
two, one is there), 70-80 2, then no job: 20 + 80 + 30 + 20 + 10 + 0 + 20 = 180 node-seconds.
used: 12-22 2, 22-30 4, 30-31 2, 31-40 4, 40-50 3, 50-60 1, 72-80 2: 20 + 32 + 2 + 36 + 30 + 10 + 16 = 146.
"""


def test_numbers_of_a_hand_worked_history() -> None:
    got = summary(
        fold(HISTORY),
        {"name-A": Target(metric="accuracy", value=0.85), "B": Target(metric="loss", value=1.0, at_least=False)},
        100.0,
    )
    assert (got.node_seconds_offered, got.node_seconds_used) == (180.0, 146.0)
    assert got.used_fraction == pytest.approx(146 / 180)
    assert got.samples == 1300
    assert (got.reclaims, got.losses) == (2, 1)
    assert (got.handback_s_p50, got.handback_s_p99) == (0.375, 0.4975)  # the 9 s of `down` is no answer to a reclaim
    assert got.elapsed_s == 100.0
    a, b = got.jobs
    assert (a.name, a.samples, a.metric, a.target, a.reached, a.rescales) == ("name-A", 1200, 0.9, 0.85, True, 3)
    assert (a.stall_s_p50, a.restarts, a.phase, a.node_seconds_used) == (0.2, 0, "finished", 92.25)
    assert (b.samples, b.metric, b.metric_name, b.target, b.reached) == (100, 5.0, "loss", 1.0, False)
    assert (b.rescales, b.stall_s_p50, b.restarts, b.phase, b.node_seconds_used) == (0, None, 1, "failed", 54.0)
    assert a.samples_lost is None  # nothing was verified


@pytest.mark.parametrize(
    ("now_s", "offered", "used"), [(0.0, 0, 0), (5.0, 0, 0), (11.0, 2, 0), (25.0, 40, 32), (45.0, 115, 105)]
)
def test_what_still_lasts_is_cut_at_now(now_s: float, offered: float, used: float) -> None:
    so_far = fold(entry for entry in HISTORY if entry[0] <= now_s)
    assert node_seconds(so_far, now_s) == (offered, used)
    assert node_seconds(fold(HISTORY), now_s) == (offered, used)  # looking back gives the same


def test_json_line_has_the_promised_fields() -> None:
    line = msgspec.json.decode(msgspec.json.encode(summary(fold(HISTORY), {}, 100.0)))
    assert {
        "node_seconds_offered",
        "node_seconds_used",
        "samples",
        "jobs",
        "reclaims",
        "handback_s_p50",
        "handback_s_p99",
    } <= line.keys()
    assert {
        "name",
        "samples",
        "metric",
        "target",
        "reached",
        "rescales",
        "stall_s_p50",
        "samples_lost",
        "samples_repeated",
    } <= line["jobs"][0].keys()
    assert line["jobs"][0]["metric"] == 0.5  # the last loss
    assert line["jobs"][0]["target"] is None


def test_timelines_of_the_history() -> None:
    view = fold(HISTORY)
    assert (view.pool, view.version, view.first_s, view.last_s) == ("p", "1", 0.0, 91.0)
    a, b = view.jobs["A"], view.jobs["B"]
    assert a.sizes == [(10.0, 0), (12.0, 2), (22.0, 4), (30.0, 2), (40.25, 1), (60.0, 0)]
    assert b.sizes == [(21.0, 0), (31.0, 2), (50.0, 0), (72.0, 2), (80.0, 0)]
    assert [(r.n_before, r.n_nodes) for r in a.rounds] == [(0, 2), (2, 4), (4, 2), (2, 1)]
    assert a.stalls_s == [0.4, 0.2, 0.1]
    assert a.metrics == {"loss": [(18.0, 2.0), (29.0, 1.0), (59.0, 0.5)], "accuracy": [(29.0, 0.75), (59.0, 0.9)]}
    assert {n: s.mean_per_s for n, s in a.scales.items()} == {2: 50.0, 4: 90.0, 1: 30.0}
    assert b.scales == {}  # an unsettled report measures nothing
    assert b.deaths == [(50.0, "n4: node lost")]
    assert (a.ended_s, a.phase, b.ended_s, b.phase, b.error) == (
        60.0,
        JobPhase.FINISHED,
        80.0,
        JobPhase.FAILED,
        "ValueError: no",
    )
    n2 = view.nodes["n2"]
    assert [(s.start_s, s.end_s, s.reclaimed_s, s.lost) for s in n2.presences] == [
        (0.0, 40.25, 40.0, False),
        (70.0, 91.0, None, False),
    ]
    assert [(h.job, h.start_s, h.end_s) for h in n2.holds] == [("A", 12.0, 40.25), ("B", 72.0, 80.0)]
    assert [(h.job, h.start_s, h.end_s) for h in view.nodes["n4"].holds] == [("A", 22.0, 30.0), ("B", 31.0, 50.0)]
    assert view.nodes["n4"].presences[0].lost
    assert view.open_spells == [(0.0, 90.0)]


def test_round_of_the_same_size_is_no_rescale_but_may_stall() -> None:
    view = fold(
        [
            (0.0, submitted("A")),
            (1.0, formed("A", "n1", "n2")),
            (2.0, formed("A", "n1", "n2", round=1, cause="rescale", stall_s=0.5)),  # a new controller asked again
            (3.0, left("A", "n2", planned=False)),
            (3.5, formed("A", "n1", "n2", round=2, cause="loss", stall_s=0.7)),  # its worker was started anew
            (4.0, left("A", "n2", planned=False)),
            (4.5, formed("A", "n1", round=3, cause="loss", stall_s=0.9)),
            (5.0, left("A", "n1")),
            (6.0, formed("A", "n1", "n2", round=4)),
        ]
    )
    job = view.jobs["A"]
    assert (job.n_rescales, job.n_restarts, job.stalls_s) == (1, 1, [0.5, 0.7, 0.9])
    assert len(job.deaths) == 2


def test_phases_as_events_tell_them() -> None:
    view = PoolView()
    seen = []
    for time_s, event in HISTORY:
        view.add(time_s, event)
        if "B" in view.jobs and (not seen or seen[-1] != view.jobs["B"].phase):
            seen.append(view.jobs["B"].phase)
    assert seen == [JobPhase.QUEUED, JobPhase.RUNNING, JobPhase.PAUSED, JobPhase.RUNNING, JobPhase.FAILED]


def test_long_series_are_thinned_and_keep_their_ends() -> None:
    view = PoolView(keep_ledger=False)
    for i in range(100_000):
        view.add(float(i), progress("A", i, loss=float(i)))
    job = view.jobs["A"]
    series = job.metrics["loss"]
    assert (series[0], series[-1]) == ((0.0, 0.0), (99_999.0, 99_999.0))
    assert len(series) < 2 * RESOLUTION * (1 + math.log(100_000 / RESOLUTION))
    assert all(later - earlier <= 2 * 100_000 / RESOLUTION for (earlier, _), (later, _) in pairwise(series))
    assert job.metric("loss") == 99_999.0
    assert job.samples == 99_999


def test_ledger_is_kept_only_where_it_is_wanted() -> None:
    span = ev.SamplesCommitted(
        job="A", round=0, epoch=0, step_from=0, step_to=1, cursor_from=0, cursor_to=8, n_samples=8, index_hash=1
    )
    for keep in (True, False):
        view = PoolView(keep_ledger=keep)
        view.add(0.0, span)
        assert view.jobs["A"].spans == ([span] if keep else [])


def test_target_of_the_job_itself_is_used_unless_another_is_given() -> None:
    own = ev.JobSubmitted(job="A", spec=JobSpec(name="a", target=Target(metric="accuracy", value=0.5)))
    view = fold([(0.0, own), (1.0, progress("A", 1, accuracy=0.6))])
    assert summary(view, {}, 2.0).jobs[0].reached is True
    assert summary(view, {"a": Target(metric="accuracy", value=0.7)}, 2.0).jobs[0].reached is False
    assert view.handbacks_s() == []
    assert view.started_s == 0.0


def test_job_called_takes_ids_and_newest_of_a_name() -> None:
    view = fold([(0.0, submitted("1")), (1.0, ev.JobSubmitted(job="2", spec=JobSpec(name="name-1")))])
    found = view.job_called("name-1")
    assert found is not None
    assert found.job == "2"
    assert view.job_called("1") is view.jobs["1"]
    assert view.job_called("x") is None


def test_ledger_is_checked_by_what_is_passed_in() -> None:
    spans = [
        ev.SamplesCommitted(
            job="A",
            round=0,
            epoch=0,
            step_from=i,
            step_to=i + 1,
            cursor_from=8 * i,
            cursor_to=8 * i + 8,
            n_samples=8,
            index_hash=i,
        )
        for i in range(3)
    ]
    dataset = ev.DatasetDescribed(job="A", n_samples=24, epoch_hash=3, batch=8)
    asked = []

    def verify(given_spans: list[ev.SamplesCommitted], described: ev.DatasetDescribed) -> tuple[int, int]:
        asked.append((list(given_spans), described))
        return 3, 1

    view = fold([(0.0, submitted("A")), (0.0, submitted("B")), (1.0, dataset), *((2.0, span) for span in spans)])
    a, b = summary(view, {}, 3.0, verify).jobs
    assert (a.samples_lost, a.samples_repeated) == (3, 1)
    assert (b.samples_lost, b.samples_repeated) == (None, None)  # it never described its data
    assert asked == [(spans, dataset)]


# -- a controller that dies and comes back -----------------------------------------------------------------------

BEFORE_CRASH: list[Entry] = [
    (0.0, ev.PoolStarted(pool="p", version="1")),
    (0.0, joined("n1", "n2", "n3")),
    (0.0, submitted("A", 1, 4)),
    (0.0, formed("A", "n1", "n2", "n3")),
    (10.0, progress("A", 10)),
    (20.0, ev.ControllerRestarted(patience_s=5.0)),
]


def test_node_that_calls_in_with_its_worker_was_used_all_along() -> None:
    view = fold([*BEFORE_CRASH, (21.0, joined("n1", "n2", "n3", n1="A", n2="A", n3="A"))])
    assert node_seconds(view, 30.0) == (90.0, 90.0)
    assert view.jobs["A"].sizes == [(0.0, 3)]
    assert view.restarts_s == [20.0]


def test_node_that_calls_in_without_its_worker_was_used_until_last_heard_of() -> None:
    view = fold([*BEFORE_CRASH, (21.0, joined("n1", "n2", n1="A")), (21.0, joined("n3", n3="A"))])
    assert node_seconds(view, 30.0) == (90.0, 30 + 10 + 30)
    assert view.jobs["A"].sizes == [(0.0, 3), (10.0, 2)]
    assert view.jobs["A"].nodes == ("n1", "n3")


def test_node_that_never_calls_in_was_ours_until_last_heard_of() -> None:
    view = fold(
        [
            *BEFORE_CRASH,
            (21.0, joined("n1", n1="A")),
            (22.0, left("A", "n2", planned=False)),
            (25.0, ev.NodesLost(nodes=("n2", "n3"), reason="silent")),
        ]
    )
    assert node_seconds(view, 30.0) == (30 + 10 + 10, 30 + 10 + 10)
    sizes = view.jobs["A"].sizes
    assert sizes == [(0.0, 3), (10.0, 1)]


def test_nothing_is_offered_between_down_and_up() -> None:
    view = fold(
        [
            (0.0, ev.PoolStarted(pool="p", version="1")),
            (0.0, joined("n1")),
            (0.0, submitted("A")),
            (10.0, ev.PoolStopRequested()),
            (12.0, ev.PoolStopRequested()),
            (15.0, released("n1")),
            (50.0, ev.ControllerRestarted()),
            (50.0, joined("n1")),
        ]
    )
    assert node_seconds(view, 60.0) == (20.0, 0.0)
    assert view.open_spells == [(0.0, 10.0), (50.0, None)]


def test_plans_profiles_and_reasons() -> None:
    def plan(profiling: Profiling | None, reason: str = "") -> ev.PlanReady:
        jobs = (PlannedJob(job="A", nodes=("n1",), reason=reason),)
        return ev.PlanReady(generation=1, plan=Plan(jobs=jobs, profiling=profiling, solver="dp"), solve_s=0.002)

    at = [Profiling(job="A", n_nodes=n, since_s=0.0) for n in (4, 2)]
    view = fold(
        [
            (0.0, submitted("A")),
            (1.0, plan(at[0], "profiling at 4")),
            (2.0, plan(at[0])),
            (3.0, plan(at[1])),
            (4.0, ev.PlanFailed(generation=2, error="boom")),
            (5.0, plan(None, "alone")),
            (6.0, plan(at[0], "again")),
            (7.0, ev.PoolStopRequested()),
        ]
    )
    assert [(p.n_nodes, p.start_s, p.end_s) for p in view.profiles] == [(4, 1.0, 3.0), (2, 3.0, 5.0), (4, 6.0, 7.0)]
    assert len(view.solves) == 5
    assert view.plan_failures == [(4.0, "boom")]
    assert view.jobs["A"].reason == "again"
    assert summary(view, {}, 8.0).plan_solve_s_p50 == 0.002


def test_cancelled_job_is_no_demand_and_keeps_its_phase() -> None:
    view = fold(
        [
            (0.0, joined("n1")),
            (0.0, submitted("A")),
            (0.0, formed("A", "n1")),
            (4.0, ev.JobCancelRequested(job="A")),
            (5.0, ev.JobStopped(job="A")),
        ]
    )
    assert node_seconds(view, 10.0) == (4.0, 4.0)  # used is never more than offered
    assert view.jobs["A"].phase is JobPhase.CANCELLED
    assert view.jobs["A"].sizes == [(0.0, 1), (5.0, 0)]


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=40), st.sampled_from([50, 90, 99]))
def test_percentile_is_numpys(values: list[float], percent: int) -> None:
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), abs=1e-5)


def test_percentile_of_nothing() -> None:
    assert percentile([], 50) is None


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6), st.integers(1, 3)), max_size=4), st.integers(0, 12))
@settings(max_examples=200, deadline=None)
def test_most_held_is_the_best_of_all_assignments(jobs: list[tuple[int, int, int]], n_nodes: int) -> None:
    specs = [(lo, lo + more, step) for lo, more, step in jobs]
    sums = {0}
    for lo, hi, step in specs:
        sums |= {total + size for total in sums for size in range(lo, hi + 1, step)}
    counted: dict[tuple[int, int, int], int] = {}
    for spec in specs:
        counted[spec] = counted.get(spec, 0) + 1
    assert most_held(counted, n_nodes) == max(total for total in sums if total <= n_nodes)


# -- any order of events -----------------------------------------------------------------------------------------

NODES = st.lists(st.sampled_from(["n1", "n2", "n3"]), min_size=1, max_size=3, unique=True)
JOBS = st.sampled_from(["A", "B"])
CAUSES = st.sampled_from(["start", "rescale", "loss"])
EVENTS = st.one_of(
    st.builds(lambda names: joined(*names), NODES),
    st.builds(lambda names, job: joined(*names, **dict.fromkeys(names, job)), NODES, JOBS),
    st.builds(lambda names: reclaimed(*names), NODES),
    st.builds(lambda names: released(*names, handback_s=0.1), NODES),
    st.builds(lambda names: ev.NodesLost(nodes=tuple(names), reason="r"), NODES),
    st.builds(lambda job, lo, more: submitted(job, lo, lo + more), JOBS, st.integers(1, 2), st.integers(0, 2)),
    st.builds(lambda job, names, cause: formed(job, *names, cause=cause), JOBS, NODES, CAUSES),
    st.builds(lambda job, names: left(job, *names), JOBS, NODES),
    st.builds(lambda job, n: progress(job, n, rate=1.0, loss=1.0), JOBS, st.integers(0, 99)),
    st.builds(lambda job: ev.JobFinished(job=job), JOBS),
    st.builds(lambda job: ev.JobStopped(job=job), JOBS),
    st.builds(lambda job: ev.JobCancelRequested(job=job), JOBS),
    st.just(ev.ControllerRestarted()),
    st.just(ev.PoolStopRequested()),
    st.just(ev.TimeReached()),
)
STREAMS = st.lists(st.tuples(st.integers(0, 3), EVENTS), max_size=40)


def timed(stream: list[tuple[int, ev.AnyEvent]]) -> list[Entry]:
    entries, now = [], 0
    for dt, event in stream:
        now += dt
        entries.append((float(now), event))
    return entries


@given(STREAMS)
@settings(max_examples=200, deadline=None)
def test_any_history_folds_into_a_consistent_view(stream: list[tuple[int, ev.AnyEvent]]) -> None:
    view = fold(timed(stream))
    members = {name: job.job for job in view.jobs.values() for name in job.nodes}
    assert sum(len(job.nodes) for job in view.jobs.values()) == len(members)  # no node serves two jobs
    for name, node in view.nodes.items():
        ongoing = [hold.job for hold in node.holds if hold.end_s is None]
        assert ongoing == ([members[name]] if name in members else [])
        for earlier, later in pairwise(node.holds):
            assert earlier.end_s is not None
            assert earlier.start_s <= earlier.end_s <= later.start_s
        for before, after in pairwise(node.presences):
            assert before.end_s is not None
            assert before.start_s <= before.end_s <= after.start_s
    for job in view.jobs.values():
        times = [time_s for time_s, _ in job.sizes]
        assert times == sorted(times)
        assert job.sizes[-1][1] == len(job.nodes)
        assert all(a != b for (_, a), (_, b) in pairwise(job.sizes))
    assert msgspec.json.decode(msgspec.json.encode(view), type=PoolView) == view


@given(STREAMS)
@settings(max_examples=200, deadline=None)
def test_sweep_equals_counting_every_instant(stream: list[tuple[int, ev.AnyEvent]]) -> None:
    """Events fall on whole seconds, so what holds at half past a second holds for the whole of it."""
    entries = timed(stream)
    view = fold(entries)
    now = int(entries[-1][0]) + 3 if entries else 3
    offered = used = 0
    for second in range(now):
        at = second + 0.5
        if not any(start <= at < (now if end is None else end) for start, end in view.open_spells):
            continue
        usable = {
            name
            for name, node in view.nodes.items()
            for stay in node.presences
            if stay.start_s <= at < min(x for x in (stay.end_s, stay.reclaimed_s, now) if x is not None)
        }
        held = {
            name
            for name, node in view.nodes.items()
            for hold in node.holds
            if hold.start_s <= at < (now if hold.end_s is None else hold.end_s)
        }
        sums = {0}
        for job in view.jobs.values():
            if job.submitted_s <= at < (now if job.ended_s is None else job.ended_s):
                sums |= {total + size for total in sums for size in job.spec.sizes(len(usable))}
        could = max(total for total in sums if total <= len(usable))
        offered += could
        used += min(could, len(usable & held))
    assert node_seconds(view, float(now)) == (offered, used)


# -- beside the controller ---------------------------------------------------------------------------------------


class Beside(Chaos):
    """Random worlds (see the chaos test of the controller), with a view folded beside the state."""

    def __init__(self) -> None:
        super().__init__()
        self.view = PoolView()
        self.n_folded = 0

    @invariant()
    def view_and_state_tell_the_same(self) -> None:
        world = self.world
        for event in world.log[self.n_folded :]:
            self.view.add(world.now, event)
        self.n_folded = len(world.log)
        in_pool = {name for name, node in self.view.nodes.items() if node.presences[-1].end_s is None}
        assert in_pool == set(world.state.nodes)
        for name, state in world.state.jobs.items():
            job = self.view.jobs[name]
            assert set(job.nodes) == set(state.observed), name
            assert job.phase.final == state.phase.final or state.phase is JobPhase.STOPPING
        assert sum(1 for n in self.view.nodes.values() for s in n.presences if s.reclaimed_s is not None) == (
            world.state.n_reclaims
        )


TestBesideTheController = Beside.TestCase
TestBesideTheController.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
