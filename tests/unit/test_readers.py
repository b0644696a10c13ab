"""Readers of traces: each kind of file, malformed lines, and what is made of job records."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sunfleck.core.errors import InvalidRequest
from sunfleck.sim.readers import read_trace
from sunfleck.sim.readers.easy import reschedule
from sunfleck.sim.readers.events import parse_events
from sunfleck.sim.readers.hostlist import expand
from sunfleck.sim.readers.records import JobRecord, idle_by_count, idle_by_name, nodes_used, outages
from sunfleck.sim.readers.sacct import parse_sacct, parse_sacct_json, sacct_trace
from sunfleck.sim.readers.swf import parse_swf, swf_trace
from sunfleck.sim.trace import Interval

TRACES = Path(os.environ.get("SUNFLECK_DATA") or Path(__file__).parents[2].parent / "shared" / "data") / "traces"
real = pytest.mark.skipif(not TRACES.is_dir(), reason=f"no traces at {TRACES}")


def record(job: str, submit: float, start: float, end: float | None, n: int, limit: float | None = None) -> JobRecord:
    return JobRecord(job=job, submit_s=submit, start_s=start, end_s=end, n_nodes=n, requested_s=limit)


# -- idle events -------------------------------------------------------------------------------------------------


def test_events_become_fragments_and_the_last_ones_end_with_the_list() -> None:
    trace = parse_events("0\t\t\n10\t0 2\t\n20\t1\t0\n30\t\t1\n40\t\t\n", ["a", "b", "c"])
    assert list(trace) == [Interval(10, 20, "a"), Interval(10, 40, "c"), Interval(20, 30, "b")]
    assert (trace.begin_s, trace.end_s) == (0, 40)
    assert trace.notes == ("1 nodes were still idle at the end of the list",)


def test_events_that_make_no_sense_are_counted() -> None:
    trace = parse_events("5\t0\t\nx\t1\t\n4\t1\t\n9\t0\t3\n12\t\t0\n13\t-2\t\n")
    assert list(trace) == [Interval(5, 12, "n00000")]
    assert trace.notes[0].startswith("3 lines could not be used")
    assert trace.notes[1] == "2 joins of idle nodes or leaves of busy ones were ignored"


# -- records -----------------------------------------------------------------------------------------------------


def test_a_named_node_is_idle_when_no_job_has_it() -> None:
    records = [
        JobRecord("1", 0, 10, 20, 2, nodes=("a", "b")),
        JobRecord("2", 0, 15, 30, 1, nodes=("a",)),  # shares node a
        JobRecord("3", 0, 50, None, 1, nodes=("b",)),  # still runs
    ]
    trace = idle_by_name(records, 0, 60, ["a", "b", "c"])
    assert list(trace) == [
        Interval(0, 10, "a"),
        Interval(0, 10, "b"),
        Interval(0, 60, "c"),
        Interval(20, 50, "b"),
        Interval(30, 60, "a"),
    ]


def test_virtual_nodes_have_as_many_holes_as_were_recorded() -> None:
    trace = idle_by_count([record("1", 0, 0, 10, 2), record("2", 0, 5, 15, 1), record("3", 0, 10, 20, 3)], 3, 0, 20)
    times, counts = trace.idle_counts()
    assert dict(zip(times.tolist(), counts.tolist(), strict=True))[0.0] == 1
    # At 10 s three nodes are wanted and one job ends 5 s later: recorded times are rounded, it gets that node.
    assert trace.idle_node_s == 5
    assert trace.notes == ()
    crowded = idle_by_count([record("1", 0, 0, 500, 2), record("2", 0, 5, 15, 2)], 3, 0, 500)
    assert crowded.notes == ("1 jobs found fewer free nodes than recorded (by up to 1) and got what there was",)


jobs = st.lists(
    st.tuples(st.integers(0, 300), st.integers(0, 200), st.integers(1, 100), st.integers(1, 6)), min_size=1, max_size=30
)


@given(jobs)
def test_counts_over_time_are_those_of_the_schedule(rows: list[tuple[int, int, int, int]]) -> None:
    records = [record(str(i), s, s + w, s + w + r, n) for i, (s, w, r, n) in enumerate(rows)]
    size = sum(r.n_nodes for r in records)
    trace = idle_by_count(records, size, 0, 700)
    times, counts = trace.idle_counts()
    for t, idle in zip(times.tolist(), counts.tolist(), strict=True):
        used = sum(r.n_nodes for r in records if r.start_s <= t < (r.end_s or 0))
        if t < 700:
            assert idle == size - used
    assert nodes_used(records) <= size


@settings(max_examples=60)
@given(jobs, st.integers(6, 12))
def test_easy_never_oversubscribes_starts_early_or_lets_a_job_pass_the_head_to_its_harm(
    rows: list[tuple[int, int, int, int]], size: int
) -> None:
    records = [record(str(i), s, s + w, s + w + r, n, limit=r + 10) for i, (s, w, r, n) in enumerate(rows)]
    done, notes = reschedule(records, size)
    assert notes == []
    assert sorted(r.job for r in done) == sorted(r.job for r in records)
    by_job = {r.job: r for r in records}
    for r in done:
        assert r.start_s >= by_job[r.job].submit_s
        assert r.end_s is not None
        assert r.end_s - r.start_s == pytest.approx((by_job[r.job].end_s or 0) - by_job[r.job].start_s)
    for t in {r.start_s for r in done}:
        assert sum(r.n_nodes for r in done if r.start_s <= t < (r.end_s or 0)) <= size
    # Nobody idles beside a queue: when a job waits, it did not fit at its submission or somebody was before it.
    for r in done:
        submitted = by_job[r.job].submit_s
        if r.start_s > submitted:
            used = sum(o.n_nodes for o in done if o.start_s <= submitted < (o.end_s or 0))
            before = [o for o in done if by_job[o.job].submit_s <= submitted and o.start_s > submitted and o is not r]
            assert used + r.n_nodes > size or before


def test_easy_backfills_only_what_does_not_delay_the_head() -> None:
    records = [
        record("long", 0, 0, 100, 3, 100),
        record("head", 1, 0, 50, 4, 50),
        record("fits", 2, 0, 90, 1, 90),
        record("late", 3, 0, 120, 1, 120),
        record("huge", 4, 0, 10, 9, 10),
    ]
    done, notes = reschedule(records, 4)
    starts = {r.job: r.start_s for r in done}
    assert starts == {"long": 0, "head": 100, "fits": 2, "late": 150}
    assert notes == ["1 jobs without an end or larger than the machine were left out"]


def test_an_outage_is_when_everything_is_idle_for_long() -> None:
    rows = [Interval(0, 1000, f"n{i}") for i in range(100)] + [Interval(2000, 2100, f"n{i}") for i in range(100)]
    rows += [Interval(3000, 9000, f"n{i}") for i in range(97)]
    from sunfleck.sim.trace import from_intervals

    trace = from_intervals(rows)
    assert outages(trace) == [(0, 1000)]


# -- SWF ---------------------------------------------------------------------------------------------------------

SWF = """; Version: 2.2
; MaxNodes: 4
; MaxProcs: 8
; Note: first
; Note: second
; --- a line that is no field ---
1 0 10 100 4 -1 -1 4 200 -1 1 1 1 -1 1 -1 -1 -1
2 5 -1 100 4 -1 -1 4 200 -1 0 1 1 -1 1 -1 -1 -1
3 5 0 -1 4 -1 -1 4 200 -1 5 1 1 -1 1 -1 -1 -1
4 20 10 300 -1 -1 -1 8 -1 -1 9 1 1 -1 1 -1 -1 -1
nonsense
"""


def test_swf_header_and_jobs() -> None:
    workload = parse_swf(SWF)
    assert workload.header["Version"] == "2.2"
    assert workload.header["Note"] == "first; second"
    assert workload.number("MaxNodes") == 4
    assert workload.number("StartTime") is None
    assert [(r.job, r.start_s, r.end_s, r.n_nodes, r.requested_s, r.state) for r in workload.records] == [
        ("1", 10, 110, 2, 200, "completed"),
        ("4", 30, 330, 4, None, "9"),
    ]
    assert any(note.startswith("1 lines could not be used") for note in workload.notes)
    assert "2 jobs never ran, or not for a known time, and were left out" in workload.notes


def test_swf_as_recorded_and_scheduled_anew(tmp_path: Path) -> None:
    lines = ["; MaxNodes: 2", "1 0 0 100 2 -1 -1 2 100 -1 1" + " -1" * 7, "2 0 500 100 1 -1 -1 1 100 -1 1" + " -1" * 7]
    path = tmp_path / "small.swf.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    recorded = read_trace(path)
    assert recorded.span_s == 600
    assert recorded.idle_node_s == 400 * 2 + 100
    anew = read_trace(path, rescheduled=True)
    assert anew.span_s == 200
    assert anew.idle_node_s == 100
    assert "scheduled anew by EASY backfill" in anew.notes
    with pytest.raises(InvalidRequest, match="no job that ran"):
        swf_trace("; nothing\n")


# -- sacct -------------------------------------------------------------------------------------------------------

SACCT = """JobID|Submit|Start|End|State|NNodes|Timelimit|NodeList
1|2024-01-01T00:00:00|2024-01-01T00:00:00|2024-01-01T00:10:00|COMPLETED|2|1-00:00:00|a,b
1.batch|2024-01-01T00:00:00|2024-01-01T00:00:00|2024-01-01T00:10:00|COMPLETED|1||a
2|2024-01-01T00:00:00|2024-01-01T00:15:00|2024-01-01T00:30:00|CANCELLED by 77|1|UNLIMITED|a
3|2024-01-01T00:00:00|Unknown|Unknown|PENDING|1|10:00|None assigned
4|2024-01-01T00:00:00|2024-01-01T00:25:00|Unknown|RUNNING|1|10:00|b
5_7|2024-01-01T00:00:00|2024-01-01T00:01:00|2024-01-01T00:02:00|FLUXCAPACITED+|1|02:00:00|c
6|yesterday|2024-01-01T00:25:00|2024-01-01T00:26:00|COMPLETED|1|10:00|b
7|short
"""


def test_sacct_with_node_lists() -> None:
    dump = parse_sacct(SACCT)
    got = [(r.job, r.n_nodes, r.state, r.requested_s, r.nodes) for r in dump.records]
    assert got == [
        ("1", 2, "COMPLETED", 86400, ("a", "b")),
        ("2", 1, "CANCELLED", None, ("a",)),
        ("4", 1, "RUNNING", 600, ("b",)),
        ("5_7", 1, "FLUXCAPACITED", 7200, ("c",)),
    ]
    assert dump.notes[0].startswith("2 lines could not be used")
    assert dump.notes[1] == "1 jobs never had a node and were left out"
    trace = sacct_trace(dump, begin_s=dump.records[0].start_s)
    assert list(trace) == [
        Interval(0, 60, "c"),
        Interval(120, 1800, "c"),
        Interval(600, 900, "a"),
        Interval(600, 1500, "b"),
    ]


def test_sacct_without_header_or_node_lists() -> None:
    dump = parse_sacct("1,2,100,200\n2,3,150,260\nx,y\n", "JobID,NNodes,Start,End")
    assert [(r.start_s, r.end_s, r.n_nodes) for r in dump.records] == [(100, 200, 2), (150, 260, 3)]
    trace = sacct_trace(dump, begin_s=100, n_nodes=5)
    assert trace.idle_node_s == 50 * 3 + 60 * 2
    assert any("virtual" in note for note in trace.notes)
    with pytest.raises(InvalidRequest, match="no column"):
        parse_sacct("1|2", "JobID|State")


def test_sacct_json_of_several_versions() -> None:
    old = '{"job_id": 1, "nodes": "a,b", "allocation_nodes": 2, "state": {"current": "COMPLETED"},'
    old += '"time": {"submission": 5, "start": 10, "end": 20, "limit": {"set": true, "infinite": false, "number": 2}}}'
    new = '{"job_id": 2, "nodes": "b", "state": {"current": ["RUNNING"]},'
    new += '"time": {"submission": 6, "start": 30, "end": 0}}'
    never = '{"job_id": 3, "nodes": "None assigned", "time": {"start": 0, "end": 0}}'
    dump = parse_sacct_json(f'{{"jobs": [{old}, {new}, {never}, 7]}}')
    assert [(r.job, r.start_s, r.end_s, r.n_nodes, r.requested_s, r.state) for r in dump.records] == [
        ("1", 10, 20, 2, 120, "COMPLETED"),
        ("2", 30, None, 1, None, "RUNNING"),
    ]
    assert len(dump.notes) == 2
    with pytest.raises(InvalidRequest, match="sacct --json"):
        parse_sacct_json('{"errors": []}')


def test_hostlists() -> None:
    assert expand("a1, b2") == ("a1", "b2")
    assert expand("None assigned") == ()
    pytest.importorskip("ClusterShell", reason="ranges need ClusterShell")
    assert expand("cn[08-10],gpu[1,3]-ib") == ("cn08", "cn09", "cn10", "gpu1-ib", "gpu3-ib")
    with pytest.raises(ValueError, match="malformed"):
        expand("cn[1-")


# -- the real ones -----------------------------------------------------------------------------------------------


@real
@pytest.mark.real
def test_summit_events_and_intervals_are_the_same_trace() -> None:
    folder = TRACES / "summit-bftrainer"
    events = read_trace(folder / "summit_idle_events.txt.gz")
    assert len(events) == 423_502
    assert events.idle_node_s == pytest.approx(read_trace(folder).idle_node_s)


@real
@pytest.mark.real
def test_kth_has_its_known_idle_share() -> None:
    trace = read_trace(TRACES / "kth-sp2")
    assert len(trace.names) == 100
    assert trace.span_s == pytest.approx(333 * 86_400, rel=0.01)
    assert trace.mean_idle_nodes / 100 == pytest.approx(0.27, abs=0.03)  # 0.296 with the outages


@real
@pytest.mark.real
@pytest.mark.parametrize(("name", "n_nodes"), [("phillips", 47), ("pozidriv", 106)])
def test_ccr_dumps_without_header(name: str, n_nodes: int) -> None:
    pytest.importorskip("ClusterShell", reason="node lists with ranges need ClusterShell")
    trace = read_trace(TRACES / "ccr-sacct" / f"{name}.sacct.gz")
    assert len(trace.names) == pytest.approx(n_nodes, abs=1)
    assert trace.span_s == pytest.approx(3 * 86_400, rel=0.05)
    assert not any("could not be used" in note for note in trace.notes)
    with pytest.raises(InvalidRequest, match="several traces"):
        read_trace(TRACES / "ccr-sacct")


@real
@pytest.mark.real
def test_cirrus_dump_by_counts() -> None:
    trace = read_trace(TRACES / "cirrus-epcc" / "2024_Q1_CPU-sacct-subset.csv.gz")
    assert len(trace) > 1000
    assert any("virtual" in note for note in trace.notes)
