"""The demo's training scripts learn, alone in one process as any script, and are what the job list says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="training needs torch")
pytest.importorskip("sklearn", reason="the digits come with scikit-learn")

from sunfleck.demo.data import digits, running_sums, text
from sunfleck.demo.jobs import demo_jobs

REPO = Path(__file__).parents[2]

QUICK = {
    # One or two epochs each: arguments, metric, and what it must at least have reached by then.
    "mlp": (["--epochs", "4", "--lr", "0.05", "--batch", "256"], "accuracy", 0.5, True),
    "cnn": (["--epochs", "2", "--lr", "0.05", "--batch", "128"], "accuracy", 0.5, True),
    "transformer": (["--epochs", "2", "--chars", "60000", "--batch", "16"], "test_loss", 2.6, False),
    "gru": (["--epochs", "3", "--sequences", "2048", "--lr", "0.01", "--batch", "64"], "test_error", 0.6, False),
}

MAIN = """
import json, runpy, sys
import torch
torch.set_num_threads(1)
import sunfleck.elastic
first = sunfleck.elastic.init
def init(*args, **kwargs):
    run = first(*args, **kwargs)
    told = run.report
    def report(**metrics):
        if "loss" not in metrics:
            print("REPORT", json.dumps({k: float(v) for k, v in metrics.items()}), flush=True)
        told(**metrics)
    run.report = report
    return run
sunfleck.elastic.init = init
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=False)
"""


def run_alone(job: str, args: list[str], timeout_s: float = 100.0) -> list[dict[str, float]]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("SUNFLECK_")}
    env["PYTHONPATH"] = str(REPO / "src")
    done = subprocess.run(
        [sys.executable, "-c", MAIN, f"sunfleck.demo.train_{job}", *args],
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in re.findall(r"^REPORT (.*)$", done.stdout, re.M)]


@pytest.mark.system
@pytest.mark.parametrize("job", QUICK)
def test_a_script_alone_learns(job: str) -> None:
    args, metric, bound, higher = QUICK[job]
    reports = run_alone(job, [*args, "--target", "2" if higher else "-1"])
    values = [r[metric] for r in reports]
    assert len(values) == int(args[1])
    assert values[-1] > bound if higher else values[-1] < bound
    assert (values[-1] > values[0]) == higher


@pytest.mark.system
def test_a_script_stops_at_its_target() -> None:
    reports = run_alone("mlp", ["--epochs", "50", "--lr", "0.05", "--batch", "256", "--target", "0.3"])
    values = [r["accuracy"] for r in reports]
    assert values[-1] >= 0.3
    assert all(v < 0.3 for v in values[:-1])
    assert len(values) < 20


def test_the_job_list_names_scripts_that_exist_and_a_queue_in_order() -> None:
    jobs = demo_jobs(seed=3)
    assert len(jobs) == 4
    assert [j.arrives_s for j in jobs] == sorted(j.arrives_s for j in jobs)
    for job in jobs:
        assert job.spec.program is not None
        path = REPO / "src" / Path(*job.spec.program.module.split("."))
        assert path.with_suffix(".py").is_file()
        target = job.spec.target
        assert target is not None
        assert job.spec.program.args == ("--target", str(target.value), "--seed", "3")


def test_data_are_the_same_each_time_and_test_data_are_kept_apart() -> None:
    train, test = digits()
    assert len(train) + len(test) == 9 * 1797
    assert train[0][0].shape == (1, 8, 8)
    assert 0.0 <= float(train.tensors[0].min()) <= float(train.tensors[0].max()) <= 1.0
    assert set(test.tensors[1].tolist()) == set(range(10))
    # The middle one of each nine is the digit as it was; no test digit is among the training digits.
    seen = {bytes(image.numpy().tobytes()) for image in train.tensors[0][4::9]}
    kept = {bytes(image.numpy().tobytes()) for image in test.tensors[0][4::9]}
    assert not seen & kept
    text_train, text_test, alphabet = text(32)
    assert text_train.tensors[0].shape[1] == text_test.tensors[0].shape[1] == 33
    assert int(text_train.tensors[0].max()) < alphabet < 128
    first, second = running_sums(10, 16, 5), running_sums(10, 16, 5)
    assert first.tensors[0].equal(second.tensors[0])
    pairs, sums = first.tensors
    assert (pairs[:, :, 0] * pairs[:, :, 1]).sum(1).allclose(sums[:, -1])
