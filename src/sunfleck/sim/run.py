"""Runs a simulation: the deployed controller and engine, a policy, a trace and a workload, on virtual time.

Two worlds to choose from, each a choice of adapters: `run_elastic` charges decision latency, stalls, starts, hand-back
and reclaims as they happen; `run_published` keeps the books of FreeTrain's published replay (see SimExecutor and
PublishedExecutor), where decisions fall at instants of the trace only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from sunfleck.cluster.base import Cluster
from sunfleck.core.controller import Controller, ControllerConfig
from sunfleck.core.events import AnyEvent, JobSubmitted, PlanReady, PoolStarted
from sunfleck.core.model import Cost, Costs, Plan, Snapshot
from sunfleck.engine import Engine, Observer
from sunfleck.policy.base import Policy

from .clock import Rank, VirtualClock
from .cluster import SimCluster
from .executor import SimExecutor, Tally
from .published import PublishedExecutor
from .trace import IdleTrace
from .workload import SimJob

Progress = Callable[[float], None]
"""Told the share of the trace that has been simulated, now and then."""


@dataclass(frozen=True, kw_only=True)
class World:
    """What the simulated world charges, beyond the jobs' own costs.

    decision_s: from the question to the plan (a fixed figure: the time measured on this machine would make results
    depend on it). grace_s: how long the cluster waits for a reclaimed node; None: it takes it without a word."""

    decision_s: float = 0.02
    grace_s: float | None = 5.0
    handback_s: float = 0.05
    checkpoint_s: float = 60.0
    seed: int = 0


@dataclass
class Outcome:
    """What a simulation leaves behind."""

    policy: str
    samples: dict[str, float]
    """By job, overshoot clipped."""
    tally: Tally
    plan_wall_s: list[float] = field(default_factory=list)
    """Time this machine took for each plan. The only figures that differ between equal runs."""
    n_plans: int = 0
    profiled_node_s: float = 0.0
    """Node-seconds held by a job while it was being profiled."""
    handbacks_s: list[float] = field(default_factory=list)
    n_forced: int = 0
    faults: list[str] = field(default_factory=list)
    wall_s: float = 0.0


class SimPlanner:
    """Answers after `decision_s`. A question that is out of date by then is not worked out, as its answer would be
    dropped; one asked and answered in the same instant is worked out after all else that happens at it."""

    def __init__(
        self, policy: Policy, controller: Controller, clock: VirtualClock, decision_s: float, reviews: bool
    ) -> None:
        self._policy = policy
        self._controller = controller
        self._clock = clock
        self._decision_s = decision_s
        self._reviews = reviews
        self.wall_s: list[float] = []
        self.profiled_node_s = 0.0
        self._profiling: tuple[float, int] | None = None

    def solve(self, snapshot: Snapshot) -> None:
        self._clock.at(self._clock.now() + self._decision_s, Rank.PLAN, lambda: self._answer(snapshot))

    def stop(self) -> None:
        self._book(None)

    def _answer(self, snapshot: Snapshot) -> None:
        if self._controller.state.generation != snapshot.generation:
            # The controller drops it for its generation and asks again.
            self._clock.put(PlanReady(generation=snapshot.generation, plan=Plan(jobs=()), solve_s=0.0))
            return
        began = time.perf_counter()
        plan = self._policy.plan(snapshot)
        self.wall_s.append(time.perf_counter() - began)
        if not self._reviews and plan.review_after_s is not None:
            plan = msgspec.structs.replace(plan, review_after_s=None)
        self._book(plan.profiling.n_nodes if plan.profiling is not None else None)
        self._clock.put(PlanReady(generation=snapshot.generation, plan=plan, solve_s=self._decision_s))

    def _book(self, n_nodes: int | None) -> None:
        now = self._clock.now()
        if self._profiling is not None:
            since, n = self._profiling
            self.profiled_node_s += (now - since) * n
        self._profiling = None if n_nodes is None else (now, n_nodes)


def run_elastic(
    trace: IdleTrace,
    jobs: Sequence[SimJob],
    policy: Policy,
    world: World | None = None,
    *,
    observers: Sequence[Observer] = (),
    progress: Progress | None = None,
    known_costs: bool = False,
) -> Outcome:
    """The default semantics: what happens, happens when it happens. `trace` begins at its begin_s; jobs are
    submitted relative to it. `known_costs`: the controller assumes the true costs of the first job from the start."""
    world = world or World()
    clock = VirtualClock(trace.begin_s)
    executor = SimExecutor(
        jobs,
        clock,
        clock.put,
        seed=world.seed,
        handback_s=world.handback_s,
        checkpoint_s=world.checkpoint_s,
    )
    cluster = SimCluster(trace, clock, clock.put, executor, grace_s=world.grace_s)
    for job in jobs:
        event = JobSubmitted(job=job.name, spec=job.spec)
        clock.at(trace.begin_s + job.submit_s, Rank.USER, lambda event=event: clock.put(event))  # type: ignore[misc]
    controller = Controller(ControllerConfig(costs=_assumed(jobs) if known_costs else Costs()))
    planner = SimPlanner(policy, controller, clock, world.decision_s, reviews=True)
    return _drive(trace, policy, clock, controller, planner, cluster, executor, observers, progress)


def run_published(
    trace: IdleTrace,
    jobs: Sequence[SimJob],
    policy: Policy,
    *,
    seed: int = 0,
    measured: bool = False,
    observers: Sequence[Observer] = (),
    progress: Progress | None = None,
) -> Outcome:
    """The published semantics: decisions, admissions and completions at instants of the trace only, at no delay.
    `measured`: jobs report their throughput at those instants, for policies that are not told the curves.

    Nodes get names in random order: the published optimiser takes any idle node, whereas a placement by real names
    keeps neighbours together, which come and go together, and gains half a percent by it."""
    order = np.random.default_rng(seed).permutation(len(trace.names))
    trace = replace(trace, names=tuple(f"n{i:05d}" for i in order))
    clock = VirtualClock(trace.begin_s)
    executor = PublishedExecutor(jobs, clock, clock.put, seed=seed, reports=measured)
    waiting = sorted(jobs, key=lambda job: job.submit_s)[::-1]

    def before() -> None:
        executor.instant()
        while waiting and trace.begin_s + waiting[-1].submit_s <= clock.now():
            job = waiting.pop()
            clock.put(JobSubmitted(job=job.name, spec=job.spec))

    cluster = SimCluster(trace, clock, clock.put, executor, grace_s=None, before=before)
    controller = Controller(ControllerConfig(costs=_assumed(jobs)))
    planner = SimPlanner(policy, controller, clock, 0.0, reviews=False)
    return _drive(trace, policy, clock, controller, planner, cluster, executor, observers, progress)


def _drive(
    trace: IdleTrace,
    policy: Policy,
    clock: VirtualClock,
    controller: Controller,
    planner: SimPlanner,
    cluster: SimCluster,
    executor: SimExecutor,
    observers: Sequence[Observer],
    progress: Progress | None,
) -> Outcome:
    began = time.perf_counter()
    as_cluster: Cluster = cluster
    engine = Engine(controller, clock, planner, as_cluster, executor, observers)
    started: AnyEvent = PoolStarted(pool="simulation", version="")
    clock.put(started)
    # Instants at the very end of the trace belong to it no more: nothing could follow from them.
    clock.at(trace.end_s, Rank.TRAINING, engine.interrupt)
    if progress is not None:
        tell = progress
        for i in range(1, 200):
            share = i / 200
            at_s = trace.begin_s + share * trace.span_s
            clock.at(at_s, Rank.USER, lambda share=share: tell(share))  # type: ignore[misc]
    cluster.start()
    engine.run()
    executor.stop()
    planner.stop()
    return Outcome(
        policy=policy.name,
        samples=executor.sample_counts(),
        tally=executor.tally,
        plan_wall_s=planner.wall_s,
        n_plans=len(planner.wall_s),
        profiled_node_s=planner.profiled_node_s,
        handbacks_s=cluster.handbacks_s,
        n_forced=cluster.n_forced,
        faults=list(engine.faults),
        wall_s=time.perf_counter() - began,
    )


def _assumed(jobs: Sequence[SimJob]) -> Costs:
    costs = jobs[0].costs
    return Costs(
        start_s=Cost(value_s=costs.start_s),
        rescale_up_s=Cost(value_s=costs.rescale_up_s),
        rescale_down_s=Cost(value_s=costs.rescale_down_s),
        preempt_s=Cost(value_s=costs.preempt_s),
    )
