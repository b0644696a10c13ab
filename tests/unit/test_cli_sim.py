"""`sunfleck sim` and `sunfleck estimate`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from sunfleck.cli import cli
from sunfleck.core.errors import InvalidRequest
from sunfleck.sim.page import sliced
from sunfleck.sim.readers.intervals import format_intervals
from sunfleck.sim.synthetic import generate

SUMMIT = Path(os.environ.get("SUNFLECK_DATA") or Path(__file__).parents[2].parent / "shared" / "data")
SUMMIT = SUMMIT / "traces" / "summit-bftrainer"
KEYS = {
    "policy", "U", "H", "E", "samples", "node_use", "lost_rescale", "lost_reclaim", "rescales", "jobs_done",
    "plan_ms_p50", "plan_ms_p99", "profile_share",
}  # fmt: skip


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "idle.csv"
    path.write_text(format_intervals(generate(n_nodes=30, duration_s=20_000, seed=8, idle_share=0.3)))
    return str(path)


def run(*args: str) -> str:
    result = CliRunner().invoke(cli, list(args), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("semantics", ["elastic", "published"])
def test_one_json_line_per_policy(trace: str, semantics: str) -> None:
    args = ["sim", "--trace", trace, "--jobs", "nas:20", "--semantics", semantics, "--max-running", "5", "--json"]
    out = run(*args, "--policy", "optimum,equal-share,freetrain-linear,malletrain,rigid,greedy")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["policy"] for row in rows] == [
        "optimum", "equal-share", "freetrain-linear", "malletrain", "rigid", "greedy",
    ]  # fmt: skip
    for row in rows:
        assert set(row) >= KEYS
        assert row["samples"] > 0
        assert 0 < row["H"] < 1.02
    assert run(*args).splitlines()[0].split('"plan_ms')[0] == out.splitlines()[0].split('"plan_ms')[0]


def test_a_table_without_json_and_options_that_cut_the_trace(trace: str) -> None:
    out = run(
        "sim", "--trace", trace, "--jobs", "hpo:9", "--nodes", "12", "--days", "0.1", "--start", "100",
        "--rescale-up", "3", "--rescale-down", "1", "--t-fwd", "auto", "--seed", "4",
    )  # fmt: skip
    assert out.splitlines()[0].split()[0] == "policy"
    assert out.splitlines()[1].split()[0] == "optimum"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--policy", "best"], "the policies are"),
        (["--nodes", "31"], "the trace has 30 nodes"),
        (["--start", "1e9"], "earlier --start"),
        (["--t-fwd", "soon"], "--t-fwd"),
        (["--rescheduled"], "SWF"),
    ],
)
def test_wishes_that_cannot_be(trace: str, args: list[str], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        run("sim", "--trace", trace, "--jobs", "hpo:3", *args)


def test_estimate_tells_the_holes_and_what_they_are_good_for(trace: str) -> None:
    page = run("estimate", "--trace", trace)
    assert "node-hours" in page
    assert "E = " in page
    row = json.loads(run("estimate", "--trace", trace, "--json"))
    assert row["n_nodes"] == 30
    assert 0.5 < row["trained"]["E"] <= 1.0
    with pytest.raises(InvalidRequest, match="exactly one"):
        run("estimate")


def test_the_report_has_the_figures_and_a_picture_of_each_policy(trace: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    out = tmp_path / "report.html"
    run("sim", "--trace", trace, "--jobs", "nas:30", "--policy", "optimum,equal-share", "--report", str(out))
    text = out.read_text()
    assert text.count("<svg") == 4
    assert "<td>equal-share</td>" in text
    with pytest.raises(InvalidRequest, match="cannot write"):
        run("sim", "--trace", trace, "--jobs", "hpo:2", "--report", str(tmp_path / "absent" / "report.html"))


def test_pictures_show_averages_over_time() -> None:
    values = sliced([0.0, 30.0], [2.0, 4.0], 0.0, 60.0)
    assert values[0] == pytest.approx(2.0)
    assert values[-1] == pytest.approx(4.0)
    assert values.mean() == pytest.approx(3.0)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.skipif(not SUMMIT.is_dir(), reason=f"no Summit trace at {SUMMIT}")
def test_the_published_figure_is_reproduced() -> None:
    out = run(
        "sim", "--trace", str(SUMMIT), "--jobs", "hpo:1000", "--policy", "optimum", "--nodes", "1024", "--days", "7",
        "--start", "72743", "--max-running", "10", "--rescale-up", "18", "--rescale-down", "12", "--t-fwd", "120",
        "--semantics", "published", "--json",
    )  # fmt: skip
    assert json.loads(out)["U"] == pytest.approx(0.835, abs=0.003)
