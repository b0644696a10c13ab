"""The main job, whole: four networks on the shipped trace, while its worker, agent and controller are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from sunfleck import api
from sunfleck.config import load
from sunfleck.core.errors import SunfleckError
from sunfleck.core.model import JobPhase
from tests.system.conftest import mentioning, until, workers_of

pytest.importorskip("torch", reason="the demo trains with torch")
pytest.importorskip("matplotlib", reason="the demo draws its report with matplotlib")

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(420)]


def test_the_demo_survives_kill_9_of_a_worker_an_agent_and_the_controller(tmp_path):
    home = tmp_path / "home"
    config = load({"pool": "demo", "home": str(home)})
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        demo = subprocess.Popen(
            [sys.executable, "-m", "sunfleck", "demo", "--json", "--home", str(home), "--report", "report.html"],
            cwd=tmp_path,
            stdout=out,
            stderr=err,
        )
        try:
            with api.Pool(config) as pool:

                def n_training():
                    try:
                        return sum(job.phase is JobPhase.RUNNING for job in pool.status(2.0).jobs)
                    except SunfleckError:
                        return 0

                until(lambda: n_training() >= 2, timeout_s=120, what="two jobs train")
                workers_of(pool)[-1].kill()
                time.sleep(3)
                agents = [p for p in mentioning(str(config.run_dir)) if "launch.agent" in " ".join(p.cmdline())]
                agents[0].kill()
                time.sleep(3)
                os.kill(api._endpoint_pid(config), signal.SIGKILL)
            code = demo.wait(timeout=380)
        finally:
            if demo.poll() is None:
                demo.send_signal(signal.SIGINT)
                demo.wait(timeout=60)
    story = (tmp_path / "err").read_text()
    assert code == 0, story
    (line,) = (tmp_path / "out").read_text().splitlines()
    result = json.loads(line)
    assert len(result["jobs"]) == 4
    for job in result["jobs"]:
        assert job["reached"] is True, job
        assert (job["samples_lost"], job["samples_repeated"]) == (0, 0), job
    assert result["reclaims"] > 10
    assert result["losses"] >= 1, "the killed agent's node"
    assert "new controller" in story
    assert 0 < result["node_seconds_used"] <= result["node_seconds_offered"]
    page = (tmp_path / "report.html").read_text()
    assert "<svg" in page
    assert "transformer" in page
    until(lambda: not mentioning(str(config.run_dir)), timeout_s=10, what="everything has ended")
