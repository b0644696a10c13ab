"""Terminal pictures: what is said, that it fits, and that nothing is lost without colour or width."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from sunfleck.core.model import Cost, Costs, JobPhase, NodePhase, Profiling, Target
from sunfleck.observers import render
from sunfleck.observers.fitted import Column, Fitted
from sunfleck.observers.live import CurvePoint, ExplainView, JobRow, NodeRow, PlanRow, StatusView
from sunfleck.observers.palette import JOB_COLOURS, ink_on, job_colours
from sunfleck.observers.summary import JobSummary, Summary
from sunfleck.observers.words import duration, node_list, quantity, short_time

ACCURACY = Target(metric="accuracy", value=0.95)
LOSS = Target(metric="loss", value=1.5, at_least=False)
JOBS = (
    JobRow(
        job="j1", name="cnn", phase=JobPhase.RUNNING, min_nodes=1, max_nodes=8, planned=("n1", "n2", "n3"),
        requested=("n1", "n2"), observed=("n1", "n2"), submitted_s=10.0, samples=123456, samples_per_s=5123.4,
        metrics={"loss": 0.4123, "accuracy": 0.9123}, target=ACCURACY, n_rescales=3, reason="grows by one node",
    ),
    JobRow(
        job="j2", name="transformer", phase=JobPhase.RUNNING, profiling=True, min_nodes=2, max_nodes=4,
        planned=("n4", "n5"), observed=("n4", "n5"), samples=1234, samples_per_s=51.44, metrics={"loss": 1.4123},
        target=LOSS, reason="measured at 2 nodes",
    ),
    JobRow(job="j3", name="mlp", phase=JobPhase.QUEUED, reason="fewer nodes than\nits minimum"),
    JobRow(
        job="j4", name="rnn", phase=JobPhase.FAILED, submitted_s=0.0, ended_s=61.0, samples_per_s=9.0,
        reason="ValueError: no",
    ),
)  # fmt: skip
NODES = (
    *(NodeRow(name=f"n{i}", phase=NodePhase.BUSY, job="j1" if i < 3 else "j2", cpus=0.25) for i in (1, 2, 4, 5)),
    NodeRow(name="n3", phase=NodePhase.LEAVING, job="j2", reason="reclaimed", leaves_s=131.0),
    NodeRow(name="n6", phase=NodePhase.IDLE, reason="no job can use it"),
    NodeRow(name="n10", phase=NodePhase.SILENT, reason="has not called in"),
)
STATUS = StatusView(
    pool="default", version="0.1", now_s=130.0, started_s=5.0, nodes=NODES, jobs=JOBS,
    plan=PlanRow(solver="knapsack", time_s=120.0, solve_s=0.0012, gap=0.015), n_reclaims=4, handback_s_p50=0.12,
    handback_s_p99=0.31, warnings=("nodes are oversubscribed",),
)  # fmt: skip


def words(line: str) -> str:
    """Single-spaced."""
    return " ".join(line.split())


def drawn(picture: RenderableType, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(picture)
    return out.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 100, 132, 200])
@pytest.mark.parametrize(
    "picture",
    [render.status_page(STATUS), render.live_page(STATUS), render.nodes_table(NODES, 130.0)],
    ids=["status", "live", "nodes"],
)
def test_no_line_is_wider_than_the_terminal_and_none_has_colour_codes(picture: RenderableType, width: int) -> None:
    text = drawn(picture, width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert "\x1b" not in text


def test_jobs_at_80_columns_say_all_that_matters() -> None:
    lines = drawn(render.jobs_table(JOBS, 130.0)).splitlines()
    assert lines[0].split()[:4] == ["JOB", "NAME", "STATE", "NODES"]
    assert words(lines[2]) == "j1 cnn running 2>3 5123 accuracy 0.912 >= 0.95"
    assert words(lines[3]) == "j2 transformer profiling 2 51.4 loss 1.41 <= 1.5 reached"
    assert words(lines[4]) == "j3 mlp queued 0 - - -"
    assert words(lines[5]) == "j4 rnn failed - - - -"
    assert lines[6:] == [
        "j1: grows by one node",
        "j2: measured at 2 nodes",
        "j3: fewer nodes than its minimum",
        "j4: ValueError: no",
    ]


def test_wide_terminal_has_every_column_and_the_reason_in_line() -> None:
    lines = drawn(render.jobs_table(JOBS, 130.0), 160).splitlines()
    assert words(lines[0]) == "JOB NAME STATE TIME NODES SIZES SAMPLES/S METRIC TARGET REASON"
    assert lines[2].split()[:6] == ["j1", "cnn", "running", "2:00", "2>3", "1:8"]
    assert lines[2].rstrip().endswith("grows by one node")
    assert "1:01" in lines[5]  # a job that ended has stopped its clock
    assert len(lines) == 6


def test_colours_only_where_there_is_a_terminal() -> None:
    out = io.StringIO()
    Console(file=out, width=80, force_terminal=True, color_system="truecolor").print(render.status_page(STATUS))
    assert "\x1b[" in out.getvalue()


def test_text_is_ascii_apart_from_the_box() -> None:
    text = drawn(render.status_page(STATUS)) + drawn(render.explain_page(EXPLAIN))
    assert {char for char in text if ord(char) > 127} <= {"─"}
    ascii_out = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    Console(file=ascii_out, width=80).print(render.status_page(STATUS))  # must not raise


def test_strip_marks_who_holds_what() -> None:
    assert render.node_strip(STATUS).plain.split() == ["n1:j1", "n2:j1", "n3:j2!", "n4:j2", "n5:j2", "n6:-", "n10:?"]


def test_strip_counts_when_there_are_many_nodes() -> None:
    many = tuple(
        NodeRow(name=f"n{i}", phase=NodePhase.BUSY if i < 700 else NodePhase.IDLE, job="j1" if i < 700 else None)
        for i in range(1000)
    )
    strip = render.node_strip(StatusView(pool="p", version="", now_s=1.0, started_s=0.0, nodes=many, jobs=JOBS))
    assert strip.plain == "j1:700  idle:300"


def test_status_names_pool_plan_and_warnings() -> None:
    text = drawn(render.status_page(STATUS), 120)
    assert text.startswith("pool default: 7 nodes (1 idle, 4 busy, 1 leaving, 1 silent), up 2:05, 4 reclaims")
    assert "last plan: knapsack in 1.2 ms, gap 1.50%, 0:10 ago" in text
    assert "warning: nodes are oversubscribed" in text


def test_live_page_keeps_its_height() -> None:
    quiet = StatusView(pool="default", version="", now_s=130.0, started_s=5.0, nodes=NODES, jobs=JOBS)
    assert len(drawn(render.live_page(STATUS), 132).splitlines()) == len(
        drawn(render.live_page(quiet), 132).splitlines()
    )


def test_long_errors_are_cut_to_their_end() -> None:
    trace = "Traceback (most recent call last):\n" + "  File x\n" * 100 + "ValueError: no such thing"
    row = JobRow(job="j1", name="cnn", phase=JobPhase.FAILED, reason=trace)
    for width in (80, 160):
        assert len(drawn(render.jobs_table([row], 1.0), width)) < 8 * width
    assert "ValueError: no such thing" in drawn(render.jobs_table([row], 1.0))
    status = StatusView(pool="p", version="", now_s=1.0, started_s=0.0, jobs=(row,))
    assert re.search(r"cnn failed: \.\.\..* ValueError: no such thing", words(drawn(render.live_page(status), 300)))
    assert words(drawn(render.explain_page(ExplainView(row=row, now_s=1.0, reason=trace)))).count("File x") == 100


def test_nodes_share_one_remark_when_there_is_no_room() -> None:
    rows = [NodeRow(name=f"n{i}", phase=NodePhase.IDLE, reason="no job can use it") for i in range(3)]
    text = drawn(render.nodes_table(rows, 60.0))
    assert text.splitlines()[-1] == "n0 n1 n2: no job can use it" or text.count("no job can use it") == 3
    narrow = drawn(render.nodes_table(rows, 60.0), 50)
    assert narrow.splitlines()[-1] == "n0 n1 n2: no job can use it"


EXPLAIN = ExplainView(
    row=JOBS[0],
    now_s=130.0,
    reason="grows by one node",
    details=("waits for n3, held by j2",),
    curve=(
        CurvePoint(n_nodes=1, samples_per_s=2000.0, measured=True, stderr_per_s=12.4, n_reports=8),
        CurvePoint(n_nodes=2, samples_per_s=3800.0, measured=True, n_reports=1),
        CurvePoint(n_nodes=4, samples_per_s=7000.0, measured=False),
    ),
    costs=Costs(rescale_up_s=Cost(value_s=0.045, n_measured=3)),
    profiling=Profiling(job="j1", n_nodes=2, since_s=120.0, remaining=(1,)),
    plan=PlanRow(solver="knapsack", time_s=120.0, solve_s=0.001, objective=3.25),
    t_fwd_s=10.0,
    n_pool_nodes=7,
)


def test_explain_says_why_and_where_every_figure_comes_from() -> None:
    text = " ".join(drawn(render.explain_page(EXPLAIN), 120).split())
    assert "job j1 (cnn) is running on 2 of 7 nodes; it takes 1 to 8" in text
    assert "why grows by one node waits for n3, held by j2" in text
    assert "planned n1 n2 n3 requested n1 n2 observed n1 n2" in text
    assert "start 2 s (assumed), grow 45 ms (measured 3x)" in text
    assert "held at 2 nodes to be measured there, then 1" in text
    assert "1 2000 1.00 100% measured +- 12, 8 reports" in text
    assert "2 3800 1.90 95% measured, 1 reports <- now" in text
    assert "4 7000 3.50 88% assumed" in text


def test_explain_without_measurements() -> None:
    view = ExplainView(row=JOBS[2], now_s=1.0, reason="")
    text = drawn(render.explain_page(view))
    assert "nothing measured yet" in text
    assert "planned    none" in text


def test_empty_pool_says_what_to_do() -> None:
    assert "sunfleck submit" in drawn(render.jobs_table((), 0.0))
    assert "no nodes" in drawn(render.nodes_table((), 0.0))


def test_summary_page() -> None:
    job = JobSummary(
        name="cnn", samples=1200, metric=0.9, metric_name="accuracy", target=0.85, reached=True, rescales=3,
        stall_s_p50=0.0123, stall_s_p99=0.2, samples_lost=0, samples_repeated=None, restarts=1, phase="finished",
        node_seconds_used=5.0,
    )  # fmt: skip
    text = drawn(
        render.summary_page(
            Summary(
                node_seconds_offered=180.0,
                node_seconds_used=146.0,
                samples=1300,
                jobs=(job,),
                reclaims=2,
                losses=1,
                handback_s_p50=0.375,
                handback_s_p99=0.4975,
                plan_solve_s_p50=0.001,
                elapsed_s=100.0,
            )
        ),
        120,
    )
    assert "node-seconds offered 180.0, used 146.0 (81.1% used)" in text
    assert "hand-back p50 375 ms, p99 498 ms; nodes lost 1" in text
    assert words(text.splitlines()[-1]) == "cnn finished 1200 accuracy 0.9 0.85 reached 3 12.3 ms 0 - 1"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.9, "0:59"), (61, "1:01"), (3600, "1:00:00"), (90061, "1-01:01:01"), (-5, "0:00")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"), (0.0, "0"), (0.4123, "0.412"), (51.44, "51.4"), (5123.4, "5123"), (12345, "12.3k"),
        (123456, "123k"), (1.5e6, "1.5M"), (2e9, "2G"), (float("nan"), "nan"), (float("inf"), "inf"), (3.0, "3"),
    ],
)  # fmt: skip
def test_quantity(value: float | None, text: str) -> None:
    assert quantity(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.0, "0 ms"), (0.0123, "12.3 ms"), (0.9994, "999 ms"), (0.9996, "1 s"), (99.96, "100 s")],
)
def test_short_time(seconds: float | None, text: str) -> None:
    assert short_time(seconds) == text


def test_node_list_is_in_natural_order_and_bounded() -> None:
    assert node_list(["n10", "n9", "n1"]) == "n1 n9 n10"
    assert node_list([f"n{i}" for i in range(20)], 3) == "n0 n1 n2 and 17 more"


@given(
    st.lists(st.tuples(st.text("abc ", max_size=12), st.text("xyz", max_size=30), st.text("pq ", max_size=60))),
    st.integers(20, 120),
)
def test_fitted_tables_never_exceed_their_width(rows: list[tuple[str, str, str]], width: int) -> None:
    table = Fitted([Column("A", most=6), Column("LONG TITLE", rank=1), Column("C", rank=2, right=True)], remark="R")
    for a, b, remark in rows:
        table.add(a, b, "1", remark=remark)
    text = drawn(table, width)
    assert all(len(line.rstrip()) <= width for line in text.splitlines())
    assert text.splitlines()[0].startswith("A")


def test_fitted_counts_cells() -> None:
    with pytest.raises(ValueError, match="1 cells for 2"):
        Fitted([Column("A"), Column("B")]).add("x")


def test_jobs_keep_their_colours_and_ink_is_readable() -> None:
    assert job_colours(["a", "b"]) == {"a": JOB_COLOURS[0], "b": JOB_COLOURS[1]}
    assert len(job_colours(map(str, range(20)))) == 20
    assert ink_on("#0072B2") == "#ffffff"
    assert ink_on("#E69F00") == "#000000"
