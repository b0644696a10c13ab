"""Real pieces of a pool, in a directory of their own, for tests that start processes. Nothing here pretends."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil

from sunfleck.core.model import NodeSpec, Program
from sunfleck.executor.launch import wire
from sunfleck.executor.launch.fabric import Fabric
from sunfleck.executor.launch.keys import ensure_keys
from sunfleck.executor.launch.wire import WorkerId

T = TypeVar("T")
PATIENCE_S = 30.0
"""How long a condition may take to come true. The machine may be busy; a test that passes never waits so long."""
TEST_MARK = "SUNFLECK_TEST_MARK"


def wait_for(condition: Callable[[], T], what: str = "", timeout_s: float = PATIENCE_S) -> T:
    """Poll until `condition` is truthy, and return what it was."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"did not happen within {timeout_s:g} s: {what or condition}")
        time.sleep(0.005)


def marked(mark: str) -> list[psutil.Process]:
    """Living processes whose environment carries this test's mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(TEST_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return [process for process in found if process.pid != os.getpid()]


@contextmanager
def no_leaks() -> Iterator[str]:
    """Every process started inside must be gone soon after; those that are not are killed, and fail the test."""
    mark = uuid.uuid4().hex
    outer = os.environ.get(TEST_MARK)
    os.environ[TEST_MARK] = mark
    try:
        yield mark
    finally:
        os.environ.pop(TEST_MARK)
        if outer is not None:
            os.environ[TEST_MARK] = outer
        deadline = time.monotonic() + 10.0
        while (left := marked(mark)) and time.monotonic() < deadline:
            time.sleep(0.02)
        said = [f"{p.pid}: {' '.join(p.cmdline())[:200]}" for p in left]
        for process in left:
            process.kill()
        assert not said, f"leaked processes: {said}"


class Listener:
    """Records what a fabric reports."""

    def __init__(self) -> None:
        self.hellos: list[wire.Hello] = []
        self.messages: list[tuple[str, Any]] = []
        self.lost: list[tuple[str, str]] = []

    def on_agent_joined(self, hello: wire.Hello) -> None:
        self.hellos.append(hello)

    def on_agent_message(self, node: str, message: Any) -> None:
        self.messages.append((node, message))

    def on_agent_lost(self, node: str, reason: str) -> None:
        self.lost.append((node, reason))

    def of(self, kind: type[T], node: str | None = None) -> list[T]:
        return [m for name, m in list(self.messages) if isinstance(m, kind) and node in (None, name)]

    def said(self) -> list[Any]:
        """Payloads of workers, in order."""
        return [message.payload for message in self.of(wire.FromWorker)]


class Pool:
    """A fabric with a listener, in fresh directories; agents on request."""

    def __init__(self, **options: Any) -> None:
        self.pool_dir = Path(tempfile.mkdtemp(prefix="sf-pool-"))
        self.run_dir = Path(tempfile.mkdtemp(prefix="sf-run-"))
        self.endpoint_path = self.pool_dir / "endpoint.json"
        self.options = {"heartbeat_s": 0.2, "lost_after_s": 4.0, "patience_s": 20.0} | options
        self.agents: list[subprocess.Popen[bytes]] = []
        self.start_fabric()

    def start_fabric(self) -> None:
        self.fabric = Fabric(ensure_keys(self.pool_dir), self.endpoint_path, **self.options)
        self.listener = Listener()
        self.fabric.subscribe(self.listener)
        self.fabric.start()

    def close(self) -> None:
        for agent in self.agents:
            if agent.poll() is None:
                agent.terminate()
        for agent in self.agents:
            try:
                agent.wait(10)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()
        self.fabric.stop()
        end_zygotes(self.run_dir)
        shutil.rmtree(self.pool_dir, ignore_errors=True)
        shutil.rmtree(self.run_dir, ignore_errors=True)

    def start_agent(self, node: str = "node0", *words: str) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "sunfleck.executor.launch.agent", "--endpoint", str(self.endpoint_path)]
        argv += ["--run-dir", str(self.run_dir), "--node", msgspec.json.encode(NodeSpec(name=node)).decode(), *words]
        agent = subprocess.Popen(argv, start_new_session=True)
        self.agents.append(agent)
        return agent

    def agent(self, node: str = "node0", *words: str) -> subprocess.Popen[bytes]:
        """A started agent that has said Hello."""
        n = len(self.listener.hellos)
        started = self.start_agent(node, *words)
        wait_for(lambda: len(self.listener.hellos) > n, "Hello")
        return started

    def in_fabric(self, action: Callable[[], T]) -> T:
        """Run `action` in the fabric's thread and return what it returned."""
        done, result = threading.Event(), []

        def run() -> None:
            result.append(action())
            done.set()

        self.fabric.post(run)
        assert done.wait(PATIENCE_S)
        return result[0]

    def send(self, node: str, message: Any) -> None:
        self.in_fabric(lambda: self.fabric.send(node, message))

    def start_worker(
        self, text: str, node: str = "node0", restart: int = 0, warm: tuple[str, ...] = (), **program: Any
    ) -> WorkerId:
        """Run this program text on a node."""
        worker = WorkerId(job="job", node=node, restart=restart)
        script = self.pool_dir / f"program{restart}.py"
        script.write_text(text)
        env = {"SUNFLECK_WORKER": str(worker), "SUNFLECK_JOB": "job", "SUNFLECK_NODE": node}
        self.send(
            node,
            wire.StartWorker(
                worker=worker,
                program=Program(script=str(script), warm=warm, cwd=str(self.pool_dir), **program),
                env=env,
                log_path=str(self.log_path(worker)),
            ),
        )
        return worker

    def log_path(self, worker: WorkerId) -> Path:
        return self.pool_dir / f"{worker}.log"

    def log(self, worker: WorkerId) -> str:
        path = self.log_path(worker)
        return path.read_text(errors="replace") if path.exists() else ""

    def exit_of(self, worker: WorkerId) -> wire.WorkerExited:
        return wait_for(
            lambda: next((m for m in self.listener.of(wire.WorkerExited) if m.worker == worker), None),
            f"exit of {worker}",
        )


def alive(pid: int) -> bool:
    """Whether the process exists; a zombie that nobody has waited for yet does not count."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end_zygotes(run_dir: Path) -> None:
    for pid in zygote_pids(run_dir):
        try:
            process = psutil.Process(pid)
            if str(run_dir) in " ".join(process.cmdline()):
                process.terminate()
                wait_for(lambda process=process: not alive(process.pid), "end of the zygote")
        except psutil.Error:
            continue


def zygote_pids(run_dir: Path) -> list[int]:
    return [int(path.read_text()) for path in run_dir.glob("z-*.pid")]


@contextmanager
def real_pool(**options: Any) -> Iterator[Pool]:
    with no_leaks():
        pool = Pool(**options)
        try:
            yield pool
        finally:
            pool.close()
