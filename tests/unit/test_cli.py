"""Command line without a pool: help, parsing, and one clear line for each mistake."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sunfleck.cli import COMMANDS


def run(*args, home, **env):
    return subprocess.run(
        [sys.executable, "-m", "sunfleck", *args],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "SUNFLECK_HOME": str(home), **env},
    )


def test_help_lists_every_command(tmp_path):
    done = run("--help", home=tmp_path)
    assert done.returncode == 0
    for name in COMMANDS:
        assert name in done.stdout


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help(name, tmp_path):
    done = run(name, "--help", home=tmp_path)
    assert done.returncode == 0
    assert "Usage" in done.stdout


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["status"], 3, "sunfleck up"),
        (["submit", "none.py"], 3, "sunfleck up"),
        (["jobs", "--pool", "other"], 3, "other"),
        (["submit", "x.py", "--nodes", "8:a"], 2, "1:8"),
        (["submit", "x.py", "--epochs", "3"], 2, "after `--`"),
        (["submit", "x.py", "--target", "accuracy=1"], 2, "accuracy>=0.97"),
        (["submit", "x.py", "--target", "accuracy>=--"], 2, "accuracy>=0.97"),
        (["submit", "x.py", "--target", "accuracy>=."], 2, "accuracy>=0.97"),
        (["up", "--node-cpus", "nan"], 2, "node_cpus must be a finite number"),
        (["up", "--t-fwd-s", "inf"], 2, "t_fwd_s must be a finite number"),
        (["up", "--nodes", "0"], 2, "nodes"),
        (["up", "--node-cpus", "-1"], 2, "node-cpus"),
        (["up", "--pool", "a/b"], 2, "cannot name a pool"),
        (["up", "--trace", "/does/not/exist.csv"], None, "exist"),
        (["up", "--policy", "magic"], None, "optimum"),
        (["frobnicate"], 2, "frobnicate"),
        (["status", "--frobnicate"], 2, "frobnicate"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_fix(args, code, says, tmp_path):
    done = run(*args, home=tmp_path)
    assert done.returncode == code if code is not None else done.returncode != 0
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("sunfleck: ")
    assert says in lines[0]
    assert "Traceback" not in done.stderr


def test_a_home_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").touch()
    done = run("up", home=tmp_path / "file" / "below")
    assert done.returncode == 2
    assert "--home" in done.stderr
