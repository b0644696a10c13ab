"""Answers to clients, from a controller that lives in the test world."""

from __future__ import annotations

import msgspec
import pytest

from sunfleck.config import Config
from sunfleck.core import events as e
from sunfleck.core.errors import InvalidRequest, SunfleckError
from sunfleck.core.model import JobPhase, JobSpec
from sunfleck.engine import Call, Post
from sunfleck.observers.views import ExplainView, PoolView, StatusView
from sunfleck.service import Service, find_job
from tests.fakes.world import World


class Desk:
    """A service whose engine is the world: calls run at once, posts are sent to the controller."""

    def __init__(self, warnings=()):
        self.world = World(capacity=8)
        self.service = Service(Config(), self, PoolView(), lambda: list(warnings), lambda job: f"/logs/{job}")

    def now(self):
        return 0.0

    def put(self, item):
        if isinstance(item, Call):
            item.action(self.world.controller, self.world.now)
        elif isinstance(item, Post):
            self.world.send(item.event)
            item.done()

    def ask(self, method, **params):
        answers = []
        self.service.handle(method, params, answers.append)
        (answer,) = answers
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def desk():
    return Desk()


def spec(**fields):
    return msgspec.to_builtins(JobSpec(**{"name": "train", "max_nodes": 4, **fields}))


def test_submit_gives_ids_in_order(desk):
    assert [desk.ask("submit", spec=spec())["job"] for _ in range(3)] == ["j1", "j2", "j3"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"min_nodes": 9, "max_nodes": 9}, "at most 8"),
        ({"min_nodes": 5}, "MIN <= MAX"),
        ({"weight": 0.0}, "weight"),
        ({"weight": float("inf")}, "weight"),
        ({"weight": 1e300}, "weight"),
    ],
)
def test_a_job_that_can_never_run_is_refused_and_leaves_no_trace(desk, fields, says):
    with pytest.raises(InvalidRequest, match=says):
        desk.ask("submit", spec=spec(**fields))
    assert not desk.world.state.jobs


def test_a_malformed_job_is_refused(desk):
    with pytest.raises(InvalidRequest, match="not a job"):
        desk.ask("submit", spec={"name": 3})


def test_nothing_is_accepted_that_could_be_lost():
    desk = Desk(warnings=["journal: the disk is full; free some space"])
    with pytest.raises(InvalidRequest, match="the disk is full"):
        desk.ask("submit", spec=spec())


def test_status_tells_planned_requested_and_observed(desk):
    desk.ask("submit", spec=spec())
    desk.world.join("n1", "n2")
    status = desk.ask("status")
    assert isinstance(status, StatusView)
    assert [node.name for node in status.nodes] == ["n1", "n2"]
    assert status.jobs[0].observed == ()
    desk.world.settle()
    row = desk.ask("status").jobs[0]
    assert row.planned == row.requested == row.observed == ("n1", "n2")
    assert row.phase is JobPhase.RUNNING


def test_explain_answers_by_id_and_by_name_with_curve_and_reason(desk):
    desk.ask("submit", spec=spec())
    desk.world.join("n1", "n2")
    desk.world.settle()
    desk.world.send(e.Progress(job="j1", round=0, n_nodes=2, step=9, epoch=0, samples=99, dt_s=1.0, samples_per_s=50.0))
    view = desk.ask("explain", job="train")
    assert isinstance(view, ExplainView)
    assert view.reason == "an even share: 2"
    measured = {point.n_nodes: point for point in view.curve if point.measured}
    assert measured[2].samples_per_s == pytest.approx(50.0)
    assert view.log_path == "/logs/j1"


def test_a_job_that_never_trains_says_so(desk):
    desk.ask("submit", spec=spec())
    desk.world.join("n1")
    desk.world.settle()
    desk.ask("submit", spec=spec(name="silent"))
    desk.world.now += 60
    assert "no progress for 60 s" in desk.ask("status").jobs[0].reason
    desk.world.send(e.Progress(job="j1", round=0, n_nodes=1, step=1, epoch=0, samples=9, dt_s=1.0))
    assert "no progress" not in desk.ask("explain", job="j1").reason


def test_an_unknown_job_and_an_ambiguous_name_are_said(desk):
    with pytest.raises(InvalidRequest, match="sunfleck jobs"):
        desk.ask("explain", job="nope")
    desk.ask("submit", spec=spec())
    desk.ask("submit", spec=spec())
    with pytest.raises(InvalidRequest, match="j1, j2"):
        desk.ask("cancel", job="train")


def test_a_name_means_the_one_unfinished_job(desk):
    desk.ask("submit", spec=spec())
    desk.ask("cancel", job="train")
    desk.ask("submit", spec=spec())
    assert find_job(desk.world.controller, "train").job == "j2"


def test_cancelling_twice_is_refused(desk):
    desk.ask("submit", spec=spec())
    desk.ask("cancel", job="j1")
    with pytest.raises(InvalidRequest, match="already cancelled"):
        desk.ask("cancel", job="j1")


def test_an_unknown_request_and_bad_parameters_are_answered(desk):
    with pytest.raises(InvalidRequest, match="same version"):
        desk.ask("frobnicate")
    answers = []
    with pytest.raises(TypeError):  # the engine records it as a fault ...
        desk.service.handle("status", {"wrong": 1}, answers.append)
    assert isinstance(answers[0], SunfleckError)  # ... and the client is answered all the same


def test_while_stopping_nothing_is_accepted(desk):
    desk.world.join("n1")
    desk.ask("down")
    with pytest.raises(InvalidRequest, match="stopping"):
        desk.ask("submit", spec=spec())
    assert desk.ask("status").stopping
