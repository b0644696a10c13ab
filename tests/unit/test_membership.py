"""The membership machine: five-line stories, and random ones whose invariants are checked after every stimulus."""

from __future__ import annotations

import dataclasses
import random
from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from sunfleck.core.events import JobCrashed, JobFinished, JobStopped, RoundFormed, WorkersLeft
from sunfleck.core.model import JobSpec
from sunfleck.executor.elastic import roster as m
from sunfleck.executor.elastic.membership import Membership
from sunfleck.executor.launch.wire import WorkerId


class World:
    """A job's workers, played by hand: instructions are applied, what workers would answer is said when asked for."""

    def __init__(self, **spec: int) -> None:
        self.spec = JobSpec(name="j", max_nodes=8, **spec)
        self.box = Membership("j", self.spec)
        self.now = 0.0
        self.living: dict[WorkerId, int] = {}
        """Workers and the round they train in (-1: none)."""
        self.told: dict[WorkerId, m.Form] = {}
        self.doomed: set[WorkerId] = set()
        self.log: list[m.Instruction] = []

    def take(self, instructions: list[m.Instruction]) -> list[m.Instruction]:
        for one in instructions:
            match one:
                case m.Start(worker=w):
                    assert all(x.node != w.node for x in self.living), "two workers of a job on one node"
                    self.living[w] = -1
                case m.Form():
                    for w in one.to:
                        self.told[w] = one
                case m.Kill(worker=w) | m.End(worker=w):
                    self.doomed.add(w)
        self.log += instructions
        return instructions

    def rescale(self, *nodes: str, grace_s: float = 5.0) -> list[m.Instruction]:
        return self.take(self.box.rescale(self.spec, nodes, grace_s, self.now))

    def at(self, node: str) -> WorkerId:
        return next(w for w in self.living if w.node == node)

    def ready(self, *nodes: str) -> list[m.Instruction]:
        return [i for n in nodes for i in self.take(self.box.ready(self.at(n), -1, 0, self.now))]

    def join(self, *nodes: str, stall_s: float | None = None) -> list[m.Instruction]:
        out = []
        for node in nodes:
            w = self.at(node)
            self.living[w] = self.told[w].round
            out += self.take(self.box.joined(w, self.told[w].round, 7, stall_s, self.now))
        return out

    def exit(self, node: str, code: int = 0, left: bool = False) -> list[m.Instruction]:
        w = self.at(node)
        del self.living[w]
        self.doomed.discard(w)
        out = self.take(self.box.left(w, self.now)) if left else []
        return out + self.take(self.box.exited(w, code, "last words", self.now))

    def wait(self, seconds: float) -> list[m.Instruction]:
        self.now += seconds
        return self.take(self.box.tick(self.now))

    def train(self, *nodes: str) -> None:
        """Bring the job to training on these nodes."""
        self.rescale(*nodes)
        self.ready(*nodes)
        self.join(*nodes)


def forms(instructions: list[m.Instruction]) -> list[m.Form]:
    return [i for i in instructions if isinstance(i, m.Form)]


def members(form: m.Form) -> list[str]:
    return [w.node for w in form.members]


def events(instructions: list[m.Instruction], kind: type) -> list:
    return [i.event for i in instructions if isinstance(i, m.Emit) and isinstance(i.event, kind)]


def test_a_job_starts_when_its_workers_are_ready() -> None:
    w = World()
    out = w.rescale("a", "b")
    assert [i.worker.node for i in out if isinstance(i, m.Start)] == ["a", "b"]
    assert not forms(w.ready("a"))
    assert "waiting up to" in w.box.reason
    (form,) = forms(w.ready("b"))
    assert members(form) == ["a", "b"]
    w.now = 2.0
    w.join("a")
    (formed,) = events(w.join("b"), RoundFormed)
    assert (formed.cause, formed.took_s, formed.stall_s, formed.step) == ("start", 2.0, None, 7)


