"""The controller's decisions, told as short stories. Invariants are checked after every event by the world."""

from __future__ import annotations

import math

from sunfleck.core import events as e
from sunfleck.core.commands import ReleaseNodes, RescaleJob, Solve
from sunfleck.core.model import JobPhase, JobSpec, Plan, PlannedJob
from tests.fakes.world import World


def of(commands, kind):
    return [c for c in commands if isinstance(c, kind)]


def test_a_job_gets_the_nodes_that_join():
    world = World()
    world.submit("a")
    assert world.state.jobs["a"].phase is JobPhase.QUEUED
    world.join("n1", "n2")
    world.settle()
    job = world.state.jobs["a"]
    assert job.phase is JobPhase.RUNNING
    assert job.observed == {"n1", "n2"}


def test_a_reclaim_shrinks_before_any_plan_is_made():
    world = World()
    world.submit("a")
    world.join("n1", "n2", "n3")
    world.settle()
    commands = world.controller.handle(e.NodesReclaimed(nodes=("n2",), grace_s=5), world.now)
    kinds = [type(c) for c in commands]
    assert kinds.index(RescaleJob) < kinds.index(Solve)
    assert of(commands, RescaleJob)[0].nodes == ("n1", "n3")
    assert not of(commands, ReleaseNodes), "the worker is still there"


def test_a_node_is_released_when_its_worker_has_left():
    world = World()
    world.submit("a")
    world.join("n1", "n2", "n3")
    world.settle()
    world.reclaim("n1", "n3")
    world.settle()
    assert set(world.state.nodes) == {"n2"}
    assert world.state.jobs["a"].observed == {"n2"}
    assert world.state.n_reclaims == 2


def test_a_free_node_is_released_at_once():
    world = World()
    world.join("n1")
    commands = world.controller.handle(e.NodesReclaimed(nodes=("n1",), grace_s=5), world.now)
    assert of(commands, ReleaseNodes)[0].nodes == ("n1",)


def test_losing_all_nodes_pauses_and_a_new_node_resumes():
    world = World()
    world.submit("a")
    world.join("n1")
    world.settle()
    world.reclaim("n1")
    world.settle()
    assert world.state.jobs["a"].phase is JobPhase.PAUSED
    world.join("n2")
    world.settle()
    assert world.state.jobs["a"].phase is JobPhase.RUNNING


def test_below_its_minimum_a_job_pauses():
    world = World()
    world.submit("a", min_nodes=3)
    world.join("n1", "n2", "n3")
    world.settle()
    world.reclaim("n1")
    world.settle()
    assert world.state.jobs["a"].phase is JobPhase.PAUSED
    assert all(node.job is None for node in world.state.nodes.values())


def test_a_multiple_is_kept_when_a_node_leaves():
    world = World()
    world.submit("a", min_nodes=2, multiple=2)
    world.join("n1", "n2", "n3", "n4")
    world.settle()
    assert len(world.state.jobs["a"].observed) == 4
    world.reclaim("n4")
    world.settle()
    assert len(world.state.jobs["a"].observed) == 2


def test_a_node_passes_to_another_job_only_when_it_is_empty():
    world = World()
    world.submit("a")
    world.join("n1", "n2")
    world.settle()
    world.submit("b")  # the even share takes one node from a
    world.settle()
    assert len(world.state.jobs["a"].observed) == len(world.state.jobs["b"].observed) == 1


def test_a_stale_plan_is_dropped_and_asked_for_again():
    world = World()
    world.submit("a")
    world.join("n1")
    stale = next(p for p in world.pending if isinstance(p, e.PlanReady))
    world.join("n2")  # moves the generation on while the solve is under way
    world.pending.remove(stale)
    commands = world.send(stale)
    assert of(commands, Solve), "a new plan is asked for"
    assert not of(commands, RescaleJob)
    world.settle()
    assert world.state.jobs["a"].observed == {"n1", "n2"}


def test_a_failed_plan_never_strips_a_running_job():
    world = World()
    world.submit("a")
    world.join("n1", "n2")
    world.settle()
    world.controller.handle(e.NodesJoined(nodes=()), 0.0)
    world.send(e.PlanFailed(generation=world.state.generation, error="solver crashed"))
    assert world.state.jobs["a"].observed == {"n1", "n2"}
    assert world.state.plan_error == "solver crashed"
    world.now = max(world.wakes)
    assert of(world.send(e.TimeReached()), Solve), "it is asked again later"


def test_a_lost_node_is_replaced_by_the_next_plan():
    world = World()
    world.submit("a", max_nodes=2)
    world.join("n1", "n2", "n3")
    world.settle()
    lost = sorted(world.state.jobs["a"].observed)[0]
    world.lose(lost)
    world.settle()
    job = world.state.jobs["a"]
    assert len(job.observed) == 2
    assert lost not in job.observed


def test_cancel_ends_the_workers_and_frees_the_nodes():
    world = World()
    world.submit("a")
    world.join("n1")
    world.settle()
    world.send(e.JobCancelRequested(job="a"))
    assert world.state.jobs["a"].phase is JobPhase.STOPPING
    world.settle()
    assert world.state.jobs["a"].phase is JobPhase.CANCELLED
    assert world.state.nodes["n1"].job is None


def test_cancelling_a_queued_job_needs_no_executor():
    world = World()
    world.submit("a")
    assert not of(world.send(e.JobCancelRequested(job="a")), RescaleJob)
    assert world.state.jobs["a"].phase is JobPhase.CANCELLED


