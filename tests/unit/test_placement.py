"""Counts become nodes without migration, stably, and with an eye on who leaves when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sunfleck.core.model import JobSpec, JobView, NodeView, Snapshot
from sunfleck.policy.forecast import Forecast
from sunfleck.policy.placement import place


def snapshot(nodes: list[NodeView], holding: dict[str, tuple[str, ...]]) -> Snapshot:
    jobs = tuple(
        JobView(job=job, spec=JobSpec(name=job, max_nodes=99), submitted_s=float(i), nodes=held)
        for i, (job, held) in enumerate(holding.items())
    )
    owner = {name: job for job, held in holding.items() for name in held}
    filled = tuple(
        NodeView(name=n.name, kind=n.kind, job=owner.get(n.name), joined_s=n.joined_s, leaves_s=n.leaves_s)
        for n in nodes
    )
    return Snapshot(generation=1, now_s=100.0, nodes=filled, jobs=jobs)


def named(*names: str, **leaves: float) -> list[NodeView]:
    return [NodeView(name=n) for n in names] + [NodeView(name=n, leaves_s=t) for n, t in leaves.items()]


def test_nobody_moves_when_counts_stay() -> None:
    world = snapshot(named("a", "b", "c", "d"), {"x": ("b", "d"), "y": ("a",)})
    assert place(world, {"x": 2, "y": 1}) == {"x": ("b", "d"), "y": ("a",)}


def test_a_shrinking_job_drops_what_leaves_first() -> None:
    world = snapshot(named("b", "c", a=500.0, d=200.0), {"x": ("a", "b", "c", "d")})
    assert place(world, {"x": 3})["x"] == ("a", "b", "c")
    assert place(world, {"x": 2})["x"] == ("b", "c")


def test_what_has_stayed_long_is_kept_when_stays_are_forecast() -> None:
    nodes = [NodeView(name="a", joined_s=90.0), NodeView(name="b", joined_s=10.0)]
    world = snapshot(nodes, {"x": ("a", "b")})
    assert place(world, {"x": 1})["x"] == ("a",)
    assert place(world, {"x": 1}, Forecast(world).stay_s)["x"] == ("b",)


def test_a_starting_job_gets_the_nodes_that_stay() -> None:
    world = snapshot(named("c", a=150.0, b=900.0, d=1.0), {"old": ("d",), "new": ()})
    placed = place(world, {"old": 2, "new": 2})
    assert placed["new"] == ("b", "c")
    assert placed["old"] == ("a", "d")


def test_free_nodes_come_before_nodes_others_must_leave() -> None:
    world = snapshot(named("a", "b", "c"), {"x": ("a", "b"), "y": ()})
    assert place(world, {"x": 1, "y": 1}) == {"x": ("a",), "y": ("c",)}


def test_too_many_is_an_error() -> None:
    with pytest.raises(ValueError, match="3 nodes planned"):
        place(snapshot(named("a"), {"x": ()}), {"x": 3})


@given(st.data())
def test_never_migrates_never_shares(data: st.DataObject) -> None:
    names = [f"n{i}" for i in range(data.draw(st.integers(0, 12)))]
    nodes = [
        NodeView(name=n, leaves_s=data.draw(st.one_of(st.none(), st.floats(0, 1e4))), joined_s=float(i % 3))
        for i, n in enumerate(names)
    ]
    free = list(names)
    holding: dict[str, tuple[str, ...]] = {}
    counts: dict[str, int] = {}
    left = len(names)
    for j in range(data.draw(st.integers(0, 5))):
        held = data.draw(st.lists(st.sampled_from(free), unique=True)) if free else []
        free = [n for n in free if n not in held]
        holding[f"j{j}"] = tuple(sorted(held))
        counts[f"j{j}"] = data.draw(st.integers(0, left))
        left -= counts[f"j{j}"]
    world = snapshot(nodes, holding)
    placed = place(world, counts)
    given_out = [n for nodes_of in placed.values() for n in nodes_of]
    assert len(given_out) == len(set(given_out))
    assert set(given_out) <= set(names)
    for job, before in holding.items():
        after = placed[job]
        assert len(after) == counts[job]
        assert set(after) <= set(before) or set(after) >= set(before)
    assert place(world, counts) == placed
