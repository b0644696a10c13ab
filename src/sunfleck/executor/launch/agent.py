"""The agent of a node: starts workers, relays what they and the controller say, and leaves nothing behind.

    python -m sunfleck.executor.launch.agent --endpoint FILE --run-dir DIR --node JSON
        [--cgroup PROCS_FILE]... [--cpus 0,1]

One thread, one poll loop over the controller's socket, the workers' Unix socket and the zygotes. It outlives the
controller: while that is silent, workers run on and what they say is kept, until `patience_s` have passed; a new
controller is found by the endpoint file and told what runs here. It does not outlive its own orders: on LeaveNode,
SIGTERM, a refusal or the end of patience every worker is ended (TERM, then KILL), and only then it says Goodbye.
When it is itself killed, its zygotes see its connection close and kill its workers.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import zmq

from sunfleck.core.errors import SunfleckError
from sunfleck.core.model import NodeSpec

from . import wire, zygote
from .keys import private_directory
from .uplink import Uplink
from .wire import WorkerId
from .workers import WorkerSockets
from .zygotes import THREAD_COUNTS, StartRequest, ZygoteLink, Zygotes, reap, socket_path

TERM_GRACE_S = 2.0
"""What workers get when the agent is told to go by SIGTERM, a refusal or the end of patience."""
TAIL_BYTES, TAIL_LINES, LINE_CHARS = 8192, 20, 300


class _Worker:
    def __init__(self, order: wire.StartWorker, link: ZygoteLink | None) -> None:
        self.order, self.link = order, link
        self.pid = 0
        self.signal = 0
        """To send as soon as the pid is known."""
        self.kill_at: float | None = None


class Agent:
    def __init__(
        self, endpoint: Path, run_dir: Path, node: NodeSpec, cgroups: list[str], cpus: list[int] | None
    ) -> None:
        self.node, self.run_dir, self.cgroups, self.cpus = node, private_directory(run_dir), cgroups, cpus
        self.poller = zmq.Poller()
        self.workers: dict[WorkerId, _Worker] = {}
        self.links: dict[int, ZygoteLink] = {}
        self.zygotes = Zygotes(run_dir, 120.0, self.on_new_zygote)
        self.uplink = Uplink(endpoint, self.poller, self.hello)
        self.sockets = WorkerSockets(socket_path(run_dir / f"a-{node.name}"), self.poller, self.on_worker_message)
        self.pid_path = run_dir / f"a-{node.name}.pid"
        self.leaving = False
        self.done = False
        self.wake_in, self.wake_out = socket.socketpair()
        self.wake_in.setblocking(False)
        self.wake_out.setblocking(False)
        self.poller.register(self.wake_in, zmq.POLLIN)

    def hello(self) -> wire.Hello:
        """Workers that count against the node come first: the job of the first one holds it."""
        workers = sorted(self.workers, key=lambda name: not self.workers[name].order.limited)
        return wire.Hello(protocol=wire.PROTOCOL, node=self.node, agent_pid=os.getpid(), workers=tuple(workers))

    # -- the loop ------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Until there is a reason to go; returns the exit code."""
        signal.set_wakeup_fd(self.wake_out.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda *_: self.leave(0.0 if self.leaving else TERM_GRACE_S))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.uplink.connect()
        try:
            while not (self.done and not self.workers):
                self.turn()
        finally:
            self.close()
        return 1 if self.uplink.refused else 0

    def turn(self) -> None:
        ready: dict[Any, int] = dict(self.poller.poll(self.wait_ms()))
        for message in self.uplink.receive():
            self.on_controller_message(message)
        for source, events in ready.items():
            if source == self.wake_in.fileno():
                try:
                    self.wake_in.recv(4096)
                except BlockingIOError:
                    pass
                reap()
            elif source in self.links:
                self.on_zygote(self.links[source])
            elif isinstance(source, int):
                self.sockets.on_ready(source, events)
        now = time.monotonic()
        for worker in self.workers.values():
            if worker.kill_at is not None and now >= worker.kill_at:
                worker.kill_at = None
                self.kill(worker, signal.SIGKILL)
        if self.leaving:
            self.abandon_unborn()
        self.uplink.tick(now)
        if not self.leaving:
            if self.uplink.refused:
                say(f"refused: {self.uplink.refused}")
                self.leave(TERM_GRACE_S)
            elif self.uplink.out_of_patience(now):
                say(f"no controller for {self.uplink.patience_s:g} s: leaving")
                self.leave(TERM_GRACE_S)

    def wait_ms(self) -> int:
        times = [self.uplink.next_tick]
        times += [worker.kill_at for worker in self.workers.values() if worker.kill_at is not None]
        return max(0, int((min(times) - time.monotonic()) * 1000) + 1)

    # -- orders --------------------------------------------------------------------------------------------------

    def on_controller_message(self, message: wire.ControllerMessage) -> None:
        if isinstance(message, wire.ToWorker):
            self.sockets.send(message.worker, wire.encode(message.payload))
        elif isinstance(message, wire.StartWorker):
            self.start_worker(message)
        elif isinstance(message, wire.StopWorker):
            worker = self.workers.get(message.worker)
            if worker is not None:
                self.stop(worker, message.grace_s)
        elif isinstance(message, wire.LeaveNode):
            self.leave(message.grace_s)

    def start_worker(self, order: wire.StartWorker) -> None:
        name = order.worker
        if name in self.workers:
            return
        if self.leaving:
            self.uplink.send(wire.WorkerExited(worker=name, code=-signal.SIGTERM, last_lines="the node is leaving"))
            return
        self.workers[name] = _Worker(order, None)
        try:
            self.ask(self.workers[name])
        except (OSError, SunfleckError) as error:
            del self.workers[name]
            self.uplink.send(wire.WorkerExited(worker=name, code=127, last_lines=f"cannot start: {error}"))

    def ask(self, worker: _Worker) -> None:
        """Ask a zygote for this worker; once more when it turns out to have just gone."""
        order, program = worker.order, worker.order.program
        env = {name: value for name, value in os.environ.items() if name != zygote.MARK}
        env.update(program.env)
        env.update(order.env)
        env["SUNFLECK_AGENT_SOCKET"] = self.sockets.path
        for name in THREAD_COUNTS[:1] if order.limited else ():
            env.setdefault(name, str(max(1, round(self.node.cpus))))
        request = StartRequest(
            id=str(order.worker),
            script=program.script,
            module=program.module,
            args=program.args,
            cwd=program.cwd,
            env=env,
            cgroups=self.cgroups if order.limited else (),
            affinity=self.cpus,
            umask=None,
        )
        output = os.open(order.log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            for last in (False, True):
                worker.link = self.zygotes.link(program.warm, env, program.cwd)
                try:
                    worker.link.start(request, output)
                    return
                except (BrokenPipeError, ConnectionError):
                    self.on_zygote_gone(worker.link)
                    if last:
                        raise
        finally:
            os.close(output)

    def stop(self, worker: _Worker, grace_s: float) -> None:
        self.kill(worker, signal.SIGTERM if grace_s > 0 else signal.SIGKILL)
        if grace_s > 0:
            at = time.monotonic() + grace_s
            worker.kill_at = at if worker.kill_at is None else min(at, worker.kill_at)

    def kill(self, worker: _Worker, number: int) -> None:
        worker.signal = number
        if worker.pid:
            zygote.kill_group(worker.pid, number)

    def leave(self, grace_s: float) -> None:
        self.leaving = self.done = True
        for worker in self.workers.values():
            self.stop(worker, grace_s)

    def abandon_unborn(self) -> None:
        """A node is not held for a zygote that is still importing: it finds our requests withdrawn."""
        for worker in list(self.workers.values()):
            link = worker.link
            if worker.pid == 0 and worker.kill_at is None and link is not None and link in self.links.values():
                self.on_zygote_gone(link)

    # -- zygotes -------------------------------------------------------------------------------------------------

    def on_new_zygote(self, link: ZygoteLink) -> None:
        self.links[link.socket.fileno()] = link
        self.poller.register(link.socket.fileno(), zmq.POLLIN)

    def on_zygote(self, link: ZygoteLink) -> None:
        try:
            while (message := link.receive()) is not None:
                name = next((w for w in self.workers if str(w) == message["id"]), None)
                if name is None:
                    continue
                if message["op"] == "started":
                    self.on_started(self.workers[name], message)
                else:
                    self.on_exited(name, message["code"])
        except EOFError:
            self.on_zygote_gone(link)

    def on_started(self, worker: _Worker, message: dict[str, Any]) -> None:
        worker.pid = message["pid"]
        self.uplink.send(
            wire.WorkerStarted(
                worker=worker.order.worker, pid=worker.pid, warm=message["warm"], detail=message["detail"]
            )
        )
        if worker.signal:
            zygote.kill_group(worker.pid, worker.signal)

    def on_exited(self, name: WorkerId, code: int) -> None:
        worker = self.workers.pop(name)
        self.sockets.finish(name)
        if not any(other.order.limited for other in self.workers.values()):
            self.kill_cgroups()
        last_lines = tail(worker.order.log_path) if code else ""
        self.uplink.send(wire.WorkerExited(worker=name, code=code, last_lines=last_lines))

    def on_zygote_gone(self, link: ZygoteLink) -> None:
        """The kernel has killed its workers (or it does, as we leave); what they had started is killed here."""
        descriptor = link.socket.fileno()
        if self.links.pop(descriptor, None) is not None:
            self.poller.unregister(descriptor)
        self.zygotes.drop(link)
        gone = [name for name, worker in self.workers.items() if worker.link is link and str(name) in link.pids]
        for name in gone:
            if self.workers[name].pid:
                zygote.kill_group(self.workers[name].pid)
        if gone and not [name for name in self.workers if name not in gone]:
            self.kill_leftovers()
        for name in gone:
            self.on_exited(name, -signal.SIGKILL)

    def kill_leftovers(self) -> None:
        """Everything that ever was started here and is left, whatever group it moved to."""
        if self.cgroups:
            self.kill_cgroups()
        else:
            zygote.sweep(f"SUNFLECK_AGENT_SOCKET={self.sockets.path}")

    def kill_cgroups(self) -> None:
        for path in self.cgroups:
            for _ in range(100):  # a process may fork while we look; one that dies takes a moment
                try:
                    pids = [int(pid) for pid in Path(path).read_text().split()]
                except OSError:
                    break
                if not pids:
                    break
                for pid in pids:
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        pass
                time.sleep(0.001)

    # -- workers -------------------------------------------------------------------------------------------------

    def on_worker_message(self, name: WorkerId, data: bytes) -> None:
        try:
            payload = wire.decode_from_worker(data)
        except msgspec.DecodeError as error:
            say(f"dropped a message of {name}: {error}")
            return
        self.uplink.send(wire.FromWorker(worker=name, payload=payload))

    def close(self) -> None:
        if self.leaving:
            self.kill_leftovers()
        self.zygotes.close()
        self.sockets.close()
        self.pid_path.unlink(missing_ok=True)
        self.uplink.close(goodbye=self.leaving)


def tail(path: str) -> str:
    """The last lines of a log, of which no more than TAIL_BYTES are read."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read(TAIL_BYTES).decode(errors="replace")
    except OSError as error:
        return f"({path} cannot be read: {error.strerror})"
    return "\n".join(line[:LINE_CHARS] for line in deque(text.splitlines(), TAIL_LINES))


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} agent {os.getpid()}: {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="sunfleck agent", description="Agent of one node of a pool.")
    parser.add_argument("--endpoint", type=Path, required=True, help="the pool's endpoint file")
    parser.add_argument("--run-dir", type=Path, required=True, help="private directory of this host for sockets")
    parser.add_argument("--node", required=True, help="core.model.NodeSpec as JSON")
    parser.add_argument("--cgroup", action="append", default=[], help="cgroup.procs file that workers write to")
    parser.add_argument("--cpus", default="", help="CPUs for workers, comma separated; empty: all")
    options = parser.parse_args()
    node = msgspec.json.decode(options.node, type=NodeSpec)
    cpus = [int(cpu) for cpu in options.cpus.split(",") if cpu] or None
    try:
        code = Agent(options.endpoint, options.run_dir, node, options.cgroup, cpus).run()
    except SunfleckError as error:
        say(str(error))
        code = error.exit_code
    os._exit(code)  # everything is closed; an interpreter's own end would only delay the hand-back


if __name__ == "__main__":
    main()
