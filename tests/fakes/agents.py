"""Agents in one process, for tests of the elastic runtime: real workers on real sockets, without network or cgroups.

`FakeAgents` implements executor.base.Agents with one thread. Workers are forked from a nursery, a process that has
imported torch once, so that a test with many workers takes seconds; each has its own process group, as with the real
agent. Faults are injected from outside: `kill`, `stop_node`, `pause`.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sunfleck.core.model import NodeSpec
from sunfleck.executor.base import AgentListener
from sunfleck.executor.launch.wire import (
    PROTOCOL,
    AgentMessage,
    ControllerMessage,
    FromWorker,
    Hello,
    StartWorker,
    StopWorker,
    ToWorker,
    WorkerExited,
    WorkerId,
    WorkerStarted,
    decode_from_worker,
    encode,
)

NURSERY = r"""
import gc, json, os, runpy, signal, socket, sys, traceback
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
import torch, torch._dynamo, torch.nn.parallel, numpy
torch.set_num_threads(1)
import sunfleck.elastic
gc.collect(); gc.freeze()
sock = socket.socket(fileno=int(sys.argv[1]))
signal.signal(signal.SIGCHLD, lambda *_: reap())
def reap():
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        send({"exited": pid, "code": os.waitstatus_to_exitcode(status)})
def send(message):
    try:
        sock.send(json.dumps(message).encode())
    except OSError:
        os._exit(0)