def test_a_late_newcomer_does_not_hold_up_the_others() -> None:
    w = World()
    w.rescale("a", "b")
    w.ready("a")
    assert w.box.next_deadline() == m.GATHER_S
    (form,) = forms(w.wait(m.GATHER_S))
    assert members(form) == ["a"]
    w.join("a")
    (form,) = forms(w.ready("b"))
    assert members(form) == ["a", "b"]
    (formed,) = events(w.join("a", "b", stall_s=0.01), RoundFormed)
    assert (formed.cause, formed.stall_s) == ("rescale", 0.01)


def test_newcomers_are_gathered_so_that_survivors_stop_once() -> None:
    w = World()
    w.train("a")
    w.rescale("a", "b", "c", "d")
    assert not forms(w.ready("b"))
    assert not forms(w.ready("c"))
    (form,) = forms(w.ready("d"))
    assert members(form) == ["a", "b", "c", "d"]


def test_members_that_stay_keep_their_order_and_come_first() -> None:
    w = World()
    w.train("c", "a")
    w.rescale("a", "b", "c")
    (form,) = forms(w.ready("b"))
    assert members(form) == ["c", "a", "b"]


def test_a_shrink_is_immediate_and_tells_those_who_leave() -> None:
    w = World()
    w.train("a", "b", "c")
    (form,) = forms(w.rescale("c"))
    assert members(form) == ["c"]
    assert {x.node for x in form.to} == {"a", "b", "c"}
    (left,) = events(w.exit("a", left=True), WorkersLeft)
    assert left.planned
    assert not events(w.join("c", stall_s=0.1), JobFinished)
    assert not events(w.exit("b", left=True), JobFinished)


def test_a_worker_that_does_not_leave_in_time_is_killed() -> None:
    w = World()
    w.train("a", "b")
    w.rescale("a", grace_s=3.0)
    assert w.box.next_deadline() == 3.0
    assert [i.worker.node for i in w.wait(3.0) if isinstance(i, m.Kill)] == ["b"]
    assert events(w.exit("b", -9), WorkersLeft)[0].planned


def test_a_booting_worker_that_is_not_wanted_any_more_is_killed_at_once() -> None:
    w = World()
    w.train("a")
    w.rescale("a", "b")
    out = w.rescale("a")
    assert [i.worker.node for i in out if isinstance(i, m.Kill)] == ["b"]
    assert not forms(out)
    assert not w.wait(m.KILL_AGAIN_S / 2)
    assert [i.worker.node for i in w.wait(m.KILL_AGAIN_S) if isinstance(i, m.Kill)] == ["b"]
    w.exit("b", -9)
    assert not w.wait(m.KILL_AGAIN_S)


def test_a_death_is_answered_at_once_and_the_worker_replaced() -> None:
    w = World()
    w.train("a", "b", "c")
    out = w.exit("a", -9)
    (form,) = forms(out)
    assert members(form) == ["b", "c"]
    assert [i.worker for i in out if isinstance(i, m.Start)] == [WorkerId(job="j", node="a", restart=1)]
    assert not events(out, WorkersLeft)[0].planned
    (formed,) = events(w.join("b", "c", stall_s=0.05), RoundFormed)
    assert formed.cause == "loss"
    (form,) = forms(w.ready("a"))
    assert members(form) == ["b", "c", "a"]


def test_a_failed_collective_waits_for_news_of_the_death() -> None:
    w = World()
    w.train("a", "b", "c")
    assert not forms(w.take(w.box.peer_lost(w.at("a"), 0, 9, w.now)))
    (form,) = forms(w.exit("c", -9))
    assert members(form) == ["a", "b"]


def test_a_failed_collective_without_a_death_forms_the_round_again() -> None:
    w = World()
    w.train("a", "b")
    w.take(w.box.peer_lost(w.at("a"), 0, 9, w.now))
    (form,) = forms(w.wait(m.LOSS_PATIENCE_S))
    assert members(form) == ["a", "b"]
    assert form.round == 1


