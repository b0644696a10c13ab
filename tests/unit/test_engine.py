"""The loop, with adapters that answer at once, on a clock that only moves when it is waited for."""

from __future__ import annotations

import threading
import time
from collections import deque

import pytest

from sunfleck.core import events as e
from sunfleck.core.controller import Controller
from sunfleck.core.model import JobPhase, JobSpec, NodeSpec, Plan
from sunfleck.engine import Call, Engine, Post, ThreadPlanner, WallClock, solve_now
from tests.fakes.world import spread


class TestClock:
    """Virtual time: waiting jumps to `until`; nothing to do and nothing to wait for ends the test."""

    __test__ = False

    def __init__(self):
        self.time = 100.0
        self.inbox = deque()

    def now(self):
        return self.time

    def put(self, item):
        self.inbox.append(item)

    def wait(self, until):
        if self.inbox:
            items, self.inbox = list(self.inbox), deque()
            return items
        if until is None:
            raise AssertionError("the engine waits for ever")
        self.time = max(self.time, until)
        return ()


class Adapters:
    """Planner, cluster and executor in one; everything succeeds at once."""

    def __init__(self, clock):
        self.clock = clock
        self.calls = []
        self.running = {}

    def solve(self, snapshot):
        self.clock.put(e.PlanReady(generation=snapshot.generation, plan=spread(snapshot), solve_s=0.0))

    def rescale(self, job, spec, nodes, grace_s):
        self.calls.append(("rescale", job, tuple(nodes)))
        left = tuple(sorted(self.running.get(job, set()) - set(nodes)))
        self.running[job] = set(nodes)
        if left:
            self.clock.put(e.WorkersLeft(job=job, nodes=left, planned=True))
        if nodes:
            self.clock.put(e.RoundFormed(job=job, round=0, nodes=tuple(nodes), step=0, took_s=0.1))

    def stop_job(self, job, grace_s, save):
        self.clock.put(e.JobStopped(job=job))

    def release(self, nodes):
        self.calls.append(("release", tuple(nodes)))
        self.clock.put(e.NodesReleased(nodes=tuple(nodes)))

    def request(self, n_nodes):
        self.calls.append(("request", n_nodes))


class Record:
    def __init__(self):
        self.events = []
        self.turns = 0

    def on_event(self, time_s, event):
        self.events.append((time_s, event))

    def on_turn_end(self):
        self.turns += 1


@pytest.fixture
def engine():
    clock = TestClock()
    adapters = Adapters(clock)
    return Engine(Controller(), clock, adapters, adapters, adapters, [Record()])


def turns(engine, n=20):
    for _ in range(n):
        if not engine.clock.inbox:
            return
        engine.turn()


def test_events_are_recorded_before_their_commands_are_obeyed(engine):
    record = engine.observers[0]
    seen = []
    engine.planner.solve = lambda snapshot: seen.append((len(record.events), record.turns))
    engine.clock.put(e.JobSubmitted(job="a", spec=JobSpec(name="a", max_nodes=2)))
    engine.turn()
    assert seen == [(1, 1)]


def test_a_job_runs_end_to_end(engine):
    engine.clock.put(e.JobSubmitted(job="a", spec=JobSpec(name="a", max_nodes=2)))
    engine.clock.put(e.NodesJoined(nodes=(NodeSpec(name="n1"), NodeSpec(name="n2"))))
    turns(engine)
    assert engine.controller.state.jobs["a"].phase is JobPhase.RUNNING
    assert ("rescale", "a", ("n1", "n2")) in engine.cluster.calls
    assert ("request", 2) in engine.cluster.calls


def test_it_ends_when_everything_is_handed_back(engine):
    engine.clock.put(e.NodesJoined(nodes=(NodeSpec(name="n1"),)))
    engine.clock.put(e.PoolStopRequested())
    engine.run()
    assert ("release", ("n1",)) in engine.cluster.calls


def test_a_wake_up_becomes_an_event_at_its_time(engine):
    engine.planner.solve = lambda snapshot: engine.clock.put(
        e.PlanReady(generation=snapshot.generation, plan=Plan(jobs=(), review_after_s=7.0), solve_s=0.0)
    )
    engine.clock.put(e.JobSubmitted(job="a", spec=JobSpec(name="a")))
    engine.turn()
    engine.turn()
    engine.turn()
    times = [t for t, event in engine.observers[0].events if isinstance(event, e.TimeReached)]
    assert times == [107.0]


def test_a_query_sees_one_moment_and_leaves_no_record(engine):
    seen = []
    engine.clock.put(Call(lambda controller, now: seen.append((controller.state.generation, now))))
    engine.turn()
    assert seen == [(0, 100.0)]
    assert not engine.observers[0].events


def test_a_post_is_answered_after_it_is_on_record(engine):
    record = engine.observers[0]
    seen = []
    done = lambda: seen.append(record.turns)  # noqa: E731
    engine.clock.put(Post(e.JobSubmitted(job="a", spec=JobSpec(name="a")), done))
    engine.turn()
    assert seen == [1]


def test_an_adapter_that_raises_is_a_fault_and_no_end(engine, capsys):
    def broken(*args):
        raise OSError("no such process")

    engine.executor.rescale = broken
    engine.clock.put(e.NodesJoined(nodes=(NodeSpec(name="n1"),)))
    engine.clock.put(e.JobSubmitted(job="a", spec=JobSpec(name="a")))
    turns(engine)
    assert engine.faults == ["OSError: no such process"]
    assert "no such process" in capsys.readouterr().err


def test_a_policy_that_raises_becomes_plan_failed(capsys):
    class Broken:
        name = "broken"

        def plan(self, snapshot):
            raise ZeroDivisionError("division by zero")

    snapshot = Controller().snapshot()
    answer = solve_now(Broken(), snapshot)
    assert isinstance(answer, e.PlanFailed)
    assert "division by zero" in answer.error
    assert capsys.readouterr().err


def test_the_thread_planner_answers_each_snapshot():
    class Policy:
        name = "test"

        def plan(self, snapshot):
            return spread(snapshot)

    clock = WallClock()
    planner = ThreadPlanner(Policy(), clock.put)
    planner.solve(Controller().snapshot())
    (answer,) = clock.wait(clock.now() + 10)
    planner.stop()
    assert isinstance(answer, e.PlanReady)


def test_the_wall_clock_wakes_for_items_and_for_time():
    clock = WallClock()
    assert clock.wait(clock.now() + 0.01) == ()
    threading.Timer(0.02, clock.put, [e.TimeReached()]).start()
    began = time.monotonic()
    assert list(clock.wait(clock.now() + 30)) == [e.TimeReached()]
    assert time.monotonic() - began < 10
