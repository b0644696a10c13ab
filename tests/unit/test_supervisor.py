"""Instructions become messages, messages become events: the supervisor over agents that only take notes."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sunfleck.core.events import (
    AnyEvent,
    CheckpointSaved,
    DatasetDescribed,
    JobCrashed,
    JobStopped,
    Progress,
    RoundFormed,
    SamplesCommitted,
    WorkersLeft,
)
from sunfleck.core.model import JobSpec, NodeSpec, Program
from sunfleck.executor.elastic.supervisor import Supervisor
from sunfleck.executor.launch.wire import (
    PROTOCOL,
    Announce,
    CheckpointWritten,
    FormRound,
    FromWorker,
    Hello,
    Left,
    PeerLost,
    Ready,
    RoundJoined,
    Span,
    StartWorker,
    Status,
    StepReport,
    StopWorker,
    StoreReady,
    ToWorker,
    WorkerExited,
    WorkerId,
)

SPEC = JobSpec(name="train", max_nodes=4, program=Program(script="train.py", warm=("torch", "numpy")))


class Notes:
    """Agents that do nothing by themselves; time passes when told."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Any]] = []
        self.time = 100.0
        self.timers: list[Alarm] = []

    def subscribe(self, listener: Any) -> None: ...

    def post(self, action: Callable[[], None]) -> None:
        action()

    def send(self, node: str, message: Any) -> None:
        self.sent.append((node, message))

    def call_later(self, delay_s: float, action: Callable[[], None]) -> Alarm:
        alarm = Alarm(self.time + delay_s, action)
        self.timers.append(alarm)
        return alarm

    def now(self) -> float:
        return self.time

    def take(self, kind: type) -> list[tuple[str, Any]]:
        """Messages of a kind since last asked; payloads of ToWorker count as messages."""
        found, rest = [], []
        for node, message in self.sent:
            inner = message.payload if isinstance(message, ToWorker) else message
            (found if isinstance(inner, kind) else rest).append((node, inner))
        self.sent = [
            (n, m) for n, m in self.sent if (m.payload if isinstance(m, ToWorker) else m) not in [f[1] for f in found]
        ]
        return found


class Alarm:
    def __init__(self, at: float, action: Callable[[], None]) -> None:
        self.at, self.action, self.cancelled = at, action, False

    def cancel(self) -> None:
        self.cancelled = True


class World:
    def __init__(self, folder: Path, *nodes: str) -> None:
        self.notes = Notes()
        self.events: list[AnyEvent] = []
        self.folder = folder
        self.box = Supervisor(self.notes, self.events.append, folder)
        for node in nodes:
            self.hello(node)

    def hello(self, node: str, *workers: WorkerId) -> None:
        self.box.on_agent_joined(
            Hello(protocol=PROTOCOL, node=NodeSpec(name=node, cpus=0.5), agent_pid=1, workers=workers)
        )

    def say(self, worker: WorkerId, payload: Any) -> None:
        self.box.on_agent_message(worker.node, FromWorker(worker=worker, payload=payload))

    def exit(self, worker: WorkerId, code: int, lines: str = "") -> None:
        self.box.on_agent_message(worker.node, WorkerExited(worker=worker, code=code, last_lines=lines))

    def store_up(self, node: str, port: int = 7000) -> None:
        self.say(WorkerId(job="store", node=node, restart=0), StoreReady(port=port))

    def of(self, kind: type) -> list[Any]:
        return [e for e in self.events if isinstance(e, kind)]


def worker(node: str, restart: int = 0) -> WorkerId:
    return WorkerId(job="j", node=node, restart=restart)


READY = Ready(round=-1, step=0, checkpoint_step=None, n_samples=50, epoch_hash=9, batch=10)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, "a", "b")


def train(world: World, *nodes: str) -> FormRound:
    world.box.rescale("j", SPEC, nodes, 5.0)
    for node in nodes:
        world.store_up(node)
        world.say(worker(node), READY)
    form: FormRound = world.notes.take(FormRound)[-1][1]
    for node in nodes:
        world.say(worker(node), RoundJoined(round=form.round, step=0, stall_s=None))
    return form


