"""Real pools on this machine. Every pool gets its own home; whatever a test leaves behind fails it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from sunfleck import api
from sunfleck.core.errors import SunfleckError

SCRIPTS = Path(__file__).parent / "scripts"


def until(condition, timeout_s=60.0, what="the condition", pause_s=0.05):
    """Poll until `condition()` is true and return what it gave; fail the test after timeout_s."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"{what} did not come true within {timeout_s:g} s"
        time.sleep(pause_s)


def mentioning(text):
    """Live processes whose command line or environment names `text`."""
    found = []
    for process in psutil.process_iter(["pid", "status"]):
        if process.pid == os.getpid() or process.info["status"] == psutil.STATUS_ZOMBIE:
            continue
        try:
            words = [*process.cmdline(), *process.environ().values()]
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if any(text in word for word in words):
            found.append(process)
    return found


def workers_of(pool, job="j"):
    """Processes whose output goes to the logs of the pool's jobs that begin with `job`: its workers, oldest first."""
    logs = f"{pool.config.pool_dir}/jobs/{job}"
    found = []
    for process in psutil.process_iter():
        try:
            if os.readlink(f"/proc/{process.pid}/fd/1").startswith(logs):
                found.append(process)
        except OSError:
            continue
    return sorted(found, key=lambda p: p.create_time())


class Pools:
    """Starts pools in one home and ends them all."""

    def __init__(self, home):
        self.home = str(home)
        self.started = []

    def up(self, fresh=False, **flags):
        settings = {"nodes": 2, "node_cpus": 0.5, "home": self.home, **flags}
        pool = api.up(settings, fresh=fresh, timeout_s=60)
        self.started.append(pool)
        return pool

    def pid(self, pool):
        return api._endpoint_pid(pool.config)

    def close(self):
        for pool in self.started:
            try:
                if self.pid(pool):
                    pool.down()
            except SunfleckError:
                pass
            pool.close()
        run_dirs = {str(pool.config.run_dir) for pool in self.started}

        def left():
            return [p for d in run_dirs for p in mentioning(d)] + mentioning(self.home)

        deadline = time.monotonic() + 10
        while left() and time.monotonic() < deadline:
            time.sleep(0.1)
        survivors = left()
        story = [f"{p.pid} {p.name()} {' '.join(p.cmdline())[:150]}" for p in survivors if p.is_running()]
        for process in survivors:
            process.kill()
        assert not story, f"left behind: {story}"


@pytest.fixture
def pools(tmp_path, monkeypatch):
    monkeypatch.setenv("SUNFLECK_HOME", str(tmp_path / "home"))
    found = Pools(tmp_path / "home")
    yield found
    found.close()


@pytest.fixture(scope="session")
def tiny():
    return SCRIPTS / "train_tiny.py"
