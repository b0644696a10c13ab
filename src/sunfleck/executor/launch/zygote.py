"""A process that has imported the heavy modules once and forks workers from that. Stdlib only, any CPython >= 3.8.

This file and `newborn` beside it need nothing else of sunfleck; they run under the interpreter of the user's choice.

    zygote.py serve --fd N --path SOCKET --warm torch,numpy --linger-s S
    zygote.py sweep NAME=VALUE       (end every process of ours whose environment holds this)

One zygote serves all agents of one host and one (interpreter, warm modules, start-up environment). It is the parent
of all their workers, warm and cold, so one place joins cgroups, sees exits, and ends whole process groups:

- an agent's connection closes (it left or was killed): its workers are killed at once, groups and all;
- the zygote dies: the kernel kills its children (PR_SET_PDEATHSIG);
- a worker ends: what is left of its process group is killed while its zombie still holds the number, and orphans
  that left the group come to us (PR_SET_CHILD_SUBREAPER) and are killed too.

Protocol: SOCK_SEQPACKET, JSON packets. To us {op: start, id, script | module | argv, args, cwd, env, cgroups,
affinity, umask, cold} with the output descriptor attached; a second descriptor, when attached, is a memory file that
holds the request (environments can exceed a packet). From us {op: started, id, pid, warm, detail} and
{op: exited, id, code}.

A fork is only safe while this process has one thread and no GPU context. Both are checked before each fork; on doubt
the worker is started as a new interpreter instead, and `detail` says why.
"""

from __future__ import annotations

import array
import fcntl
import gc
import itertools
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from typing import Any

MARK = "SUNFLECK_PROCESS"
"""Environment variable by which descendants of a worker are known even after they left its process group."""
PR_SET_CHILD_SUBREAPER = 36
PACKET_BYTES = 1 << 16
newborn: Any = None
"""The module beside this file; bound by `main`, because only a zygote needs it."""


# -- ending processes --------------------------------------------------------------------------------------------


def kill_group(pid: int, number: int = signal.SIGKILL) -> None:
    """Signal the group that `pid` leads, or `pid` alone when it has not got as far as leading one."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass
    except PermissionError:
        pass  # a member changed its user; the rest has had the signal


def environment_of(pid: int) -> bytes:
    """The environment a process was exec'd with, as bytes; empty when it is gone or not ours to read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return b"\0" + file.read()
    except OSError:
        return b""


def sweep(mark: str) -> int:
    """Kill every process whose environment holds `mark` (NAME=VALUE); returns how many there were."""
    needle, n_killed = b"\0" + os.fsencode(mark) + b"\0", 0
    for _ in range(10):  # a process may fork while we look
        found = [
            int(name)
            for name in os.listdir("/proc")
            if name.isdigit() and int(name) != os.getpid() and needle in environment_of(int(name))
        ]
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
                n_killed += 1
            except OSError:
                pass
        if not found:
            break
        time.sleep(0.005)
    return n_killed