def test_a_worker_is_started_with_its_place_in_the_environment(world: World) -> None:
    world.box.rescale("j", SPEC, ("a",), 5.0)
    ((node, start),) = world.notes.take(StartWorker)
    assert node == "a"
    assert start.worker == worker("a")
    assert start.program.script == "train.py"
    assert start.program.warm == ("torch", "numpy", "sunfleck.elastic")
    assert start.limited
    assert start.env["SUNFLECK_WORKER"] == "j@a#0"
    assert start.env["SUNFLECK_NODE_CPUS"] == "0.5"
    assert start.env["SUNFLECK_JOB_DIR"] == str(world.folder / "j")
    assert Path(start.log_path).parent.is_dir()


def test_stores_run_beside_and_do_not_count(world: World) -> None:
    world.box.rescale("j", SPEC, ("a", "b"), 5.0)
    stores = [m for _, m in world.notes.take(StartWorker) if m.worker.job == "store"]
    assert [s.worker.node for s in stores] == ["a", "b"]
    assert not any(s.limited for s in stores)
    assert stores[0].program.warm == ("torch", "numpy", "sunfleck.elastic")  # one zygote for both


def test_a_round_of_several_waits_for_a_store(world: World) -> None:
    world.box.rescale("j", SPEC, ("a", "b"), 5.0)
    world.say(worker("a"), READY)
    world.say(worker("b"), READY)
    assert not world.notes.take(FormRound)
    world.store_up("b", 7001)
    sent = world.notes.take(FormRound)
    assert [node for node, _ in sent] == ["a", "b"]
    assert (sent[0][1].store_host, sent[0][1].store_port) == ("localhost", 7001)
    assert sent[0][1].members == ("j@a#0", "j@b#0")


def test_a_round_of_one_needs_none(world: World) -> None:
    world.box.rescale("j", SPEC, ("a",), 5.0)
    world.say(worker("a"), READY)
    assert world.notes.take(FormRound)[0][1].store_port == 0


def test_events_of_a_training_job(world: World) -> None:
    train(world, "a", "b")
    span = Span(epoch=0, step_from=0, step_to=2, cursor_from=0, cursor_to=20, n_samples=20, index_hash=77)
    report = StepReport(
        round=0, world=2, step=2, epoch=0, samples=20, dt_s=0.3, samples_per_s=66.0, step_s=0.15,
        metrics={"loss": 1.5}, spans=(span,),
    )  # fmt: skip
    world.say(worker("a"), report)
    world.say(worker("a"), CheckpointWritten(step=2, path="p"))
    assert world.of(DatasetDescribed) == [DatasetDescribed(job="j", n_samples=50, epoch_hash=9, batch=10)]
    (formed,) = world.of(RoundFormed)
    assert (formed.nodes, formed.cause) == (("a", "b"), "start")
    (progress,) = world.of(Progress)
    assert (progress.n_nodes, progress.samples_per_s, progress.metrics) == (2, 66.0, {"loss": 1.5})
    (committed,) = world.of(SamplesCommitted)
    assert (committed.round, committed.step_to, committed.index_hash) == (0, 2, 77)
    assert world.of(CheckpointSaved) == [CheckpointSaved(job="j", step=2, path="p")]


def test_a_ledger_said_again_is_no_progress(world: World) -> None:
    train(world, "a")
    span = Span(epoch=0, step_from=0, step_to=2, cursor_from=0, cursor_to=20, n_samples=20, index_hash=77)
    again = StepReport(
        round=0,
        world=1,
        step=2,
        epoch=0,
        samples=20,
        dt_s=0.0,
        samples_per_s=None,
        step_s=0.0,
        metrics={},
        spans=(span,),
    )
    world.say(worker("a"), again)
    assert len(world.of(SamplesCommitted)) == 1
    assert not world.of(Progress)


def test_timers_follow_the_memberships_deadlines(world: World) -> None:
    train(world, "a", "b")
    world.box.rescale("j", SPEC, ("a",), 2.0)
    alarm = [t for t in world.notes.timers if not t.cancelled][-1]
    assert alarm.at == pytest.approx(102.0)
    world.notes.time = alarm.at
    alarm.action()
    assert [m.worker for _, m in world.notes.take(StopWorker)] == [worker("b")]