def test_a_hung_member_is_killed_when_the_others_have_said_that_they_wait() -> None:
    w = World()
    w.train("a", "b", "c")
    w.now = 1.0
    for node in ("a", "b"):
        w.take(w.box.peer_lost(w.at(node), 0, 9, w.now))
    w.wait(m.LOSS_PATIENCE_S)
    assert [i.worker.node for i in w.wait(m.SILENCE_S / 2) if isinstance(i, m.Kill)] == ["c"]
    (form,) = forms(w.exit("c", -9))
    assert members(form) == ["a", "b"]


def test_a_death_while_a_round_is_formed_supersedes_it() -> None:
    w = World()
    w.train("a", "b")
    w.rescale("a", "b", "c")
    w.ready("c")
    w.join("c")
    (form,) = forms(w.exit("c", -9))
    assert (members(form), form.round) == (["a", "b"], 2)


def test_one_proposal_at_a_time_newcomers_wait() -> None:
    w = World()
    w.train("a")
    w.rescale("a", "b")
    w.ready("b")
    w.rescale("a", "b", "c")
    assert not forms(w.ready("c"))
    (form,) = forms(w.join("a", "b", stall_s=0.0))
    assert members(form) == ["a", "b", "c"]


def test_grow_and_shrink_at_once() -> None:
    w = World()
    w.train("a", "b")
    w.rescale("b", "c")  # c is not there yet: shrink first
    assert members(forms(w.log)[-1]) == ["b"]
    w.join("b", stall_s=0.0)
    w.exit("a", left=True)
    (form,) = forms(w.ready("c"))
    assert members(form) == ["b", "c"]


def test_without_survivors_the_old_save_before_the_new_load() -> None:
    w = World()
    w.train("a")
    out = w.rescale("b")
    (form,) = forms(out)
    assert members(form) == []
    assert not forms(w.ready("b"))
    assert "save the state" in w.box.reason
    (form,) = forms(w.exit("a", left=True))
    assert members(form) == ["b"]


def test_pause_and_resume() -> None:
    w = World()
    w.train("a", "b")
    (form,) = forms(w.rescale())
    assert members(form) == []
    w.exit("a", left=True)
    w.exit("b", left=True)
    w.train("c")
    assert events(w.log, RoundFormed)[-1].cause == "start"
    assert [f.round for f in forms(w.log)] == [0, 1, 2]


def test_nodes_without_a_worker_are_vacated_at_once() -> None:
    w = World()
    w.rescale("a", "b")
    w.exit("b", -9)
    w.rescale("b")
    w.box.workers.clear()
    w.living.clear()
    out = w.rescale()
    assert events(out, WorkersLeft)[0].nodes == ("b",)


def test_all_dead_start_again_together() -> None:
    w = World()
    w.train("a", "b")
    w.exit("a", -9)
    w.exit("b", -9)
    w.wait(1.0)
    assert not forms(w.ready("a"))
    (form,) = forms(w.ready("b"))
    assert members(form) == ["a", "b"]
    assert events(w.join("a", "b"), RoundFormed)[0].cause == "loss"


def test_min_nodes_and_multiple_are_kept() -> None:
    w = World(min_nodes=2, multiple=2)
    w.train("a", "b", "c", "d")
    (form,) = forms(w.exit("d", -9))
    assert members(form) == ["a", "b"]
    assert {x.node for x in form.to} == {"a", "b", "c"}
    w.join("a", "b", stall_s=0.0)
    w.exit("a", -9)
    out = w.exit("b", -9)
    assert not [f for f in forms(out) if f.members]


def test_a_script_error_before_the_first_epoch_fails_the_job() -> None:
    w = World()
    w.rescale("a", "b")
    out = w.exit("a", 1)
    assert [i.worker.node for i in out if isinstance(i, m.Kill)] == ["b"]
    (crash,) = events(w.exit("b", -9), JobCrashed)
    assert "j@a#0 ended with status 1 before it reached its first epoch\nlast words" in crash.error