def children() -> list[int]:
    """Pids of our children, adopted ones included."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:  # kernels without CONFIG_PROC_CHILDREN
        found, me = [], os.getpid()
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    with open(f"/proc/{name}/stat") as file:
                        if int(file.read().rpartition(")")[2].split()[1]) == me:
                            found.append(int(name))
                except (OSError, ValueError):
                    pass
        return found


# -- serving -----------------------------------------------------------------------------------------------------


def why_not_fork() -> str:
    """A reason not to fork now, or an empty string."""
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        names = []
        for thread in threads:
            try:
                with open(f"/proc/self/task/{thread}/comm") as file:
                    names.append(file.read().strip())
            except OSError:
                pass
        return f"a warm module started threads ({', '.join(sorted(names))}): forking is not safe"
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
        return "a warm module initialised CUDA: forking is not safe"
    return ""


def why_never_fork() -> str:
    """The same for what can only come from the imports: a GPU that was opened by whatever library."""
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink("/proc/self/fd/" + name)
        except OSError:
            continue
        if target.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri/render")):
            return f"a warm module opened {target}: forking is not safe"
    return ""


def hung_up(connection: socket.socket) -> bool:
    """Whether the other side is gone, though some of what it said is still to be read."""
    poll = select.poll()
    poll.register(connection, select.POLLHUP)
    return bool(poll.poll(0))


class Worker:
    def __init__(self, name: str, mark: str, connection: socket.socket | None) -> None:
        self.name, self.mark, self.connection = name, mark, connection


class Zygote:
    def __init__(self, listener: socket.socket, path: str, warm: list[str], linger_s: float) -> None:
        self.listener, self.path, self.warm, self.linger_s = listener, path, warm, linger_s
        self.inode = os.stat(path).st_ino
        self.workers: dict[int, Worker] = {}  # by pid
        self.connections: set[socket.socket] = set()
        self.unsent: dict[socket.socket, list[bytes]] = {}
        self.counter = itertools.count(1)
        self.broken = ""
        self.ending = False

    def import_modules(self) -> None:
        started = time.monotonic()
        for name in self.warm:
            try:
                __import__(name)
            except BaseException as error:
                self.broken = f"cannot import {name}: {type(error).__name__}: {error}"
                break
        self.thread_setters = newborn.thread_setters()
        newborn.keep_finalizers()
        gc.collect()
        gc.freeze()
        self.broken = self.broken or why_never_fork()
        state = self.broken or why_not_fork() or "ready"
        print(f"zygote {os.getpid()}: {state} after {time.monotonic() - started:.2f} s", flush=True)

    def serve(self) -> None:
        self.base_path = list(sys.path)
        newborn.libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
        self.wake_in, self.wake_out = socket.socketpair()
        self.wake_in.setblocking(False)
        self.wake_out.setblocking(False)
        signal.set_wakeup_fd(self.wake_out.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self.on_term)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ, self.accept)
        self.selector.register(self.wake_in, selectors.EVENT_READ, lambda _: self.drain_wake())
        alone_since = time.monotonic()
        while not self.ending:
            needed = bool(self.connections or self.workers)
            timeout = None if needed else alone_since + self.linger_s - time.monotonic()
            if timeout is not None and timeout <= 0 and self.retire():
                break
            for key, events in self.selector.select(timeout):
                if events & selectors.EVENT_WRITE:
                    self.flush(key.fileobj)  # type: ignore[arg-type]
                if events & selectors.EVENT_READ:
                    key.data(key.fileobj)
            self.reap()
            if needed:
                alone_since = time.monotonic()
        for pid in list(self.workers):
            kill_group(pid)
        deadline = time.monotonic() + 2
        while self.workers and time.monotonic() < deadline:
            self.reap()
            time.sleep(0.002)
        self.retire(force=True)

    def on_term(self, *_: object) -> None:
        self.ending = True

    def drain_wake(self) -> None:
        try:
            self.wake_in.recv(4096)
        except OSError:
            pass

    def retire(self, force: bool = False) -> bool:
        """Take our socket away, under the lock that starters hold, unless somebody connected in the meantime."""
        with open(self.path + ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not force and self.selector.select(0):
                return False
            try:
                if os.stat(self.path).st_ino == self.inode:
                    os.unlink(self.path)
                    os.unlink(self.path + ".pid")
                    self.inode = -1  # the number may be given to the socket of our successor
            except OSError:
                pass
        return True

    def accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        self.connections.add(connection)
        self.selector.register(connection, selectors.EVENT_READ, self.read)

    def read(self, connection: socket.socket) -> None:
        descriptors = array.array("i")
        try:
            data, ancillary, _, _ = connection.recvmsg(PACKET_BYTES, socket.CMSG_SPACE(2 * descriptors.itemsize))
        except BlockingIOError:
            return
        except OSError:
            data, ancillary = b"", []
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
        try:
            if not data:
                self.forget(connection)
            elif descriptors and not hung_up(connection):
                if len(descriptors) > 1:
                    data = os.pread(descriptors[1], os.fstat(descriptors[1]).st_size, 0)
                self.start(connection, json.loads(data.decode()), descriptors[0])
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def forget(self, connection: socket.socket) -> None:
        """The agent is gone: so are its workers."""
        self.selector.unregister(connection)
        self.connections.discard(connection)
        self.unsent.pop(connection, None)
        connection.close()
        for pid, worker in self.workers.items():
            if worker.connection is connection:
                worker.connection = None
                kill_group(pid)

    def send(self, connection: socket.socket | None, **message: Any) -> None:
        """Never waits: an agent that does not read (it is stopped, say) must not hold up the others."""
        if connection is not None:
            self.unsent.setdefault(connection, []).append(json.dumps(message).encode())
            self.flush(connection)

    def flush(self, connection: socket.socket) -> None:
        waiting = self.unsent[connection]
        try:
            while waiting:
                connection.send(waiting[0])
                del waiting[0]
        except BlockingIOError:
            pass
        except OSError:
            waiting.clear()  # its end comes as an empty read
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if waiting else 0)
        if self.selector.get_key(connection).events != events:
            self.selector.modify(connection, events, self.selector.get_key(connection).data)

    def start(self, connection: socket.socket, request: dict[str, Any], output: int) -> None:
        mark = f"{os.getpid()}.{next(self.counter)}"
        request["env"][MARK] = mark
        why = request.get("cold") or self.broken or why_not_fork()
        if request.get("argv"):
            why = "not a Python program"
        pid = self.cold(request, output) if why else self.fork(request, output)
        if pid is None:
            self.send(connection, op="exited", id=request["id"], code=127)
            return
        self.workers[pid] = Worker(request["id"], mark, connection)
        self.send(connection, op="started", id=request["id"], pid=pid, warm=not why, detail=why)

    def fork(self, request: dict[str, Any], output: int) -> int | None:
        parent = os.getpid()
        old = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            pid = os.fork()
            if pid == 0:
                try:
                    self.selector.close()
                    for held in [self.listener, self.wake_in, self.wake_out, *self.connections]:
                        held.close()
                    newborn.become_warm(request, output, parent, self.base_path, self.thread_setters)
                finally:
                    os._exit(1)
        except OSError as error:
            os.write(output, f"sunfleck: cannot fork: {error}\n".encode())
            return None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old)
        return pid

    def cold(self, request: dict[str, Any], output: int) -> int | None:
        argv = request.get("argv") or (
            [sys.executable, "-u"]
            + (["-m", request["module"]] if request.get("module") else [request["script"]])
            + request["args"]
        )
        keys = ("cgroups", "affinity", "umask")
        spec = dict({key: request[key] for key in keys}, argv=argv, parent=os.getpid())
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", newborn.__file__, json.dumps(spec)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=request["env"],
                cwd=request["cwd"],
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            os.write(output, f"sunfleck: cannot start: {error}\n".encode())
            return None
        process.returncode = 0  # we wait for it ourselves
        return process.pid

    def reap(self) -> None:
        n_ended = 0
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                break
            if ended is None:
                break
            pid = ended.si_pid
            worker = self.workers.pop(pid, None)
            if worker is not None:
                kill_group(pid)  # its zombie still holds the number: nobody else can be hit
                n_ended += 1
            status = os.waitpid(pid, 0)[1]
            if worker is not None:
                code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
                self.send(worker.connection, op="exited", id=worker.name, code=code)
        if n_ended:
            self.kill_orphans()

    def kill_orphans(self) -> None:
        """Processes that came to us because their parent, a worker or its descendant, is gone. One that carries the
        mark of a living worker is that worker's business; one without a mark goes when no worker is left."""
        live = {os.fsencode(worker.mark) for worker in self.workers.values()}
        prefix = b"\0" + MARK.encode() + b"="
        for pid in children():
            if pid not in self.workers:
                mark = environment_of(pid).partition(prefix)[2].partition(b"\0")[0]
                if mark not in live if mark else not live:
                    os.kill(pid, signal.SIGKILL)


def serve(options: dict[str, str]) -> None:
    listener = socket.socket(fileno=int(options["--fd"]))
    listener.setblocking(False)
    path = options["--path"]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warm = [name for name in options.get("--warm", "").split(",") if name]
    zygote = Zygote(listener, path, warm, float(options.get("--linger-s", "60")))
    zygote.import_modules()
    zygote.serve()


def main(argv: list[str]) -> None:
    global newborn
    here = os.path.dirname(os.path.abspath(__file__))
    import newborn  # type: ignore[import-not-found]

    del sys.modules["newborn"]  # workers should not find it
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]  # its files are not modules
    if argv[0] == "serve":
        serve(dict(zip(argv[1::2], argv[2::2])))  # noqa: B905 (3.8 has no strict=)
    elif argv[0] == "sweep":
        sweep(argv[1])


if __name__ == "__main__":
    main(sys.argv[1:])
