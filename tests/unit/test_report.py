"""The HTML report: complete, self-contained, safe, deterministic; and clear when it cannot be made."""

from __future__ import annotations

import math
import random
import re
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest

from sunfleck.core import events as ev
from sunfleck.core.errors import SunfleckError
from sunfleck.core.model import JobSpec, NodeSpec, Plan, Profiling, Target
from sunfleck.observers.live import CurvePoint
from sunfleck.observers.report import measured_curves, node_picture, page, write
from sunfleck.observers.summary import summary
from sunfleck.observers.views import PoolView, fold

pytest.importorskip("matplotlib", reason="the report needs the plot extra")
pytest.importorskip("jinja2", reason="the report needs the plot extra")

Entry = tuple[float, ev.AnyEvent]
TARGETS = {
    "cnn": Target(metric="accuracy", value=0.95),
    "mlp": Target(metric="accuracy", value=0.93),
    "transformer": Target(metric="loss", value=1.6, at_least=False),
    "gru": Target(metric="loss", value=2.0, at_least=False),
}
SPEEDS = {"cnn": 900.0, "mlp": 4000.0, "transformer": 260.0, "gru": 500.0}


def busy_pool(
    n_nodes: int = 8, n_jobs: int = 4, length_s: int = 120, gap: int = 12, start_s: float = 0.0
) -> list[Entry]:
    """A made-up run: nodes come and go at random, an equal share decides who holds them, jobs learn and finish."""
    rng = random.Random(1)
    out: list[Entry] = [(start_s, ev.PoolStarted(pool="demo", version="0.1"))]
    names = list(SPEEDS)
    jobs = {f"j{i + 1}": f"{names[i % 4]}{'' if i < 4 else i}" for i in range(n_jobs)}
    pool: set[str] = set()
    holds: dict[str, list[str]] = {}
    samples = dict.fromkeys(jobs, 0)
    rounds = dict.fromkeys(jobs, 0)

    def share(now: float) -> None:
        live = list(holds)
        free = sorted(pool - {n for nodes in holds.values() for n in nodes}, key=lambda n: int(n[1:]))
        for i, job in enumerate(live):
            want = min(6, len(pool) // len(live) + (1 if i < len(pool) % len(live) else 0))
            before = list(holds[job])
            if len(before) > want:
                out.append((now, ev.WorkersLeft(job=job, nodes=tuple(before[want:]), planned=True)))
                free += before[want:]
                holds[job] = before[:want]
            while len(holds[job]) < want and free:
                holds[job].append(free.pop(0))
            if holds[job] and holds[job] != before:
                out.append(
                    (
                        now,
                        ev.RoundFormed(
                            job=job,
                            round=rounds[job],
                            nodes=tuple(holds[job]),
                            step=samples[job] // 64,
                            took_s=0.2,
                            stall_s=rng.uniform(0.01, 0.08) if before else None,
                            cause="rescale" if before else "start",
                        ),
                    )
                )
                rounds[job] += 1

    for half in range(length_s * 2):
        now = start_s + half / 2
        changed = False
        for i in range(1, n_nodes + 1):
            name = f"n{i}"
            if name not in pool and rng.random() < (0.5 if half < 6 else 0.03):
                pool.add(name)
                out.append((now, ev.NodesJoined(nodes=(NodeSpec(name=name, cpus=0.25),))))
                changed = True
            elif name in pool and half > 20 and rng.random() < 0.008:
                pool.remove(name)
                for job, nodes in holds.items():
                    if name in nodes:
                        out.append((now, ev.NodesReclaimed(nodes=(name,), grace_s=0.5)))
                        nodes.remove(name)
                        out.append((now + 0.06, ev.WorkersLeft(job=job, nodes=(name,), planned=True)))
                        break
                else:
                    out.append((now, ev.NodesReclaimed(nodes=(name,), grace_s=0.5)))
                out.append((now + 0.1, ev.NodesReleased(nodes=(name,), handback_s=rng.uniform(0.05, 0.2))))
                changed = True
        for k, (job, name) in enumerate(jobs.items()):
            if half == 6 + gap * k:
                target = TARGETS.get(name)
                out.append((now, ev.JobSubmitted(job=job, spec=JobSpec(name=name, max_nodes=6, target=target))))
                out.append((now, ev.DatasetDescribed(job=job, n_samples=1797, epoch_hash=1, batch=64)))
                holds[job] = []
                changed = True
        for job in list(holds):
            n = len(holds[job])
            if n:
                rate = SPEEDS[jobs[job].rstrip("0123456789")] * n / (1 + 0.12 * (n - 1)) * rng.uniform(0.96, 1.04)
                samples[job] += int(rate / 2)
                done = samples[job] / (SPEEDS[jobs[job].rstrip("0123456789")] * 130)
                metrics = {"loss": 0.2 + 2.6 * math.exp(-2.2 * done) * rng.uniform(0.95, 1.05)}
                if jobs[job] in ("cnn", "mlp"):
                    metrics["accuracy"] = 1 - 0.9 * math.exp(-3.4 * done)
                out.append(
                    (
                        now,
                        ev.Progress(
                            job=job,
                            round=rounds[job],
                            n_nodes=n,
                            step=samples[job] // 64,
                            epoch=0,
                            samples=samples[job],
                            dt_s=0.5,
                            samples_per_s=None if changed else rate,
                            metrics=metrics,
                        ),
                    )
                )
                if done > 1:
                    out.append((now, ev.JobFinished(job=job)))
                    del holds[job]
                    changed = True
        if changed and holds:
            profiling = None
            if half < 60:
                profiling = Profiling(job=next(iter(holds)), n_nodes=max(1, 4 - half // 10), since_s=now)
            plan = Plan(jobs=(), solver="knapsack", profiling=profiling)
            out.append((now, ev.PlanReady(generation=half, plan=plan, solve_s=0.0004)))
            share(now + 0.1)
    out.append((start_s + length_s, ev.PoolStopRequested()))
    return sorted(out, key=lambda entry: entry[0])


@pytest.fixture(scope="module")
def view() -> PoolView:
    return fold(busy_pool())


@pytest.fixture(scope="module")
def html(view: PoolView) -> str:
    return page(view, summary(view, {}, view.last_s, lambda spans, dataset: (0, 0)), title="Pool demo")


class Tags(HTMLParser):
    """Checks that tags nest, and collects what the page refers to."""

    VOID = ("meta", "br", "img", "link", "input", "hr")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href"):
                self.references.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(html: str) -> Tags:
    tags = Tags()
    tags.feed(html)
    tags.close()
    assert tags.open == []
    return tags


def test_page_stands_alone_and_its_ids_are_unique(html: str) -> None:
    tags = parsed(html)
    assert len(tags.ids) == len(set(tags.ids))
    assert all(reference.startswith("#") for reference in tags.references)  # nothing is fetched from anywhere
    assert {reference[1:] for reference in tags.references} <= set(tags.ids)
    assert set(re.findall(r"url\(#([^)]+)\)", html)) <= set(tags.ids)
    assert "<script" not in html
    assert "@import" not in html


def test_page_shows_numbers_jobs_pictures_and_definitions(view: PoolView, html: str) -> None:
    numbers = summary(view, {}, view.last_s)
    assert html.count("<svg") == 3
    for text in ("plan found in", "strip on top", "Pool demo", "How the numbers are defined", "Nodes over time"):
        assert text in html
    for text in ("cnn", "mlp", "transformer", "gru"):
        assert text in html
    assert f"{numbers.node_seconds_used:.0f} of {numbers.node_seconds_offered:.0f} node-seconds offered" in html
    assert "reclaimed" in html
    assert "targets reached" in html


def test_pictures_take_the_pages_ink(html: str) -> None:
    assert "currentColor" in html
    assert "#010203" not in html
    for svg in re.findall(r"<svg.*?</svg>", html, re.S):
        assert "DejaVu" not in svg
        assert "#ffffff" not in svg.split("</defs>")[0]  # no white ground


def test_same_view_same_page(view: PoolView, html: str) -> None:
    assert page(view, summary(view, {}, view.last_s, lambda spans, dataset: (0, 0)), title="Pool demo") == html


def test_node_picture_has_one_bar_per_hold(view: PoolView) -> None:
    svg = ET.fromstring(node_picture(view))
    drawn = sum(
        len(re.findall(r"M ", path.attrib["d"]))
        for group in svg.iter("{http://www.w3.org/2000/svg}g")
        if group.attrib.get("id", "").startswith("PolyCollection")
        for path in group.iter("{http://www.w3.org/2000/svg}path")
    )
    n_holds = sum(len(node.holds) for node in view.nodes.values())
    n_stays = sum(len(node.presences) for node in view.nodes.values())
    assert n_holds > 20
    assert drawn == n_holds + 2 * n_stays  # a stay is filled and hatched


def test_node_picture_as_png(view: PoolView) -> None:
    assert node_picture(view, form="png").startswith(b"\x89PNG")


def test_names_cannot_inject_markup() -> None:
    bad = '<img src=x onerror=alert(1)>&"'
    view = fold(
        [
            (0.0, ev.PoolStarted(pool=bad, version="1")),
            (0.0, ev.NodesJoined(nodes=(NodeSpec(name="n1"),))),
            (0.0, ev.JobSubmitted(job="j1", spec=JobSpec(name=bad))),
            (1.0, ev.RoundFormed(job="j1", round=0, nodes=("n1",), step=0, took_s=1.0, cause="start")),
            (2.0, ev.Progress(job="j1", round=0, n_nodes=1, step=1, epoch=0, samples=8, dt_s=1.0, samples_per_s=8.0,
                              metrics={bad: 1.0, "loss": float("nan")})),
            (9.0, ev.JobCrashed(job="j1", error=f"{bad}\nline two")),
        ]
    )  # fmt: skip
    html = page(view, summary(view, {}, 9.0), notes=(bad,))
    parsed(html)
    assert "<img" not in html
    assert "line two" in html


def test_dollar_signs_are_no_formulas() -> None:
    view = fold(
        [
            (0.0, ev.NodesJoined(nodes=(NodeSpec(name="n$1"),))),
            (0.0, ev.JobSubmitted(job="j1", spec=JobSpec(name="a$\\frac$b"))),
            (0.0, ev.RoundFormed(job="j1", round=0, nodes=("n$1",), step=0, took_s=1.0, cause="start")),
            (1.0, ev.Progress(job="j1", round=0, n_nodes=1, step=1, epoch=0, samples=8, dt_s=1.0, samples_per_s=8.0)),
        ]
    )
    assert "a$\\frac$b" in page(view, summary(view, {}, 5.0), now_s=5.0)


@pytest.mark.parametrize(
    "entries",
    [
        [],
        [(0.0, ev.PoolStarted(pool="p", version="1"))],
        [(5.0, ev.NodesJoined(nodes=(NodeSpec(name="n1"),)))],
        [(5.0, ev.JobSubmitted(job="j", spec=JobSpec(name="a")))],
    ],
    ids=["nothing", "started", "one node", "one job"],
)
def test_page_of_next_to_nothing(entries: list[Entry]) -> None:
    view = fold(entries)
    parsed(page(view, summary(view, {}, view.last_s)))


def test_many_jobs_and_nodes_stay_readable() -> None:
    view = fold(busy_pool(n_nodes=200, n_jobs=40, length_s=30, gap=1, start_s=1.7e9))
    html = page(view, summary(view, {}, view.last_s))
    parsed(html)
    assert "200 nodes" in html
    assert "more jobs are only in the table" in html
    assert "2023-11-14 22:13:20 UTC" in html


def test_given_curves_show_assumed_points(view: PoolView) -> None:
    curve = (
        CurvePoint(n_nodes=1, samples_per_s=100.0, measured=True, stderr_per_s=1.0, n_reports=5),
        CurvePoint(n_nodes=4, samples_per_s=350.0, measured=False),
    )
    html = page(view, summary(view, {}, view.last_s), curves={"j1": curve, "unknown": curve})
    rows = re.findall(r"<tr><td>cnn</td><td>(\d+)</td><td>(\d+)</td>.*?>(measured|assumed)<", html, re.S)
    assert rows == [("1", "100", "measured"), ("4", "350", "assumed")]


def test_measured_curves_are_means_of_settled_reports() -> None:
    def report(n_nodes: int, rate: float | None) -> ev.Progress:
        return ev.Progress(job="j", round=0, n_nodes=n_nodes, step=1, epoch=0, samples=1, dt_s=1.0, samples_per_s=rate)

    view = fold(
        [
            (0.0, ev.JobSubmitted(job="j", spec=JobSpec(name="a"))),
            (1.0, report(2, 10.0)),
            (2.0, report(2, 14.0)),
            (3.0, report(1, 7.0)),
            (4.0, report(1, None)),
        ]
    )
    one, two = measured_curves(view)["j"]
    assert (one.n_nodes, one.samples_per_s, one.stderr_per_s, one.n_reports) == (1, 7.0, None, 1)
    assert (two.n_nodes, two.samples_per_s, two.n_reports) == (2, 12.0, 2)
    assert two.stderr_per_s == pytest.approx(2.0)


@pytest.fixture
def tiny() -> PoolView:
    return fold([(0.0, ev.PoolStarted(pool="p", version="1")), (1.0, ev.NodesJoined(nodes=(NodeSpec(name="n1"),)))])


def test_write_makes_the_folder_and_leaves_no_draft(tiny: PoolView, tmp_path: Path) -> None:
    path = write(tmp_path / "out" / "r.html", tiny, summary(tiny, {}, tiny.last_s), title="T")
    assert path.read_text().startswith("<!doctype html>")
    assert [p.name for p in path.parent.iterdir()] == ["r.html"]


def test_write_where_nothing_can_be_written(tiny: PoolView, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SunfleckError, match="choose another path"):
        write(tmp_path / "file" / "r.html", tiny, summary(tiny, {}, tiny.last_s))
    (tmp_path / "folder").mkdir()
    with pytest.raises(SunfleckError, match="choose another path"):
        write(tmp_path / "folder", tiny, summary(tiny, {}, tiny.last_s))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


@pytest.mark.parametrize("missing", ["matplotlib", "jinja2"])
def test_missing_libraries_are_named_with_the_fix(
    view: PoolView, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)  # makes its import fail
    with pytest.raises(SunfleckError, match=r"pip install 'sunfleck\[plot\]'"):
        page(view, summary(view, {}, view.last_s))