def test_a_lost_agent_takes_its_workers_along(world: World) -> None:
    train(world, "a", "b")
    world.box.on_agent_lost("a", "no heartbeat")
    assert world.of(WorkersLeft)[-1].nodes == ("a",)
    sent = world.notes.take(FormRound)
    assert [(node, m.members) for node, m in sent] == [("b", ("j@b#0",))]


def test_a_worker_its_agent_has_forgotten_is_dead(world: World) -> None:
    train(world, "a", "b")
    world.hello("b", WorkerId(job="store", node="b", restart=0))
    assert world.of(WorkersLeft)[-1].nodes == ("b",)
    assert world.notes.take(FormRound)[0][1].members == ("j@a#0",)


def test_a_store_that_does_not_answer_is_replaced(world: World) -> None:
    form = train(world, "a", "b")
    world.notes.take(StartWorker)
    error = f"the store at {form.store_host}:{form.store_port} does not answer: refused"
    world.say(worker("a"), PeerLost(round=form.round, step=0, error=error))
    assert [m.worker.job for _, m in world.notes.take(StopWorker)] == ["store", "store"]


def test_round_numbers_outlive_the_controller(world: World, tmp_path: Path) -> None:
    train(world, "a", "b")
    world.box.rescale("j", SPEC, (), 5.0)
    for node in ("a", "b"):
        world.say(worker(node), Left(round=1, step=3))
        world.exit(worker(node), 0)
    later = World(tmp_path, "a")
    later.box.rescale("j", SPEC, ("a",), 5.0)
    later.say(worker("a"), READY)
    assert later.notes.take(FormRound)[0][1].round == 2


def test_a_full_disk_keeps_no_round_from_being_formed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, text: str, **_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    train(world, "a", "b")
    monkeypatch.setattr(Path, "write_text", full)
    world.exit(worker("b"), -9)
    form: FormRound = world.notes.take(FormRound)[-1][1]
    assert form.members == ("j@a#0",)
    assert (world.folder / "j" / "round").read_text() == str(form.round)
    assert not list((world.folder / "j").glob(".round*"))


def test_a_new_controller_asks_what_it_finds(tmp_path: Path) -> None:
    world = World(tmp_path)
    store = WorkerId(job="store", node="a", restart=3)
    world.hello("a", store, worker("a", 2))
    assert [m for _, m in world.notes.take(Announce)] == [Announce()]  # the store; the job is not known yet
    world.box.rescale("j", SPEC, ("a",), 5.0)
    assert len(world.notes.take(Announce)) == 1
    assert not world.notes.take(StartWorker)
    world.say(worker("a", 2), Status(round=5, members=("j@a#2",), step=40))
    (formed,) = world.of(RoundFormed)
    assert (formed.round, formed.step) == (5, 40)
    assert not world.notes.take(FormRound)


def test_stopping_a_job_this_controller_never_started(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.hello("a", worker("a"))
    world.box.stop_job("j", 5.0, False)
    assert [m.worker for _, m in world.notes.take(StopWorker)] == [worker("a")]
    world.exit(worker("a"), -9)
    assert world.of(JobStopped) == [JobStopped(job="j")]


def test_stopping_a_job_without_workers_is_answered_at_once(world: World) -> None:
    world.box.stop_job("j", 5.0, True)
    assert world.of(JobStopped) == [JobStopped(job="j")]


def test_a_crash_names_the_worker_its_last_lines_and_the_logs(world: World) -> None:
    world.box.rescale("j", SPEC, ("a",), 5.0)
    world.exit(worker("a"), 1, "ModuleNotFoundError: No module named 'nothing'")
    (crash,) = world.of(JobCrashed)
    assert "j@a#0" in crash.error
    assert "ModuleNotFoundError" in crash.error
    assert str(world.folder / "j" / "logs") in crash.error


def test_stop_kills_everything_and_starts_nothing_again(world: World) -> None:
    train(world, "a", "b")
    quiet: list[bool] = []
    world.box.stop(lambda: quiet.append(True))
    stopped = {m.worker for _, m in world.notes.take(StopWorker)}
    assert stopped >= {worker("a"), worker("b")}
    world.notes.take(StartWorker)
    for one in sorted(stopped, key=str):
        world.exit(one, -9)
    assert quiet == [True]
    assert not world.notes.take(StartWorker)
