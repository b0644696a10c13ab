"""Random worlds: whatever happens in whatever order, no invariant breaks, and when it calms down every job trains."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from sunfleck.core import events as e
from sunfleck.core.model import JobPhase
from tests.fakes.world import World

NODES = [f"n{i}" for i in range(6)]


class Chaos(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.world = World()
        self.n_jobs = 0

    @rule(names=st.sets(st.sampled_from(NODES), min_size=1))
    def join(self, names):
        fresh = sorted(names - self.world.alive)
        if fresh:
            self.world.join(*fresh)

    @rule(names=st.sets(st.sampled_from(NODES), min_size=1))
    def reclaim(self, names):
        self.world.reclaim(*sorted(names))

    @rule(names=st.sets(st.sampled_from(NODES), min_size=1))
    def lose(self, names):
        self.world.lose(*sorted(names & self.world.alive))

    @rule(low=st.integers(1, 3), more=st.integers(0, 4), multiple=st.integers(1, 2))
    def submit(self, low, more, multiple):
        if self.n_jobs < 5:
            self.n_jobs += 1
            self.world.submit(f"j{self.n_jobs}", low, low + more, multiple)

    @rule(data=st.data())
    @precondition(lambda self: self.world.pending)
    def deliver(self, data):
        """Answers of one job come in order (as the executor promises); those of different jobs in any order."""
        firsts: dict[object, int] = {}
        for i, event in enumerate(self.world.pending):
            firsts.setdefault(getattr(event, "job", type(event)), i)
        self.world.deliver(data.draw(st.sampled_from(sorted(firsts.values()))))

    @rule(data=st.data())
    @precondition(lambda self: self.world.state.jobs)
    def cancel_finish_or_crash(self, data):
        job = data.draw(st.sampled_from(sorted(self.world.state.jobs)))
        kind = data.draw(st.sampled_from(["cancel", "finish", "crash"]))
        if kind == "cancel":
            self.world.send(e.JobCancelRequested(job=job))
        elif self.world.running.get(job):
            self.world.running[job] = frozenset()
            self.world.pending = [p for p in self.world.pending if getattr(p, "job", None) != job]
            done = e.JobFinished(job=job) if kind == "finish" else e.JobCrashed(job=job, error="boom")
            self.world.send(done)

    @rule(job=st.integers(1, 5))
    def worker_dies(self, job):
        name = f"j{job}"
        nodes = self.world.running.get(name, frozenset())
        if nodes and not self.world.pending:
            victim = sorted(nodes)[0]
            self.world.send(e.WorkersLeft(job=name, nodes=(victim,), planned=False))
            requested = self.world.state.jobs[name].requested
            if requested and victim in requested:  # the executor restarts it by itself
                self.world.rescale(name, frozenset(requested))

    @rule()
    def time_passes(self):
        self.world.now += 3.0
        self.world.send(e.TimeReached())

    @rule()
    @precondition(lambda self: not self.world.pending)
    def controller_dies(self):
        self.world.restart()
        self.world.rejoin()

    def teardown(self):
        world = self.world
        world.settle()
        world.now += 100
        world.send(e.TimeReached())
        world.settle()
        waiting = [j for j in world.state.active_jobs if j.phase is not JobPhase.RUNNING]
        free = [n for n, node in world.state.nodes.items() if node.job is None]
        share = len(world.state.nodes) // max(1, len(world.state.active_jobs))
        for job in waiting:
            assert job.spec.min_nodes > min(max(1, share), len(free)), (
                f"{job.job} is {job.phase} ({job.reason}) while {free} are free"
            )
        for job in world.state.active_jobs:
            assert job.observed == (job.requested or frozenset()), f"{job.job} never came to rest"
            assert job.observed == world.running.get(job.job, frozenset())


TestChaos = Chaos.TestCase
TestChaos.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
