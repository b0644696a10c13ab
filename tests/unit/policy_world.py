"""A small world for policies: nodes, jobs with true curves, and what a controller would let a policy know of them.

It obeys plans at once (after the job's cost), measures with seeded noise, and checks every plan's promises.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import strategies as st

from sunfleck.core.model import (
    Cost,
    Costs,
    JobSpec,
    JobView,
    NodeView,
    Plan,
    PoolHistory,
    Profiling,
    ScaleStats,
    Snapshot,
)
from sunfleck.policy.base import Policy


def check_plan(snapshot: Snapshot, plan: Plan) -> None:
    """The promises of policy.base.Policy."""
    there = {n.name for n in snapshot.nodes}
    jobs = {j.job: j for j in snapshot.jobs}
    given: list[str] = []
    assert len({p.job for p in plan.jobs}) == len(plan.jobs)
    for planned in plan.jobs:
        job = jobs[planned.job]
        given += planned.nodes
        n = len(planned.nodes)
        assert n == 0 or n in job.spec.sizes(len(there)), f"{planned.job} got {n}, allowed {job.spec}"
        before, after = set(job.nodes) & there, set(planned.nodes)
        assert after <= before or after >= before, f"{planned.job} migrates from {before} to {after}"
        assert planned.reason, f"no reason for {planned.job}"
    assert len(given) == len(set(given)), "a node given twice"
    assert set(given) <= there, "a node given that is not there"
    assert plan.review_after_s is None or plan.review_after_s > 0.0


@dataclass
class TrueJob:
    spec: JobSpec
    per_s: Callable[[int], float]
    submitted_s: float
    nodes: tuple[str, ...] = ()
    scales: dict[int, ScaleStats] = field(default_factory=dict)
    ready_s: float = 0.0
    size_since_s: float = 0.0
    started: bool = False
    samples: float = 0.0


class World:
    """Steps of `dt_s`; a report per job and step when it trains; a plan when asked for or when something changed."""

    def __init__(
        self, policy: Policy, n_nodes: int, *, noise: float = 0.03, dt_s: float = 0.5, start_s: float = 1.0
    ) -> None:
        self.policy, self.noise, self.dt_s = policy, noise, dt_s
        self.nodes = {f"n{i:03d}": NodeView(name=f"n{i:03d}") for i in range(n_nodes)}
        self.costs = Costs(start_s=Cost(value_s=start_s))
        self.jobs: dict[str, TrueJob] = {}
        self.now_s = 0.0
        self.generation = 0
        self.profiling: Profiling | None = None
        self.review_at_s: float | None = 0.0
        self.random = random.Random(7)
        self.history: list[tuple[float, dict[str, int], Profiling | None]] = []

    def submit(self, spec: JobSpec, per_s: Callable[[int], float]) -> str:
        job = f"j{len(self.jobs)}"
        self.jobs[job] = TrueJob(spec, per_s, self.now_s, size_since_s=self.now_s)
        self.review_at_s = self.now_s
        return job

    def set_nodes(self, names: list[str]) -> None:
        self.nodes = {name: NodeView(name=name) for name in names}
        for job in self.jobs.values():
            kept = tuple(n for n in job.nodes if n in self.nodes)
            if kept != job.nodes:
                job.nodes = kept if len(kept) >= job.spec.min_nodes else ()
                job.size_since_s = self.now_s
        self.review_at_s = self.now_s

    def snapshot(self) -> Snapshot:
        owner = {n: name for name, job in self.jobs.items() for n in job.nodes}
        merged: dict[str, dict[int, ScaleStats]] = {}
        for job in self.jobs.values():
            if job.spec.architecture:
                merged.setdefault(job.spec.architecture, {}).update(job.scales)
        views = tuple(
            JobView(
                job=name,
                spec=job.spec,
                submitted_s=job.submitted_s,
                nodes=job.nodes,
                started=job.started,
                rescaling=bool(job.nodes) and self.now_s < job.ready_s,
                scales=tuple(s for _, s in sorted((merged.get(job.spec.architecture) or job.scales).items())),
                costs=self.costs,
                size_since_s=job.size_since_s,
            )
            for name, job in self.jobs.items()
        )
        nodes = tuple(
            NodeView(name=n.name, kind=n.kind, job=owner.get(n.name), leaves_s=n.leaves_s) for n in self.nodes.values()
        )
        return Snapshot(generation=self.generation, now_s=self.now_s, nodes=nodes, jobs=views, profiling=self.profiling)

    def replan(self) -> Plan:
        self.generation += 1
        snapshot = self.snapshot()
        plan = self.policy.plan(snapshot)
        check_plan(snapshot, plan)
        assert self.policy.plan(snapshot) == plan, "not deterministic"
        self.profiling = plan.profiling
        self.review_at_s = None if plan.review_after_s is None else self.now_s + plan.review_after_s
        for planned in plan.jobs:
            job = self.jobs[planned.job]
            if set(planned.nodes) != set(job.nodes):
                cost = self.costs.rescale_up_s if job.nodes else self.costs.start_s
                job.ready_s = self.now_s + cost.value_s
                if len(planned.nodes) != len(job.nodes):
                    job.size_since_s = job.ready_s
                job.nodes = planned.nodes
        self.history.append((self.now_s, {n: len(j.nodes) for n, j in self.jobs.items()}, self.profiling))
        return plan

    def run(self, until_s: float) -> None:
        while self.now_s < until_s:
            if self.review_at_s is not None and self.now_s >= self.review_at_s:
                self.replan()
            self.now_s += self.dt_s
            for job in self.jobs.values():
                n = len(job.nodes)
                if n and self.now_s > job.ready_s:
                    job.started = True
                    true = job.per_s(n)
                    job.samples += true * self.dt_s
                    seen = job.scales.get(n, ScaleStats(n_nodes=n))
                    job.scales[n] = seen.add(true * max(0.05, self.random.gauss(1, self.noise)), self.dt_s)

    def sizes(self) -> dict[str, int]:
        return {name: len(job.nodes) for name, job in self.jobs.items()}


@st.composite
def snapshots(draw: st.DrawFn, kinds: bool = False) -> Snapshot:
    """Any snapshot at all: jobs holding too few, too many or odd numbers of nodes, half-measured, mid-profile."""
    n_nodes = draw(st.integers(0, 16))
    free = [f"n{i:02d}" for i in range(n_nodes)]
    names = list(free)
    views = []
    for i in range(draw(st.integers(0, 7))):
        low = draw(st.integers(1, 5))
        multiple = draw(st.integers(1, 3))
        spec = JobSpec(
            name=f"job{i}",
            min_nodes=low,
            max_nodes=low + draw(st.integers(0, 12)),
            multiple=multiple,
            weight=draw(st.floats(0.1, 10.0)),
            priority=draw(st.sampled_from([0, 0, 0, 1])),
            user=draw(st.sampled_from(["", "ann", "bob"])),
            total_samples=draw(st.one_of(st.none(), st.floats(1.0, 1e6))),
            deadline_s=draw(st.one_of(st.none(), st.floats(0.0, 1e4))),
        )
        held = tuple(sorted(draw(st.lists(st.sampled_from(free), unique=True, max_size=6)))) if free else ()
        free = [n for n in free if n not in held]
        points = draw(st.dictionaries(st.integers(1, 16), st.floats(0.1, 1e4), max_size=6))
        measured = tuple(
            ScaleStats(n_nodes=n, n_reports=draw(st.integers(1, 40)), mean_per_s=v, trained_s=5.0)
            for n, v in sorted(points.items())
        )
        seconds = st.floats(0.0, 100.0).map(lambda v: Cost(value_s=v))
        views.append(
            JobView(
                job=f"j{i}",
                spec=spec,
                submitted_s=draw(st.floats(0.0, 1000.0)),
                nodes=held,
                started=draw(st.booleans()),
                rescaling=draw(st.booleans()),
                scales=measured,
                costs=Costs(start_s=draw(seconds), rescale_up_s=draw(seconds), rescale_down_s=draw(seconds)),
                size_since_s=draw(st.floats(0.0, 1000.0)),
            )
        )
    profiling = None
    if views and draw(st.booleans()):
        profiling = Profiling(
            job=draw(st.sampled_from([v.job for v in views] + ["gone"])),
            n_nodes=draw(st.integers(1, 6)),
            since_s=draw(st.floats(0.0, 1000.0)),
            remaining=tuple(draw(st.lists(st.integers(1, 6), max_size=3))),
        )
    owner = {n: v.job for v in views for n in v.nodes}
    nodes = tuple(
        NodeView(
            name=n,
            kind=draw(st.sampled_from(["a", "b"])) if kinds else "node",
            job=owner.get(n),
            joined_s=draw(st.floats(0.0, 1000.0)),
            leaves_s=draw(st.one_of(st.none(), st.floats(900.0, 5000.0))),
        )
        for n in names
    )
    ended = tuple(draw(st.lists(st.integers(0, 50), max_size=20)))
    return Snapshot(
        generation=1,
        now_s=1000.0,
        nodes=nodes,
        jobs=tuple(views),
        profiling=profiling,
        history=PoolHistory(since_s=0.0, n_leave_events=sum(ended), ended=ended),
    )
