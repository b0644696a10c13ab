"""Idle traces: values, operations, statistics and the interval reader."""

from __future__ import annotations

import gzip
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sunfleck.core.errors import InvalidRequest
from sunfleck.sim.readers import read_trace
from sunfleck.sim.readers.intervals import format_intervals, parse_intervals
from sunfleck.sim.trace import Interval, TraceEvent, from_intervals
from sunfleck.sim.trace_stats import describe

DATA = Path(os.environ.get("SUNFLECK_DATA") or Path(__file__).parents[2].parent / "shared" / "data")
SUMMIT = DATA / "traces" / "summit-bftrainer"

fragments = st.lists(
    st.tuples(st.integers(0, 200), st.integers(1, 60), st.integers(0, 5)).map(
        lambda row: Interval(float(row[0]), float(row[0] + row[1]), f"n{row[2]}")
    ),
    max_size=40,
)


def idle_set(intervals: list[Interval], time_s: float) -> set[str]:
    return {i.node for i in intervals if i.start_s <= time_s < i.end_s}


def test_overlapping_and_touching_fragments_of_a_node_become_one() -> None:
    trace = from_intervals(
        [Interval(0, 10, "a"), Interval(5, 20, "a"), Interval(20, 30, "a"), Interval(2, 4, "b"), Interval(40, 50, "a")]
    )
    assert list(trace) == [Interval(0, 30, "a"), Interval(2, 4, "b"), Interval(40, 50, "a")]
    assert trace.notes == ("2 fragments overlapped or touched another of their node and were merged with it",)


@given(fragments)
def test_merging_keeps_who_is_idle_at_every_second(rows: list[Interval]) -> None:
    trace = from_intervals(rows)
    kept = list(trace)
    for t in range(270):
        assert idle_set(kept, t + 0.5) == idle_set(rows, t + 0.5)
    for node in trace.names:
        mine = [i for i in kept if i.node == node]
        assert all(a.end_s < b.start_s for a, b in pairwise(mine))


@given(fragments, st.integers(0, 200), st.integers(1, 100))
def test_a_window_shows_what_was_there_from_time_zero(rows: list[Interval], start: int, length: int) -> None:
    whole, part = from_intervals(rows), from_intervals(rows).window(start, length)
    assert (part.begin_s, part.end_s) == (0, length)
    for t in range(length):
        assert idle_set(list(part), t + 0.5) == idle_set(list(whole), start + t + 0.5)
    assert all(0 <= i.start_s < i.end_s <= length for i in part)


@given(fragments)
def test_events_replayed_give_the_idle_nodes_at_any_time(rows: list[Interval]) -> None:
    trace = from_intervals(rows)
    idle: set[int] = set()
    events = trace.events()
    assert [e.time_s for e in events] == sorted({e.time_s for e in events})
    for i, event in enumerate(events):
        assert not set(event.joins) & set(event.leaves)
        assert set(event.leaves) <= idle
        assert not set(event.joins) & idle
        idle = (idle - set(event.leaves)) | set(event.joins)
        until = events[i + 1].time_s if i + 1 < len(events) else event.time_s + 1
        assert {trace.names[n] for n in idle} == idle_set(rows, (event.time_s + until) / 2)
    assert not idle


def test_events_have_one_order_and_leaves_come_with_joins_of_the_same_instant() -> None:
    trace = from_intervals([Interval(0, 5, "b"), Interval(0, 5, "a"), Interval(5, 6, "d"), Interval(5, 7, "c")])
    assert trace.events() == [
        TraceEvent(0.0, (0, 1), ()),
        TraceEvent(5.0, (2, 3), (0, 1)),
        TraceEvent(6.0, (), (2,)),
        TraceEvent(7.0, (), (3,)),
    ]


def test_nodes_are_chosen_by_name_by_index_or_as_the_first() -> None:
    trace = from_intervals([Interval(0, 5, "a"), Interval(1, 6, "b"), Interval(2, 7, "c")])
    assert list(trace.select(["c", "a"])) == [Interval(0, 5, "a"), Interval(2, 7, "c")]
    assert trace.select(["c", "a"]).names == ("c", "a")
    assert trace.select([2, 0]).node.tolist() == [1, 0]
    assert trace.first_nodes(2).names == ("a", "b")
    assert trace.first_nodes(99).names == trace.names
    with pytest.raises(KeyError):
        trace.select(["x"])
    with pytest.raises(IndexError):
        trace.select([3])
    with pytest.raises(ValueError, match="twice"):
        trace.select([1, "b"])


@given(fragments, st.integers(1, 4))
def test_a_loop_repeats_and_joins_at_the_seam(rows: list[Interval], n: int) -> None:
    trace = from_intervals(rows)
    looped = trace.loop(n)
    assert looped.idle_node_s == pytest.approx(n * trace.idle_node_s)
    assert looped.span_s == pytest.approx(n * trace.span_s)


