"""An agent's way to the zygotes of its host: find or start the right one, ask it for workers, hear of their ends.

python -m sunfleck.executor.launch.zygotes RUN_DIR MODULE,..      start that zygote ahead of its first use, and
                                                                  end when it is ready
"""

from __future__ import annotations

import array
import errno
import fcntl
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from sunfleck.core.errors import SunfleckError

from . import zygote

SOCKET_PATH_BYTES = 107
"""Longest path of a Unix socket on Linux (sun_path less its terminating zero)."""

START_UP = ("PYTHON", "LD_", "GLIBC_", "MALLOC_", "LC_", "LANG", "OMP_", "GOMP_", "KMP_", "MKL_", "ATEN_", "TORCH_")
"""Prefixes of variables that are read once, when an interpreter or a library starts. Programs that differ in one of
them cannot share a zygote."""
THREAD_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Not among those: a zygote imports with one thread, and a worker sets the count it should have."""


def socket_path(path: Path) -> str:
    """The path as text. Raises SunfleckError when it is too long for a Unix socket."""
    text = str(path)
    if len(os.fsencode(text)) > SOCKET_PATH_BYTES:
        raise SunfleckError(
            f"{text} is too long for a socket ({len(os.fsencode(text))} bytes, at most {SOCKET_PATH_BYTES}):"
            " set TMPDIR or XDG_RUNTIME_DIR to a short directory"
        )
    return text


class StartRequest(Struct, frozen=True, kw_only=True):
    """As `zygote` takes it. One of script, module and argv is given."""

    op: str = "start"
    id: str
    script: str = ""
    module: str = ""
    argv: Sequence[str] = ()
    args: Sequence[str] = ()
    cwd: str
    env: dict[str, str]
    cgroups: Sequence[str] = ()
    affinity: Sequence[int] | None = None
    umask: int | None = None
    cold: str = ""


class ZygoteLink:
    """A connection to one zygote, and the workers that were asked of it."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.pids: dict[str, int] = {}
        """Running workers; 0 until the zygote has said the pid."""

    def start(self, request: StartRequest, output: int) -> None:
        """Ask for a worker whose stdout and stderr are `output`. Raises OSError when the zygote is gone."""
        data = json.dumps({name: getattr(request, name) for name in request.__struct_fields__}).encode()
        descriptors = array.array("i", [output])
        memory = -1
        if len(data) > zygote.PACKET_BYTES:
            memory = os.memfd_create("request")
            os.write(memory, data)
            descriptors.append(memory)
            data = b"{}"
        try:
            self.socket.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
        finally:
            if memory >= 0:
                os.close(memory)
        self.pids[request.id] = 0

    def receive(self) -> dict[str, Any] | None:
        """The next message, or None when there is none now. Raises EOFError when the zygote is gone."""
        try:
            data = self.socket.recv(zygote.PACKET_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        message: dict[str, Any] = json.loads(data)
        if message["op"] == "started":
            self.pids[message["id"]] = message["pid"]
        else:
            self.pids.pop(message["id"], None)
        return message


class Zygotes:
    """All zygotes this agent uses, by key. `on_new` and `on_closed` tell its poll loop which sockets to watch."""

    def __init__(
        self,
        run_dir: Path,
        linger_s: float,
        on_new: Callable[[ZygoteLink], None] = lambda _: None,
        python: str = sys.executable,
    ) -> None:
        self._run_dir, self._linger_s, self._on_new, self._python = run_dir, linger_s, on_new, python
        self._links: dict[str, ZygoteLink] = {}

    def link(self, warm: Sequence[str], env: Mapping[str, str], cwd: str = "") -> ZygoteLink:
        """The zygote for these modules under the start-up variables of `env`; started if need be, never waited for:
        requests queue in its socket until its imports are done. Relative entries of PYTHONPATH are meant from
        `cwd`. Raises OSError when it cannot be started."""
        start_up = {
            name: value
            for name, value in env.items()
            if name.startswith(START_UP) and name not in THREAD_COUNTS and not name.startswith("TORCHELASTIC")
        }
        if start_up.get("PYTHONPATH"):
            entries = start_up["PYTHONPATH"].split(os.pathsep)
            start_up["PYTHONPATH"] = os.pathsep.join(os.path.abspath(os.path.join(cwd, entry)) for entry in entries)
        key = _key(self._python, warm, start_up)
        found = self._links.get(key)
        if found is None:
            path = socket_path(self._run_dir / f"z-{key}")
            found = self._links[key] = ZygoteLink(connect_or_start(path, self._argv(path, warm), start_up))
            self._on_new(found)
        return found

    def _argv(self, path: str, warm: Sequence[str]) -> list[str]:
        options = ["--path", path, "--warm", ",".join(warm), "--linger-s", str(self._linger_s)]
        return [self._python, "-u", zygote.__file__, "serve", *options]

    def drop(self, link: ZygoteLink) -> None:
        """Forget a link whose zygote is gone."""
        self._links = {key: other for key, other in self._links.items() if other is not link}
        link.socket.close()

    def close(self) -> None:
        for link in list(self._links.values()):
            self.drop(link)


def _key(python: str, warm: Sequence[str], start_up: Mapping[str, str]) -> str:
    import hashlib  # OpenSSL, 3 MB and 7 ms: not before an agent has any work

    code = [os.stat(Path(zygote.__file__).with_name(name)).st_mtime_ns for name in ("zygote.py", "newborn.py")]
    text = json.dumps([python, list(warm), sorted(start_up.items()), code])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def connect_or_start(path: str, argv: Sequence[str], start_up: Mapping[str, str]) -> socket.socket:
    """Connected to the zygote at `path`. The lock makes whoever comes first start it, and the others find it; the
    socket listens before the zygote runs, so nobody waits for its imports."""
    with open(path + ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return _connect(path)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ECONNREFUSED):
                raise
        try:
            os.unlink(path)  # of one that was killed
        except FileNotFoundError:
            pass
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(path)
            listener.listen(4096)
            _spawn(listener.fileno(), path, argv, start_up)
        return _connect(path)


def _connect(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        connection.connect(path)
    except BaseException:
        connection.close()
        raise
    return connection


def _spawn(descriptor: int, path: str, argv: Sequence[str], start_up: Mapping[str, str]) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(START_UP)}
    env.update(start_up)
    env.update(dict.fromkeys(THREAD_COUNTS, "1"))
    # a heap of huge pages has far fewer page table entries for each fork to copy: 2-4 times as many forks a second
    tunables = [env["GLIBC_TUNABLES"]] if env.get("GLIBC_TUNABLES") else []
    env["GLIBC_TUNABLES"] = ":".join([*tunables, "glibc.malloc.hugetlb=1"])
    with open(path + ".log", "ab") as output:
        process = subprocess.Popen(
            [*argv, "--fd", str(descriptor)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=env,
            cwd="/",
            pass_fds=[descriptor],
            start_new_session=True,
        )
    Path(path + ".pid").write_text(str(process.pid))
    process.returncode = 0  # it outlives us by design; when it does not, `reap` waits for it


def reap() -> None:
    """Wait for zygotes of ours that have ended, so that they do not stay zombies."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def warm_up(run_dir: Path, modules: Sequence[str]) -> None:
    """Start the zygote for `modules` and return when it has imported them: an empty program has run in it."""
    link = Zygotes(run_dir, linger_s=120.0).link(modules, os.environ, os.getcwd())
    env = dict(os.environ)
    output = os.open(os.devnull, os.O_WRONLY)
    try:
        link.start(StartRequest(id="warm-up", script=os.devnull, cwd=os.getcwd(), env=env), output)
    finally:
        os.close(output)
    link.socket.setblocking(True)
    while link.pids:
        ready, _, _ = select.select([link.socket], [], [])
        if ready:
            link.receive()


if __name__ == "__main__":
    warm_up(Path(sys.argv[1]), tuple(filter(None, sys.argv[2].split(","))))