def test_a_crash_says_why_and_frees_the_nodes():
    world = World()
    world.submit("a")
    world.submit("b")
    world.join("n1", "n2")
    world.settle()
    world.running["a"] = frozenset()
    world.send(e.JobCrashed(job="a", error="ModuleNotFoundError: No module named 'x'\nlog: a.log"))
    world.settle()
    assert world.state.jobs["a"].phase is JobPhase.FAILED
    assert world.state.jobs["a"].reason == "ModuleNotFoundError: No module named 'x'"
    assert world.state.jobs["b"].observed == {"n1", "n2"}


def test_stopping_the_pool_saves_jobs_and_releases_nodes():
    world = World()
    world.submit("a")
    world.join("n1", "n2")
    world.settle()
    world.send(e.PoolStopRequested())
    world.settle()
    assert world.pool_stopped
    assert not world.state.nodes
    assert world.state.jobs["a"].phase is JobPhase.PAUSED


def test_a_pool_that_cannot_stop_in_time_stops_all_the_same():
    world = World()
    world.submit("a")
    world.join("n1")
    world.settle()
    world.send(e.PoolStopRequested())
    world.pending.clear()  # nobody answers
    world.now = world.state.stop_deadline_s
    world.send(e.TimeReached())
    assert world.pool_stopped


def test_after_a_restart_running_jobs_are_not_disturbed():
    world = World()
    world.submit("a")
    world.submit("b")
    world.join("n1", "n2", "n3", "n4")
    world.settle()
    before = {job: world.state.jobs[job].observed for job in "ab"}
    world.restart()
    assert not of(world.commands[-1:], Solve), "no plan while nodes are silent"
    world.commands.clear()
    world.rejoin()
    told = {c.job: frozenset(c.nodes) for c in of(world.commands, RescaleJob)}
    assert told == before, "the executor is told what it already runs"
    world.settle()
    assert {job: world.state.jobs[job].observed for job in "ab"} == before


def test_a_node_that_stays_silent_after_a_restart_is_lost():
    world = World()
    world.submit("a")
    world.join("n1", "n2")
    world.settle()
    world.restart(patience_s=10)
    world.alive.discard("n2")
    world.running["a"] = frozenset({"n1"})
    world.rejoin()
    world.now += 10
    world.send(e.TimeReached())
    world.settle()
    assert set(world.state.nodes) == {"n1"}
    assert world.state.jobs["a"].observed == {"n1"}


def test_a_worker_that_died_while_no_controller_looked_is_started_again():
    world = World()
    world.submit("a")
    world.join("n1")
    world.settle()
    world.restart()
    world.running["a"] = frozenset()
    world.rejoin()
    world.settle()
    assert world.state.jobs["a"].phase is JobPhase.RUNNING


def test_profiles_are_shared_within_an_architecture():
    world = World()
    for job in ("a", "b"):
        world.send(e.JobSubmitted(job=job, spec=JobSpec(name=job, max_nodes=4, architecture="resnet")))
    world.join("n1", "n2")
    world.settle()
    world.send(e.Progress(job="a", round=0, n_nodes=1, step=10, epoch=0, samples=100, dt_s=1.0, samples_per_s=100.0))
    views = {view.job: view for view in world.controller.snapshot().jobs}
    assert views["b"].scales[0].mean_per_s == 100.0


def test_measured_costs_replace_assumed_ones():
    world = World()
    world.submit("a")
    world.join("n1")
    world.settle()
    assert not world.state.jobs["a"].costs.rescale_up_s.measured
    world.join("n2")
    world.settle()
    cost = world.state.jobs["a"].costs.rescale_up_s
    assert cost.measured
    assert cost.value_s == 0.01


def test_a_shrink_is_measured_whichever_word_comes_first():
    for leavers_first in (True, False):
        world = World()
        world.submit("a")
        world.join("n1", "n2")
        world.settle()
        world.reclaim("n2")
        words = [p for p in world.pending if isinstance(p, e.WorkersLeft | e.RoundFormed)]
        words.sort(key=lambda p: isinstance(p, e.WorkersLeft), reverse=leavers_first)
        world.pending = [p for p in world.pending if p not in words]
        world.pending = words + world.pending
        world.settle()
        assert world.state.jobs["a"].costs.rescale_down_s.measured


def test_jobs_that_can_never_run_are_refused_with_the_fix():
    controller = World(capacity=8).controller
    assert "lower MIN" in controller.refusal(JobSpec(name="a", min_nodes=9, max_nodes=9))
    assert "MIN <= MAX" in controller.refusal(JobSpec(name="a", min_nodes=3, max_nodes=2))
    for weight in (0.0, -1.0, math.inf, math.nan):
        assert "weight" in controller.refusal(JobSpec(name="a", weight=weight))
    assert "deadline_s" in controller.refusal(JobSpec(name="a", deadline_s=math.nan))
    assert controller.refusal(JobSpec(name="a", min_nodes=1, max_nodes=99)) is None


def test_a_plan_that_moves_a_node_waits_for_the_first_job_to_leave():
    """a: n1 n2 -> n1; b: none -> n2. b may not be told before a has left n2."""

    def planner(snapshot):
        nodes = {job.job: job.nodes for job in snapshot.jobs}
        if "b" not in nodes:
            return Plan(jobs=(PlannedJob(job="a", nodes=("n1", "n2"), reason=""),))
        return Plan(jobs=(PlannedJob(job="a", nodes=("n1",), reason=""), PlannedJob(job="b", nodes=("n2",), reason="")))

    world = World(planner)
    world.submit("a")
    world.join("n1", "n2")
    world.settle()
    world.submit("b")
    commands = []
    while world.pending:
        if isinstance(world.pending[0], e.WorkersLeft):
            assert not [c for c in commands if isinstance(c, RescaleJob) and c.job == "b"]
        world.deliver()
        commands = list(world.commands)
    assert world.state.jobs["b"].observed == {"n2"}
