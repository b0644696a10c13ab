"""A real pool: controller, agents, zygote, workers. Everything a user does by hand, and everything that can die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from sunfleck import api
from sunfleck.cli.demo import read
from sunfleck.core.errors import InvalidRequest, PoolUnavailable, SunfleckError
from sunfleck.core.model import JobPhase
from tests.system.conftest import mentioning, until, workers_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]


def sunfleck(*args, timeout=60):
    return subprocess.run([sys.executable, "-m", "sunfleck", *args], capture_output=True, text=True, timeout=timeout)


def running(job):
    row = job.status()
    assert row.phase is not JobPhase.FAILED, row.reason
    return row.phase is JobPhase.RUNNING and row.step > 0


def clean(pool):
    """The ledger of every job: nothing lost, nothing repeated."""
    result, _ = read(pool.journal)
    for job in result.jobs:
        assert (job.samples_lost, job.samples_repeated) == (0, 0), job
    return result


def test_submit_train_and_finish_by_hand(pools, tiny):
    pool = pools.up()
    done = sunfleck("submit", str(tiny), "--nodes", "1:2", "--wait", "--", "--epochs", "4")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "j1"
    assert "finished" in sunfleck("jobs").stdout
    logs = sunfleck("logs", "j1").stdout
    assert "epoch 3" in logs
    assert "| epoch" in logs
    assert "node0" in sunfleck("nodes").stdout
    explained = sunfleck("explain", "train_tiny").stdout
    assert "measured" in explained
    assert sunfleck("status").returncode == 0
    result = clean(pool)
    assert result.jobs[0].samples == 4 * 512
    assert sunfleck("down").returncode == 0
    assert sunfleck("status").returncode == 3


def test_two_jobs_share_the_nodes_and_cancel_frees_them(pools, tiny):
    pool = pools.up()
    first = pool.submit(tiny, nodes=(1, 2), args=["--epochs", "1000"], name="first")
    until(lambda: running(first), what="first runs")
    second = pool.submit(tiny, nodes=(1, 2), args=["--epochs", "1000"], name="second")
    until(lambda: running(second), what="second runs")
    until(lambda: len(first.status().observed) == 1, what="first has shrunk")
    first.cancel()
    until(lambda: first.status().phase is JobPhase.CANCELLED, what="first is cancelled")
    until(lambda: len(second.status().observed) == 2, what="second has grown")
    clean(pool)


def test_a_script_that_fails_at_import_is_one_clear_reason(pools, tmp_path):
    script = tmp_path / "broken.py"
    script.write_text("import does_not_exist\n")
    pool = pools.up()
    row = pool.submit(script, nodes=(1, 2)).wait(timeout_s=60)
    assert row.phase is JobPhase.FAILED
    assert "does_not_exist" in row.reason
    done = sunfleck("submit", str(script), "--wait")
    assert done.returncode == 1
    assert "does_not_exist" in done.stderr


def test_a_script_that_raises_while_training_fails_the_job_and_nothing_else(pools, tiny, tmp_path):
    script = tmp_path / "raises.py"
    fault = "        if run.step > 20: raise ValueError('bad')"
    script.write_text(tiny.read_text().replace("        time.sleep(args.pause)", fault))
    pool = pools.up()
    other = pool.submit(tiny, nodes=(1, 1), args=["--epochs", "1000"])
    until(lambda: running(other), what="the other job runs")
    row = pool.submit(script, nodes=(1, 1)).wait(timeout_s=60)
    assert row.phase is JobPhase.FAILED
    assert "ValueError: bad" in row.reason
    assert running(other)


def test_a_script_that_never_trains_still_ends(pools, tmp_path):
    script = tmp_path / "hello.py"
    script.write_text("print('hello')\n")
    pool = pools.up()
    row = pool.submit(script, nodes=(1, 2)).wait(timeout_s=60)
    assert row.phase is JobPhase.FINISHED, row.reason


def test_requests_that_cannot_work_are_refused_at_once(pools, tiny):
    pool = pools.up()
    with pytest.raises(InvalidRequest, match="at most 2"):
        pool.submit(tiny, nodes=(3, 4))
    with pytest.raises(InvalidRequest, match="MIN <= MAX"):
        pool.submit(tiny, nodes=(2, 1))
    with pytest.raises(InvalidRequest, match="no script"):
        pool.submit("nowhere.py")
    done = sunfleck("submit", "nowhere.py")
    assert (done.returncode, "no script" in done.stderr) == (2, True)
    done = sunfleck("logs", "j9")
    assert (done.returncode, "sunfleck jobs" in done.stderr) == (2, True)
    with pytest.raises(SunfleckError, match="already up"):
        pools.up()


def test_two_pools_of_one_user_do_not_meet(pools, tiny):
    one, two = pools.up(pool="one"), pools.up(pool="two")
    one.submit(tiny, args=["--epochs", "1"])
    assert len(one.jobs()) == 1
    assert not two.jobs()


def test_a_port_in_use_is_said(pools):
    pool = pools.up(pool="one")
    import msgspec

    port = msgspec.json.decode((pool.directory / "endpoint.json").read_bytes())["agent_port"]
    with pytest.raises(SunfleckError, match=f"{port}"):
        pools.up(pool="two", port=port)


def test_down_keeps_jobs_and_up_goes_on(pools, tiny):
    pool = pools.up()
    job = pool.submit(tiny, nodes=(1, 2), args=["--epochs", "60"])
    until(lambda: running(job) and job.status().step > 40, what="some training")
    pool.down()
    step = read(pool.journal)[1].jobs[job.id].samples // 32
    assert not mentioning(str(pool.config.run_dir))
    again = pools.up()
    until(lambda: running(again.job(job.id)), what="the job goes on")
    assert again.job(job.id).status().step >= step, "it did not begin anew"
    row = again.job(job.id).wait(timeout_s=120)
    assert row.phase is JobPhase.FINISHED
    assert row.samples == 60 * 512
    clean(again)


def agents(pool):
    return [p for p in mentioning(str(pool.config.run_dir)) if "launch.agent" in " ".join(p.cmdline())]


def test_kill_9_of_the_controller_and_up_again(pools, tiny):
    pool = pools.up()
    job = pool.submit(tiny, nodes=(1, 2), args=["--epochs", "100"])
    until(lambda: running(job) and len(job.status().observed) == 2, what="it trains on both nodes")
    before = job.status().step
    os.kill(pools.pid(pool), signal.SIGKILL)
    with pytest.raises(PoolUnavailable):
        pool.call("ping", 1.0)
    again = pools.up()
    row = until(lambda: (r := again.job(job.id).status()).step > before + 50 and r, what="training goes on")
    assert len(row.observed) == 2
    _, view = read(pool.journal)
    assert view.jobs[job.id].n_restarts == 0, "no worker was restarted"
    assert again.job(job.id).wait(timeout_s=120).phase is JobPhase.FINISHED
    result = clean(again)
    assert result.jobs[0].samples == 100 * 512


def test_kill_9_of_an_agent(pools, tiny):
    pool = pools.up()
    job = pool.submit(tiny, nodes=(1, 2), args=["--epochs", "100"])
    until(lambda: running(job) and len(job.status().observed) == 2, what="it trains on both nodes")
    victim = agents(pool)[0]
    victim.kill()
    until(lambda: len(job.status().observed) == 1, what="the survivor goes on alone", timeout_s=20)
    until(lambda: len(job.status().observed) == 2, what="the node is back", timeout_s=60)
    assert job.wait(timeout_s=120).phase is JobPhase.FINISHED
    result = clean(pool)
    assert result.jobs[0].samples == 100 * 512


def test_kill_9_of_a_worker(pools, tiny):
    pool = pools.up()
    job = pool.submit(tiny, nodes=(1, 2), args=["--epochs", "100"])
    until(lambda: running(job) and len(job.status().observed) == 2, what="it trains on both nodes")
    workers_of(pool, job.id)[0].kill()
    before = job.status().step
    until(lambda: job.status().step > before + 50, what="training goes on")
    assert job.wait(timeout_s=120).phase is JobPhase.FINISHED
    result = clean(pool)
    assert result.jobs[0].samples == 100 * 512


def test_api_errors_without_a_pool(pools):
    with pytest.raises(PoolUnavailable, match="sunfleck up"):
        api.connect("nothing", timeout_s=0.5)