def test_raised_is_told_first() -> None:
    w = World()
    w.train("a")
    w.take(w.box.raised(w.at("a"), "ValueError: no", w.now))
    (crash,) = events(w.exit("a", 1), JobCrashed)
    assert crash.error.splitlines()[0] == "worker j@a#0: ValueError: no"


def test_deaths_without_progress_end_the_job_and_progress_forgives() -> None:
    w = World(max_restarts=2)
    w.train("a")
    for step in range(5):
        w.exit("a", -9)
        w.wait(5.0)
        w.ready("a")
        w.join("a")
        w.take(w.box.committed(step + 1, 0.1))
    for _ in range(3):
        out = w.exit("a", -9)
        w.wait(5.0)
    (crash,) = events(out, JobCrashed)
    assert "died 3 times" in crash.error


def test_finished_when_the_last_worker_is_gone() -> None:
    w = World()
    w.train("a", "b")
    assert not events(w.exit("a", 0), JobFinished)
    assert events(w.exit("b", 0), JobFinished)


def test_after_the_first_has_finished_the_others_have_a_short_time() -> None:
    w = World()
    w.train("a", "b")
    w.exit("a", 0)
    assert [i.worker.node for i in w.wait(m.DONE_GRACE_S) if isinstance(i, m.Kill)] == ["b"]
    assert events(w.exit("b", -9), JobFinished)


def test_stop_with_and_without_saving() -> None:
    w = World()
    w.train("a", "b")
    (form,) = forms(w.take(w.box.stop(True, 5.0, w.now)))
    assert members(form) == []
    w.exit("a", left=True)
    assert events(w.exit("b", left=True), JobStopped)
    w = World()
    w.train("a")
    out = w.take(w.box.stop(False, 5.0, w.now))
    assert any(isinstance(i, m.Kill) for i in out)
    assert events(w.exit("a", -9), JobStopped)


def test_stopping_a_job_that_lost_its_round_saves_the_newest_state_once() -> None:
    w = World()
    w.train("a", "b", "c")
    w.take(w.box.peer_lost(w.at("a"), 0, 8, w.now))
    w.take(w.box.peer_lost(w.at("b"), 0, 9, w.now))
    w.living.pop(w.at("c"))
    w.box.workers.pop("j@c#0")
    out = w.take(w.box.stop(True, 5.0, w.now))
    assert {(i.worker.node, i.save) for i in out if isinstance(i, m.End)} == {("a", False), ("b", True)}


def test_a_new_controller_adopts_a_round() -> None:
    w = World()
    a, b = (WorkerId(job="j", node=n, restart=4) for n in "ab")
    w.living = {a: 6, b: 6}
    assert w.take(w.box.found(a, 0.0)) == [m.Ask(a)]
    w.take(w.box.found(b, 0.0))
    assert not w.rescale("a", "b")
    w.take(w.box.status(a, 6, ("j@a#4", "j@b#4"), 50, 0.0))
    out = w.take(w.box.status(b, 6, ("j@a#4", "j@b#4"), 50, 0.0))
    (formed,) = events(out, RoundFormed)
    assert (formed.round, formed.nodes) == (6, ("a", "b"))
    assert not forms(w.log)
    w.rescale("a", "b", "c")
    (form,) = forms(w.ready("c"))
    assert form.round == 7


def test_a_new_controller_finds_a_member_missing() -> None:
    w = World()
    a = WorkerId(job="j", node="a", restart=0)
    w.living = {a: 6}
    w.take(w.box.found(a, 0.0))
    w.rescale("a", "b")
    (form,) = forms(w.take(w.box.status(a, 6, ("j@a#0", "j@b#0"), 50, 0.0)))
    assert (members(form), form.round) == (["a"], 7)


def test_a_found_worker_that_stays_silent_is_taken_as_booting() -> None:
    w = World()
    a = WorkerId(job="j", node="a", restart=0)
    w.living = {a: -1}
    w.take(w.box.found(a, 0.0))
    w.rescale("a")
    assert not forms(w.wait(m.UNKNOWN_S))
    (form,) = forms(w.ready("a"))
    assert members(form) == ["a"]