send({"up": True})
while True:
    try:
        packet = sock.recv(1 << 16)
    except InterruptedError:
        continue
    if not packet:
        os._exit(0)
    order = json.loads(packet)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            sock.close()
            os.setpgid(0, 0)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(log, 1); os.dup2(log, 2)
            sys.stdout = open(1, "w", buffering=1, closefd=False)
            sys.stderr = open(2, "w", buffering=1, closefd=False)
            os.environ.update(order["env"])
            sys.argv = [order["script"] or order["module"], *order["args"]]
            if order["module"]:
                runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(order["script"], run_name="__main__")
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            import atexit
            atexit._run_exitfuncs()
            sys.stdout.flush(); sys.stderr.flush()
            os._exit(code)
    try:
        os.setpgid(pid, pid)
    except OSError:
        pass
    send({"started": pid, "id": order["id"]})
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
"""


class FakeAgents:
    """Nodes `names` on this machine, each said Hello for as soon as somebody listens."""

    def __init__(self, names: Sequence[str], cpus: float = 1.0) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="sunfleck-test-"))
        self.nodes = {name: NodeSpec(name=name, cpus=cpus) for name in names}
        self.pids: dict[WorkerId, int] = {}
        self.exits: list[tuple[WorkerId, int, float]] = []
        self.sent: list[tuple[float, str, Any]] = []
        self._logs: dict[WorkerId, str] = {}
        self._by_pid: dict[int, WorkerId] = {}
        self._starting: dict[str, WorkerId] = {}
        self._sockets: dict[str, socket.socket] = {}
        self._listener: AgentListener | None = None
        self._timers: list[tuple[float, int, _Timer]] = []
        self._count = itertools.count()
        self._posted: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._selector.register(self._wake_in, selectors.EVENT_READ, self._drain_wake)
        self._path = str(self._folder / "agent.sock")
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.bind(self._path)
        self._server.listen(64)
        self._selector.register(self._server, selectors.EVENT_READ, self._accept)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = {k: v for k, v in os.environ.items() if not k.startswith("SUNFLECK_")}
        env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2] / "src"), env.get("PYTHONPATH", "")])
        self._nursery = subprocess.Popen(
            [sys.executable, "-c", NURSERY, str(theirs.fileno())], pass_fds=[theirs.fileno()], env=env
        )
        theirs.close()
        self._to_nursery = ours
        self._up = threading.Event()
        self._selector.register(ours, selectors.EVENT_READ, self._from_nursery)
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="fake-agents", daemon=True)
        self._thread.start()
        assert self._up.wait(60), "the nursery did not come up"

    # -- Agents --------------------------------------------------------------------------------------------------------

    def subscribe(self, listener: AgentListener) -> None:
        def join() -> None:
            self._listener = listener
            for spec in self.nodes.values():
                here = tuple(w for w in self.pids if w.node == spec.name)
                listener.on_agent_joined(Hello(protocol=PROTOCOL, node=spec, agent_pid=os.getpid(), workers=here))

        self.post(join)

    def post(self, action: Callable[[], None]) -> None:
        with self._lock:
            self._posted.append(action)
        try:
            self._wake_out.send(b"x")
        except OSError:
            pass

    def send(self, node: str, message: ControllerMessage) -> None:
        if node not in self.nodes:
            return
        self.sent.append((self.now(), node, message))
        match message:
            case StartWorker():
                self._start(message)
            case ToWorker(worker=worker, payload=payload):
                connection = self._sockets.get(str(worker))
                if connection is not None:
                    try:
                        connection.send(encode(payload))
                    except OSError:
                        pass
            case StopWorker(worker=worker):
                self._signal(worker, signal.SIGKILL if message.grace_s == 0 else signal.SIGTERM)

    def call_later(self, delay_s: float, action: Callable[[], None]) -> _Timer:
        timer = _Timer(action)
        heapq.heappush(self._timers, (self.now() + delay_s, next(self._count), timer))
        return timer

    def now(self) -> float:
        return time.monotonic()

    # -- faults --------------------------------------------------------------------------------------------------------

    def silence(self) -> None:
        """The controller dies: nobody listens any more, workers go on."""
        done = threading.Event()

        def leave() -> None:
            self._listener = None
            self._timers.clear()
            done.set()

        self.post(leave)
        done.wait(5)

    def kill(self, worker: WorkerId, number: int = signal.SIGKILL) -> None:
        self._signal(worker, number)

    def lose_node(self, node: str) -> None:
        """The node is gone at once, with everything on it."""
        done = threading.Event()

        def lose() -> None:
            self.nodes.pop(node, None)
            for worker in [w for w in self.pids if w.node == node]:
                self._signal(worker, signal.SIGKILL)
            if self._listener is not None:
                self._listener.on_agent_lost(node, "test")
            done.set()

        self.post(lose)
        done.wait(5)

    def workers(self, job: str) -> list[WorkerId]:
        return sorted((w for w in list(self.pids) if w.job == job), key=str)

    def log(self, worker: WorkerId) -> str:
        try:
            return Path(self._logs[worker]).read_text()
        except (KeyError, OSError):
            return ""

    def close(self) -> None:
        """End every process and thread."""
        self._stopped = True
        self.post(lambda: None)
        self._thread.join(5)
        for worker in list(self.pids):
            self._signal(worker, signal.SIGKILL)
        self._to_nursery.close()
        self._nursery.wait(10)
        for connection in self._sockets.values():
            connection.close()
        self._server.close()
        self._wake_in.close()
        self._wake_out.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopped:
            timeout = max(0.0, self._timers[0][0] - self.now()) if self._timers else 1.0
            for key, _ in self._selector.select(min(timeout, 1.0)):
                key.data()
            with self._lock:
                posted, self._posted = self._posted, []
            for action in posted:
                action()
            while self._timers and self._timers[0][0] <= self.now():
                timer = heapq.heappop(self._timers)[2]
                if not timer.cancelled:
                    timer.action()

    def _drain_wake(self) -> None:
        try:
            self._wake_in.recv(4096)
        except BlockingIOError:
            pass

    def _accept(self) -> None:
        connection, _ = self._server.accept()
        try:
            name = connection.recv(1024).decode()
        except OSError:
            name = ""
        if not name:  # it died before it could say who it is
            connection.close()
            return
        pid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        assert pid > 0
        connection.setblocking(False)
        self._sockets[name] = connection
        job, _, rest = name.partition("@")
        node, _, restart = rest.partition("#")
        worker = WorkerId(job=job, node=node, restart=int(restart))
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._hear(worker, connection))

    def _hear(self, worker: WorkerId, connection: socket.socket) -> None:
        while True:
            try:
                packet = connection.recv(1 << 20)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                if connection.fileno() < 0:
                    return
                self._selector.unregister(connection)
                connection.close()
                self._sockets.pop(str(worker), None)
                return
            self._tell(worker.node, FromWorker(worker=worker, payload=decode_from_worker(packet)))

    def _tell(self, node: str, message: AgentMessage) -> None:
        if self._listener is not None and node in self.nodes:
            self._listener.on_agent_message(node, message)

    def _start(self, message: StartWorker) -> None:
        program = message.program
        self._logs[message.worker] = message.log_path
        order = {
            "id": str(message.worker),
            "script": program.script,
            "module": program.module,
            "args": list(program.args),
            "env": {**program.env, **message.env, "SUNFLECK_AGENT_SOCKET": self._path},
            "log": message.log_path,
        }
        self._starting[str(message.worker)] = message.worker
        self._to_nursery.send(json.dumps(order).encode())

    def _from_nursery(self) -> None:
        packet = self._to_nursery.recv(1 << 16)
        if not packet:
            self._selector.unregister(self._to_nursery)
            return
        message = json.loads(packet)
        if "up" in message:
            self._up.set()
        elif "started" in message:
            worker = self._starting.pop(message["id"])
            self.pids[worker] = message["started"]
            self._by_pid[message["started"]] = worker
            self._tell(worker.node, WorkerStarted(worker=worker, pid=message["started"], warm=True))
        elif "exited" in message:
            worker = self._by_pid.pop(message["exited"])
            self.pids.pop(worker, None)
            self.exits.append((worker, message["code"], self.now()))
            connection = self._sockets.get(str(worker))
            if connection is not None:
                self._hear(worker, connection)  # its last words first, as the real agent does
            lines = "" if message["code"] == 0 else "\n".join(self.log(worker).splitlines()[-5:])
            self._tell(worker.node, WorkerExited(worker=worker, code=message["code"], last_lines=lines))

    def _signal(self, worker: WorkerId, number: int) -> None:
        pid = self.pids.get(worker)
        if pid is not None:
            try:
                os.killpg(pid, number)
            except ProcessLookupError:
                pass


class _Timer:
    def __init__(self, action: Callable[[], None]) -> None:
        self.action = action
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True
