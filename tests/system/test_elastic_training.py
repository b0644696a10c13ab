"""Real trainers under a real supervisor: whatever happens to the workers, the result is that of an undisturbed run."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="training needs torch")

from sunfleck.core.events import (  # noqa: E402
    CheckpointSaved,
    JobCrashed,
    JobFinished,
    JobStopped,
    Progress,
    WorkersLeft,
)
from sunfleck.executor.elastic import supervisor  # noqa: E402
from sunfleck.executor.launch.wire import FormRound, ToWorker  # noqa: E402
from tests.fakes.agents import FakeAgents  # noqa: E402
from tests.fakes.elastic import Job, World  # noqa: E402

pytestmark = pytest.mark.system

NODES = ("a", "b", "c", "d")
SLOW = ("--sleep", "0.004")


@pytest.fixture(scope="module")
def agents() -> Iterator[FakeAgents]:
    fake = FakeAgents(NODES)
    yield fake
    fake.close()


@pytest.fixture
def world(agents: FakeAgents, tmp_path: Path) -> Iterator[World]:
    nodes = dict(agents.nodes)
    one = World(agents, tmp_path)
    yield one
    agents.nodes.update(nodes)
    one.close()


_undisturbed: dict[tuple[str, ...], Any] = {}


def undisturbed(world: World, *args: str) -> Any:
    """Final state of the same job on one node, left in peace."""
    if args not in _undisturbed:
        job = Job(world, "undisturbed", *args)
        job.rescale("a")
        job.finish()
        _undisturbed[args] = torch.load(job.out)
    return _undisturbed[args]


def assert_as_undisturbed(job: Job, *args: str) -> None:
    expected, got = undisturbed(job.world, *args), torch.load(job.out)
    assert (got["step"], got["samples"]) == (expected["step"], expected["samples"])
    assert got["lr"] == expected["lr"]
    for name, tensor in expected["model"].items():
        torch.testing.assert_close(got["model"][name], tensor, rtol=1e-8, atol=1e-10)
    verdict = job.ledger
    assert (verdict.lost, verdict.repeated) == (0, 0), verdict
    assert verdict.n_samples == expected["samples"]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_growing_and_shrinking_changes_nothing(world: World, optimizer: str) -> None:
    args = ("--optimizer", optimizer, "--epochs", "16")
    job = Job(world, "job", *args, *SLOW)
    job.runs_on("a", "b")
    job.trains()
    grown = job.runs_on("a", "b", "c", "d")
    assert grown.cause == "rescale"
    assert grown.stall_s is not None
    job.trains()
    job.runs_on("c", "d")  # rank 0 leaves
    job.trains()
    job.runs_on("d", "b", "a")  # one leaves and two come at once
    job.trains()
    job.runs_on("b")
    job.finish()
    assert_as_undisturbed(job, *args)
    assert job.ledger.n_epochs_proved == 16
    assert all(e.planned for e in world.of(WorkersLeft, "job"))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("victims", [("b",), ("a",), ("a", "c"), ("b", "c", "d")], ids="-".join)
def test_killed_workers_cost_nothing(world: World, optimizer: str, victims: tuple[str, ...]) -> None:
    args = ("--optimizer", optimizer, "--epochs", "12")
    job = Job(world, "job", *args, *SLOW)
    job.runs_on(*NODES)
    job.trains()
    n = len(job.rounds)
    for node in victims:
        world.agents.kill(job.worker_on(node))
    job.wait_round(n, [x for x in NODES if x not in victims])
    job.wait_round(n, NODES)  # they are started again and join
    job.finish()
    assert_as_undisturbed(job, *args)
    assert any(r.cause == "loss" for r in job.rounds)


def test_all_killed_resumes_from_the_checkpoint(world: World) -> None:
    args = ("--epochs", "12")
    job = Job(world, "job", *args, *SLOW, "--checkpoint", "0.2")
    job.runs_on("a", "b", "c")
    world.wait(lambda: world.of(CheckpointSaved, "job"), "a checkpoint")
    job.trains()
    n = len(job.rounds)
    for worker in job.workers:
        world.agents.kill(worker)
    world.wait(lambda: len(job.rounds) > n, "it trains again")
    assert job.rounds[n].step > 0
    assert job.rounds[n].stall_s is None
    job.finish()
    assert_as_undisturbed(job, *args)


def test_pause_saves_and_resumes_at_another_size(world: World) -> None:
    args = ("--optimizer", "adamw", "--epochs", "10")
    job = Job(world, "job", *args, *SLOW)
    job.runs_on("a", "b", "c")
    job.trains()
    job.rescale()
    world.wait(lambda: not job.workers, "everybody leaves")
    paused_at = world.of(CheckpointSaved, "job")[-1].step
    assert {n for e in world.of(WorkersLeft, "job") for n in e.nodes} == {"a", "b", "c"}
    resumed = job.runs_on("d", "c")
    assert resumed.step == paused_at
    job.finish()
    assert_as_undisturbed(job, *args)


def test_moving_to_other_nodes_goes_through_a_checkpoint(world: World) -> None:
    args = ("--epochs", "10")
    job = Job(world, "job", *args, *SLOW)
    job.runs_on("a", "b")
    job.trains()
    moved = job.runs_on("c", "d")
    assert moved.step > 0
    job.finish()
    assert_as_undisturbed(job, *args)


def test_a_lost_node_is_a_lost_worker(world: World) -> None:
    args = ("--epochs", "12")
    job = Job(world, "job", *args, *SLOW)
    job.runs_on(*NODES)
    job.trains()
    n = len(job.rounds)
    world.agents.lose_node("a")
    job.wait_round(n, ("b", "c", "d"))
    job.rescale("b", "c", "d")
    job.finish()
    assert_as_undisturbed(job, *args)


def test_a_new_controller_adopts_a_running_round(world: World) -> None:
    args = ("--epochs", "14")
    job = Job(world, "job", *args, *SLOW)
    first = job.runs_on("a", "b", "c")
    job.trains()
    world.agents.silence()
    time.sleep(0.5)  # training goes on meanwhile
    sent = len(world.agents.sent)
    world.new_controller()
    adopted = job.runs_on("a", "b", "c")
    assert adopted.round == first.round
    assert not any(isinstance(m, ToWorker) and isinstance(m.payload, FormRound) for _, _, m in world.agents.sent[sent:])
    job.trains()
    job.runs_on("a", "b", "c", "d")
    job.finish()
    assert_as_undisturbed(job, *args)


def test_a_worker_killed_while_no_controller_lives(world: World) -> None:
    args = ("--epochs", "12")
    job = Job(world, "job", *args, *SLOW)
    job.runs_on("a", "b", "c")
    job.trains()
    world.agents.silence()
    world.agents.kill(job.worker_on("a"))
    time.sleep(0.3)
    world.new_controller()
    job.runs_on("a", "b", "c")
    job.finish()
    assert_as_undisturbed(job, *args)


def test_membership_changes_in_the_middle_of_evaluations(world: World) -> None:
    args = ("--epochs", "10", "--evaluate-every", "4", "--optimizer", "adamw")
    job = Job(world, "job", *args, *SLOW)
    job.runs_on("a", "b")
    for nodes in (("a", "b", "c"), ("b", "c"), ("b", "c", "a", "d"), ("d",), ("d", "a"), NODES):
        job.trains(3)
        if job.over:
            break
        job.runs_on(*nodes)
    job.finish()
    assert_as_undisturbed(job, *args)
    accuracies = [p.metrics["accuracy"] for p in world.of(Progress, "job") if "accuracy" in p.metrics]
    assert accuracies[-1] > 0.9


def test_accumulated_gradients_move_with_the_state(world: World) -> None:
    args = ("--epochs", "12", "--accumulate", "3")
    job = Job(world, "job", *args, *SLOW)
    job.runs_on("a", "b")
    for nodes in (NODES, ("b", "d"), ("a", "b", "d"), ("b",), ("b", "c")):
        job.trains(2)
        if not job.over:
            job.runs_on(*nodes)
    job.trains(2)
    if not job.over:
        world.agents.kill(job.worker_on("b"))
    job.finish()
    assert_as_undisturbed(job, *args)


def test_batch_norm_statistics_are_shared(world: World) -> None:
    job = Job(world, "job", "--epochs", "8", "--norm", *SLOW)
    job.runs_on("a", "b", "c", "d")
    job.trains()
    world.agents.kill(job.worker_on("b"))
    job.finish()
    verdict = job.ledger
    assert (verdict.lost, verdict.repeated) == (0, 0)
    assert torch.load(job.out)["model"]["2.num_batches_tracked"].item() == job.step


def test_more_workers_than_samples_in_the_last_batch(world: World) -> None:
    args = ("--samples", "98", "--batch", "48", "--epochs", "30")  # the third step of an epoch has two samples
    job = Job(world, "job", *args, *SLOW)
    job.runs_on(*NODES)
    job.finish()
    assert_as_undisturbed(job, *args)


def test_a_script_that_raises_on_one_rank_fails_with_its_traceback(world: World) -> None:
    job = Job(world, "job", "--crash-at", "7")
    job.rescale("a", "b", "c")
    world.wait(lambda: job.over, "it crashes")
    crashed = world.of(JobCrashed, "job")[0]
    assert "ValueError: the script is wrong" in crashed.error
    assert "job@a#0" in crashed.error
    assert not job.workers


def test_a_script_that_cannot_start_fails_at_once(world: World) -> None:
    job = Job(world, "job", "--no-such-option")
    job.rescale("a")
    world.wait(lambda: job.over, "it crashes")
    assert "unrecognized arguments" in world.of(JobCrashed, "job")[0].error


def test_dying_again_and_again_fails_the_job(world: World) -> None:
    job = Job(world, "job", "--epochs", "1000", *SLOW, max_restarts=0)
    job.runs_on("a")
    world.agents.kill(job.worker_on("a"))
    world.wait(lambda: job.over, "it gives up")
    assert "max_restarts is 0" in world.of(JobCrashed, "job")[0].error


def test_stop_saves_and_says_so(world: World) -> None:
    job = Job(world, "job", "--epochs", "1000", *SLOW)
    job.runs_on("a", "b")
    job.trains()
    world.executor.stop_job("job", 5.0, True)
    world.wait(lambda: world.of(JobStopped, "job"), "it stops")
    assert not job.workers
    assert world.of(CheckpointSaved, "job")[-1].step >= job.step
    assert not world.of(JobFinished, "job")


def test_term_from_the_node_is_a_leave(world: World) -> None:
    args = ("--epochs", "12")
    job = Job(world, "job", *args, *SLOW)
    job.runs_on("a", "b", "c")
    job.trains()
    n = len(job.rounds)
    world.agents.kill(job.worker_on("b"), signal.SIGTERM)
    job.wait_round(n, ("a", "c"))
    job.finish()
    assert_as_undisturbed(job, *args)


def test_a_hung_worker_is_killed_and_replaced(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "MIN_TIMEOUT_S", 1.5)
    monkeypatch.setattr(supervisor, "MAX_TIMEOUT_S", 1.5)
    args = ("--epochs", "12")
    job = Job(world, "job", *args, *SLOW)
    job.runs_on("a", "b", "c")
    job.trains()
    n = len(job.rounds)
    victim = job.worker_on("b")
    world.agents.kill(victim, signal.SIGSTOP)
    job.wait_round(n, ("a", "c"))
    job.wait_round(n, ("a", "b", "c"))
    assert (victim, -9) in [(w, code) for w, code, _ in world.agents.exits]
    job.finish()
    assert_as_undisturbed(job, *args)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_chaos(world: World, seed: int) -> None:
    args = ("--epochs", "60", "--optimizer", "adamw")
    job = Job(world, "job", *args, "--sleep", "0.002", "--checkpoint", "0.3", max_restarts=1000)
    chance = random.Random(seed)
    job.runs_on("a", "b")
    deadline = time.monotonic() + 12
    while time.monotonic() < deadline and not job.over:
        match chance.randrange(4):
            case 0 if job.workers:
                world.agents.kill(chance.choice(job.workers))
            case 1 if len(job.workers) > 1:
                for worker in chance.sample(job.workers, chance.randint(1, len(job.workers))):
                    world.agents.kill(worker)
            case _:
                job.rescale(*chance.sample(NODES, chance.randint(0, 4)))
        time.sleep(chance.choice([0.01, 0.05, 0.2, 0.6]))
    if not job.over:
        job.rescale(*NODES)
    job.finish()
    assert_as_undisturbed(job, *args)