# -- random stories ----------------------------------------------------------------------------------------------------

NODES = tuple("abcdef")


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), n_steps=st.integers(1, 120), min_nodes=st.sampled_from([1, 1, 1, 2, 3]))
def test_any_story_ends_where_it_should(seed: int, n_steps: int, min_nodes: int) -> None:
    chance = random.Random(seed)
    w = World(min_nodes=min_nodes, max_restarts=10_000)
    target: tuple[str, ...] = ()
    for _ in range(n_steps):
        move(w, chance)
        if chance.random() < 0.2:
            n = chance.choice([0, *range(min_nodes, len(NODES) + 1)])
            target = tuple(chance.sample(NODES, n))
            w.rescale(*target)
        check(w, target)
    # Left in peace, it must come to train on exactly the target.
    for _ in range(200):
        settle(w)
        w.wait(0.3)
        check(w, target)
        if trains_on(w, target):
            break
    else:
        raise AssertionError(f"never reached {target}: {w.living}, {w.box.reason}")


def trains_on(w: World, target: tuple[str, ...]) -> bool:
    """Exactly one worker on each node of the target, all in one round, and the machine knows it."""
    if {x.node for x in w.living} != set(target) or len(w.living) != len(target):
        return False
    formed = w.box.proposal is not None and w.box.proposal.formed
    return not target or (formed and set(w.living.values()) == {w.box.round})


def move(w: World, chance: random.Random) -> None:
    """One thing happens somewhere."""
    w.now += chance.choice([0.0, 0.01, 0.2, 1.0])
    what = chance.randrange(6)
    workers = sorted(w.living, key=str)
    if what == 0 or not workers:
        w.take(w.box.tick(w.now))
        return
    worker = chance.choice(workers)
    if what == 1:
        die(w, worker)
    elif what == 2 and w.living[worker] >= 0:
        number = w.living[worker]
        w.living[worker] = -2  # waits, holding its state
        w.take(w.box.peer_lost(worker, number, 1, w.now))
    else:
        answer(w, worker)


def die(w: World, worker: WorkerId) -> None:
    del w.living[worker]
    w.doomed.discard(worker)
    w.take(w.box.exited(worker, -9, "", w.now))


def answer(w: World, worker: WorkerId) -> None:
    """The worker does what it has been told, as a real one would."""
    if worker in w.doomed:
        die(w, worker)
    elif worker not in w.told:
        w.take(w.box.ready(worker, -1, 0, w.now))
    else:
        form = w.told[worker]
        if worker not in form.members:
            del w.living[worker]
            w.take(w.box.left(worker, w.now))
            w.take(w.box.exited(worker, 0, "", w.now))
        elif w.living[worker] < form.round and all(x in w.living for x in form.members):
            w.living[worker] = form.round
            w.take(w.box.joined(worker, form.round, 1, None, w.now))


def settle(w: World) -> None:
    for worker in sorted(w.living, key=str):
        if worker in w.living:
            answer(w, worker)


def check(w: World, target: tuple[str, ...]) -> None:
    """Invariants that hold after every stimulus."""
    per_node: dict[str, int] = defaultdict(int)
    for worker in w.living:
        per_node[worker.node] += 1
    assert all(n == 1 for n in per_node.values())
    assert set(w.box.workers) == {str(x) for x in w.living}
    numbers = [f.round for f in forms(w.log)]
    assert numbers == sorted(set(numbers)), "round numbers only go up"
    for form in forms(w.log[-20:]):
        assert len(form.members) in (0, *w.spec.sizes(8))
        assert set(form.members) <= set(form.to)
        assert len({x.node for x in form.members}) == len(form.members)
    for worker in w.box.workers.values():
        if worker.id.node not in target:
            assert worker.phase is m.Phase.LEAVING, (worker, target, w.box.reason)
    assert dataclasses.is_dataclass(w.box.proposal) or w.box.proposal is None
    assert w.box.reason
