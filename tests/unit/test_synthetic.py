"""The generator of idle traces keeps to the figures that it says it follows."""

from __future__ import annotations

from importlib.resources import files

import numpy as np
import pytest

from sunfleck.demo import idle
from sunfleck.sim.synthetic import generate
from sunfleck.sim.trace_stats import describe


@pytest.fixture(scope="module")
def summit_like() -> object:
    return describe(generate(seed=1))


def test_lengths_of_fragments_follow_summit(summit_like) -> None:  # type: ignore[no-untyped-def]
    published = {10: 91, 25: 162, 50: 475, 75: 1397, 90: 3269, 99: 9246}
    for q, length_s in published.items():
        assert summit_like.length_s[q] == pytest.approx(length_s, rel=0.25), q
    assert summit_like.length_mean_s == pytest.approx(1192, rel=0.15)
    assert summit_like.short_share == pytest.approx(0.56, abs=0.05)
    assert summit_like.short_time_share == pytest.approx(0.11, abs=0.03)


def test_idle_nodes_are_as_many_and_as_bursty_as_on_summit(summit_like) -> None:  # type: ignore[no-untyped-def]
    assert summit_like.idle_share == pytest.approx(0.0827, rel=0.10)
    assert summit_like.join_events_per_h == pytest.approx(41, rel=0.2)
    assert 31 * 0.7 < summit_like.leave_events_per_h < 31 * 2
    assert summit_like.idle_nodes[50] < 0.5 * summit_like.idle_nodes_mean
    assert summit_like.idle_nodes[95] > 2.5 * summit_like.idle_nodes_mean
    assert summit_like.burstiness == pytest.approx(1.71, rel=0.25)


def test_a_seed_gives_the_same_trace_and_another_seed_another() -> None:
    one, two, other = (generate(n_nodes=50, duration_s=36_000, seed=s) for s in (5, 5, 6))
    assert list(one) == list(two)
    assert list(one) != list(other)


@pytest.mark.parametrize("idle_share", [0.05, 0.3, 0.7])
@pytest.mark.parametrize("n_nodes", [8, 200])
def test_the_idle_share_can_be_chosen(n_nodes: int, idle_share: float) -> None:
    trace = generate(n_nodes=n_nodes, duration_s=5 * 86_400, seed=3, idle_share=idle_share)
    assert trace.mean_idle_nodes / n_nodes == pytest.approx(idle_share, rel=0.25)
    assert trace.idle_counts()[1].max() <= n_nodes


def test_senseless_wishes_are_refused() -> None:
    with pytest.raises(ValueError, match="share"):
        generate(idle_share=1.5)
    with pytest.raises(ValueError, match="nodes"):
        generate(n_nodes=0)


def test_the_shipped_trace_is_the_generated_one_and_shows_everything() -> None:
    made = idle.make(*idle.FOUND)
    assert idle.accept(made)
    assert idle.text_of(made) == files("sunfleck.demo").joinpath("idle.csv").read_text(encoding="utf-8")
    assert list(idle.demo_trace()) == list(made)


def test_offers_are_compressed_and_go_on_after_the_first_pass() -> None:
    once = idle.demo_offers(120.0, n_loops=1)
    assert max(end for _, end, _ in once) <= 120.0
    assert {node for _, _, node in once} == set(range(8))
    mean = sum(end - start for start, end, _ in once) / 120.0
    assert 5.0 <= mean <= 6.0
    thrice = idle.demo_offers(120.0, n_loops=3)
    assert sum(e - s for s, e, _ in thrice) == pytest.approx(3 * sum(e - s for s, e, _ in once))
    at = np.array(thrice)
    for node in range(8):
        mine = at[at[:, 2] == node]
        assert np.all(mine[1:, 0] > mine[:-1, 1])
    assert all(node < 3 for _, _, node in idle.demo_offers(60.0, n_nodes=3))
    with pytest.raises(ValueError, match="1 to 8"):
        idle.demo_offers(n_nodes=9)
