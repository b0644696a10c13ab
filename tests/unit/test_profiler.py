"""The profiling advisor in a small world: it converges, stops nobody, and stops itself."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from sunfleck.core.model import JobSpec, JobView, NodeView, Profiling, ScaleStats, Snapshot
from sunfleck.policy.optimum import Optimum, OptimumOptions
from sunfleck.policy.profiler import ProfilerOptions, advise, scales_to_profile, settled

from .policy_world import World


def amdahl(serial: float, scale: float = 100.0, log: float = 0.0) -> Callable[[int], float]:
    return lambda n: scale / (serial + (1 - serial) / n + log * math.log(n)) if n else 0.0


def world(n_nodes: int = 8, noise: float = 0.03, **options: object) -> World:
    return World(Optimum(OptimumOptions(profiler=ProfilerOptions(**options))), n_nodes, noise=noise)  # type: ignore[arg-type]


def visited(w: World, job: str) -> list[int]:
    """Sizes at which the job was held, in order, without repetitions."""
    sizes = [p.n_nodes for _, _, p in w.history if p is not None and p.job == job]
    return [n for i, n in enumerate(sizes) if i == 0 or sizes[i - 1] != n]


def test_four_jobs_are_profiled_in_turn_and_then_left_alone() -> None:
    w = world(8)
    jobs = [
        w.submit(JobSpec(name=name, max_nodes=8), amdahl(serial))
        for name, serial in (("cnn", 0.02), ("mlp", 0.6), ("lm", 0.05), ("mix", 0.2))
    ]
    w.run(120.0)
    for job in jobs:
        assert visited(w, job) == sorted(visited(w, job), reverse=True), "scales are visited in descending order"
        assert visited(w, job)[:1] in ([4], [3], [2], []), "begins at the largest scale that is not known yet"
        known = {n for n, s in w.jobs[job].scales.items() if settled(s, ProfilerOptions())}
        assert {1, 2, 3, 4} <= known
    assert sum(1 for job in jobs if visited(w, job)) >= 3, "normal running may have measured all of one job"
    assert w.profiling is None
    last = max(t for t, _, p in w.history if p is not None)
    assert last < 60.0, "profiling has stopped"
    assert sum(w.sizes().values()) == 8
    assert w.sizes()["j1"] == 1, "the job that does not scale has one node"
    assert w.sizes()["j0"] >= 2


def test_no_running_job_is_ever_stopped_for_a_profile() -> None:
    w = world(8)
    for i in range(4):
        w.submit(JobSpec(name=f"job{i}", max_nodes=8), amdahl(0.1))
    w.run(60.0)
    running: set[str] = set()
    for _, sizes, profiling in w.history:
        if profiling is not None:
            assert all(sizes[job] > 0 for job in running), "stopped during a profile"
        running = {job for job, n in sizes.items() if n > 0}


def test_minimum_sizes_of_others_are_kept() -> None:
    w = world(8)
    big = w.submit(JobSpec(name="big", min_nodes=5, max_nodes=8), amdahl(0.01))
    w.run(40.0)
    w.submit(JobSpec(name="small", max_nodes=4), amdahl(0.01))
    w.run(90.0)
    for _, sizes, _ in w.history[1:]:
        assert sizes[big] >= 5
    assert visited(w, "j1") == [], "four nodes cannot be had without stopping the first job: no separate phase"


def test_jobs_of_one_architecture_are_profiled_once() -> None:
    w = world(8)
    for i in range(3):
        w.submit(JobSpec(name=f"trial{i}", max_nodes=8, architecture="resnet"), amdahl(0.05))
    w.run(90.0)
    assert len([job for job in w.jobs if visited(w, job)]) == 1


def test_a_job_alone_is_left_alone_for_a_while_and_then_profiled() -> None:
    w = world(4, alone_after_s=20.0)
    job = w.submit(JobSpec(name="retrograde", max_nodes=4), lambda n: [0.0, 100.0, 120.0, 90.0, 70.0][n])
    w.run(15.0)
    assert visited(w, job) == []
    assert w.sizes()[job] == 4
    w.run(60.0)
    assert visited(w, job) == [3, 2, 1], "size 4 is known from normal running"
    assert w.sizes()[job] == 2, "the retrograde curve is believed"


def test_vanishing_nodes_end_a_profile_which_is_resumed_later() -> None:
    w = world(8, noise=0.15)
    first = w.submit(JobSpec(name="first", max_nodes=8), amdahl(0.05))
    w.submit(JobSpec(name="second", max_nodes=8), amdahl(0.05))
    w.run(3.0)
    assert w.profiling is not None
    assert (w.profiling.job, w.profiling.n_nodes) == (first, 4)
    every = list(w.nodes)
    w.set_nodes(every[:3])
    w.run(8.0)
    assert w.profiling is None or w.profiling.n_nodes < 4
    w.set_nodes(every)
    w.run(200.0)
    assert w.profiling is None
    assert {1, 2, 3, 4} <= {n for n, s in w.jobs[first].scales.items() if settled(s, ProfilerOptions())}


def test_noise_that_never_settles_is_accepted_after_a_while() -> None:
    w = world(8, noise=0.9, max_hold_s=10.0)
    for i in range(2):
        w.submit(JobSpec(name=f"noisy{i}", max_nodes=8), amdahl(0.05))
    w.run(200.0)
    assert w.profiling is None


def test_profiling_can_be_switched_off() -> None:
    w = world(8, n_scales=0)
    for i in range(2):
        w.submit(JobSpec(name=f"job{i}", max_nodes=8), amdahl(0.05))
    w.run(20.0)
    assert all(p is None for _, _, p in w.history)
    assert sum(w.sizes().values()) == 8


def view(job: str, **fields: object) -> JobView:
    spec = fields.pop("spec", JobSpec(name=job, max_nodes=8))
    return JobView(job=job, spec=spec, submitted_s=0.0, **fields)  # type: ignore[arg-type]


def snapshot(n_nodes: int, *jobs: JobView, now_s: float = 100.0, profiling: Profiling | None = None) -> Snapshot:
    nodes = tuple(NodeView(name=f"n{i}") for i in range(n_nodes))
    return Snapshot(generation=1, now_s=now_s, nodes=nodes, jobs=jobs, profiling=profiling)


@pytest.mark.parametrize(
    ("spec", "n_nodes", "scales"),
    [
        (JobSpec(name="a", max_nodes=64), 100, (4, 3, 2, 1)),
        (JobSpec(name="a", max_nodes=3), 100, (3, 2, 1)),
        (JobSpec(name="a", max_nodes=64), 2, (2, 1)),
        (JobSpec(name="a", min_nodes=2, max_nodes=32, multiple=2), 100, (4, 2)),
        (JobSpec(name="a", min_nodes=8, max_nodes=64, multiple=8), 100, (16, 8)),
        (JobSpec(name="a", min_nodes=8, max_nodes=8), 4, ()),
    ],
)
def test_which_scales_are_wanted(spec: JobSpec, n_nodes: int, scales: tuple[int, ...]) -> None:
    assert scales_to_profile(view("a", spec=spec), n_nodes, ProfilerOptions()) == scales


def test_a_job_that_never_reports_is_given_up_and_the_next_one_is_served() -> None:
    silent = view("silent", nodes=("n0", "n1", "n2", "n3"), started=True, size_since_s=10.0)
    other = view("other")
    run = Profiling(job="silent", n_nodes=4, since_s=5.0, remaining=(3, 2, 1))
    advice = advise(snapshot(8, silent, other, profiling=run), ProfilerOptions(arrive_s=60.0))
    assert advice.profiling is not None
    assert advice.profiling.job == "other"


def test_a_slow_start_is_waited_for() -> None:
    slow = view("slow", nodes=("n0", "n1", "n2", "n3"), rescaling=True, size_since_s=5.0)
    run = Profiling(job="slow", n_nodes=4, since_s=90.0, remaining=(3, 2, 1))
    advice = advise(snapshot(8, slow, view("other"), profiling=run), ProfilerOptions())
    assert advice.profiling == run
    assert advice.review_after_s is not None


def test_a_finished_job_ends_its_profile() -> None:
    run = Profiling(job="gone", n_nodes=4, since_s=90.0, remaining=(3,))
    known = tuple(ScaleStats(n_nodes=n, n_reports=50, mean_per_s=10.0 * n, trained_s=25.0) for n in range(1, 5))
    advice = advise(snapshot(8, view("other", scales=known), profiling=run), ProfilerOptions())
    assert advice.profiling is None


def test_the_review_comes_when_the_interval_should_be_tight() -> None:
    stats = ScaleStats(n_nodes=4)
    for value in (90.0, 110.0, 105.0):
        stats = stats.add(value, 2.0)
    job = view("a", nodes=("n0", "n1", "n2", "n3"), started=True, scales=(stats,), size_since_s=94.0)
    run = Profiling(job="a", n_nodes=4, since_s=92.0, remaining=(3,))
    advice = advise(snapshot(8, job, view("b"), profiling=run), ProfilerOptions())
    assert advice.profiling == run
    assert advice.review_after_s is not None
    assert 2.0 <= advice.review_after_s <= 14.0