def test_compress_and_shift_move_the_axis() -> None:
    trace = from_intervals([Interval(10, 40, "a")]).compress(10).shift(5)
    assert list(trace) == [Interval(6, 9, "a")]
    assert (trace.begin_s, trace.end_s) == (6, 9)
    with pytest.raises(ValueError, match="positive"):
        trace.compress(0)


@given(fragments, st.integers(0, 200), st.integers(1, 50))
def test_cut_out_spans_hold_nobody_and_the_rest_is_as_before(rows: list[Interval], at: int, length: int) -> None:
    trace = from_intervals(rows)
    cut = trace.without([(float(at), float(at + length))], "an outage")
    assert cut.notes[-1] == "an outage"
    for t in range(270):
        inside = at <= t < at + length
        assert idle_set(list(cut), t + 0.5) == (set() if inside else idle_set(rows, t + 0.5))


def test_statistics_of_a_trace_counted_by_hand() -> None:
    trace = from_intervals([Interval(0, 100, "a"), Interval(50, 1050, "b"), Interval(50, 150, "c")])
    stats = describe(trace)
    assert (stats.n_nodes, stats.n_fragments, stats.span_s) == (3, 3, 1050)
    assert stats.idle_node_h == pytest.approx(1200 / 3600)
    assert stats.length_s[50] == 100
    assert stats.short_share == pytest.approx(2 / 3)
    assert stats.short_time_share == pytest.approx(200 / 1200)
    assert stats.idle_nodes[50] == 1
    assert stats.idle_nodes[95] == 2
    assert stats.join_events_per_h == pytest.approx(1 / (1050 / 3600))  # at 50 s; those at 0 were there before
    assert stats.nodes_per_join == 2
    assert stats.nodes_per_leave == 1
    # Idle nodes: 1 for 50 s, 3 for 50 s, 2 for 50 s, 1 for 900 s.
    mean = 1200 / 1050
    spread = ((50 * (3 - mean) ** 2 + 50 * (2 - mean) ** 2 + 950 * (1 - mean) ** 2) / 1050) ** 0.5
    assert stats.burstiness == pytest.approx(spread / mean)


def test_an_empty_trace_has_statistics_too() -> None:
    assert describe(from_intervals([])).n_fragments == 0


def test_the_reader_counts_what_it_cannot_use() -> None:
    text = "start_s,end_s,node\n0,10,a\n\n# comment\nx,5,b\n7,3,b\n1,2\n5,inf,c\n3,9,b\n1,2,c,d\n"
    trace = parse_intervals(text)
    assert list(trace) == [Interval(0, 10, "a"), Interval(3, 9, "b")]
    assert trace.notes[0].startswith("5 lines could not be used")
    assert "line 5" in trace.notes[0]


@given(fragments)
def test_written_and_read_again_is_the_same(rows: list[Interval]) -> None:
    trace = from_intervals(rows)
    again = parse_intervals(format_intervals(trace, ["made by a test", "twice"]), trace.names)
    assert sorted(again) == sorted(trace)
    assert again.notes == ()


def test_files_and_folders_plain_and_compressed(tmp_path: Path) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "idle_intervals.csv.gz").write_bytes(gzip.compress(b"start_s,end_s,node\n0,9,b\n1,5,a\n"))
    (folder / "nodes_column_order.txt").write_text("c\nb\na\n")
    trace = read_trace(folder)
    assert trace.names == ("c", "b", "a")
    assert trace.first_nodes(2).names == ("c", "b")
    assert list(read_trace(folder / "idle_intervals.csv.gz")) == list(trace)
    with pytest.raises(InvalidRequest, match="No such file"):
        read_trace(tmp_path / "absent.csv")
    with pytest.raises(InvalidRequest, match="is no trace"):
        read_trace(tmp_path)
    (tmp_path / "empty.csv").write_text("hello\n")
    with pytest.raises(InvalidRequest, match="no idle interval"):
        read_trace(tmp_path / "empty.csv")
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress(b"0,1,a\n" * 100)[:20])
    with pytest.raises(InvalidRequest, match="cannot read"):
        read_trace(tmp_path / "cut.csv.gz")


@pytest.mark.real
@pytest.mark.skipif(not SUMMIT.is_dir(), reason=f"no Summit trace at {SUMMIT}")
def test_the_summit_trace_has_its_published_figures() -> None:
    trace = read_trace(SUMMIT)
    assert len(trace) == 423_502
    assert trace.notes == ()
    stats = describe(trace)
    assert [round(stats.length_s[q]) for q in (10, 25, 50, 75, 90, 99)] == [91, 162, 475, 1397, 3269, 9246]
    assert stats.idle_node_h == pytest.approx(140_182, abs=1)
    assert stats.idle_share == pytest.approx(0.0827, abs=2e-4)
    assert round(stats.join_events_per_h) == 41
    assert round(stats.leave_events_per_h) == 31
    published = trace.first_nodes(1024).window(72_743, 7 * 86_400)
    events = [e for e in published.events() if e.time_s < published.end_s]
    assert len(events) == 7_212
    assert published.mean_idle_nodes == pytest.approx(85.1, abs=0.05)
    assert np.all(published.end > published.start)
