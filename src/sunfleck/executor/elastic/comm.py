"""The collectives of one round: a raw process group over a prefix of the node's store, made and thrown away per round.

No default process group exists, so any number of rounds can follow each other in one process. What is not obvious:

- Connections are made on first use (lazy gloo), and a group is closed in a thread of its own: closing costs about 10 ms
  per peer, which training must not wait for.
- gloo does not fail the ranks that are not neighbours of a dead one; they would wait for their timeout. `sever` shuts
  the TCP connections of this group down at the level of the operating system, which fails every pending operation here
  and, because the peers see the connections end, everywhere. All ranks know of a death within milliseconds.
- Reconfiguration in place (torch >= 2.14) could replace this behind the same interface.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo, TCPStore

CONNECT_S = 1.0
"""A store that does not accept a connection within this is taken as gone: its node left, or it was killed."""
STORE_S = 5.0
"""A store that does not answer a question within this hangs."""
_POLL_S = (0.0, 0.0, 0.0001, 0.0002, 0.0005, 0.001)


class CommFailed(RuntimeError):
    """A collective of this round failed: a peer is gone, or did not answer within the timeout."""


class Superseded(Exception):
    """Waiting was given up because a newer round was announced."""


def connect_store(host: str, port: int) -> Any:
    """A client of a node's rendezvous store. Each round takes a new one: a client that waits blocks its other users.

    torch's client tries again and again until its timeout when nobody listens, deaf to newer rounds; so we knock first.
    """
    address = "127.0.0.1" if host == "localhost" else host  # stores of local nodes do not listen on ::1
    try:
        socket.create_connection((address, port), timeout=CONNECT_S).close()
        return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=STORE_S))
    except Exception as error:
        raise CommFailed(f"the store at {host}:{port} does not answer: {error}") from error


class Comm:
    """Collectives among `world` ranks. With world 1 nothing is opened and everything returns at once."""

    def __init__(
        self,
        rank: int,
        world: int,
        device: Any,
        store: Any = None,
        prefix: str = "",
        host: str = "",
        timeout_s: float = 30.0,
    ) -> None:
        self.rank, self.world, self.device = rank, world, device
        self.timeout_s = timeout_s
        self.error: str | None = None
        self._sockets: set[int] = set()
        self._before: set[str] = set()
        self._lock = threading.Lock()
        self.group: Any = None
        self.store = store
        if world > 1:
            self._before = set(os.listdir("/proc/self/fd"))
            self.group = _process_group(PrefixStore(prefix, store), rank, world, device, host, timeout_s)

    # -- collectives -----------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Any) -> Any:
        """Start a SUM over all ranks, in place. Returns the work, or None when there is nobody to add to."""
        if self.world == 1:
            return None
        if self.error:
            raise CommFailed(self.error)
        try:
            return self.group.allreduce([tensor])
        except RuntimeError as error:
            self.fail(error)
            raise CommFailed(self.error) from error

    def all_reduce_future(self, tensor: Any, done: Callable[[], None]) -> None:
        """Start a SUM and call `done` from some thread when it has ended, well or not (then `error` is set)."""
        try:
            work = self.all_reduce(tensor)
        except CommFailed:
            done()
            return
        if work is None:
            done()
            return

        def ended(future: Any) -> None:
            try:
                future.value()
            except Exception as error:
                self.fail(error)
            done()

        work.get_future().add_done_callback(ended)

    def wait(self, work: Any, poll: Callable[[], bool] | None = None) -> None:
        """Wait for a work. `poll` is asked now and then and ends the wait when true (raises Superseded); not for
        send and recv, whose works gloo only completes while somebody waits."""
        if work is None:
            return
        if poll is not None:
            n = 0
            while not work.is_completed():
                if poll():
                    self.fail(RuntimeError("superseded by a newer round"))
                    raise Superseded
                time.sleep(_POLL_S[min(n, len(_POLL_S) - 1)])
                n += 1
        try:
            work.wait()
        except RuntimeError as error:
            self.fail(error)
            raise CommFailed(self.error) from error

    def send(self, tensor: Any, to: int) -> Any:
        return self._point_to_point(lambda: self.group.send([tensor], to, 0))

    def recv(self, tensor: Any, source: int) -> Any:
        return self._point_to_point(lambda: self.group.recv([tensor], source, 0))

    def _point_to_point(self, start: Callable[[], Any]) -> Any:
        if self.error:
            raise CommFailed(self.error)
        try:
            return start()
        except RuntimeError as error:
            self.fail(error)
            raise CommFailed(self.error) from error

    def part(self) -> None:
        """Before some of us exit: wait until every rank has what the last collective gave it.

        A process that ends while its sockets hold unread bytes resets them, and the kernel of a peer then throws away
        what had arrived there. This sum may meet that fate; nobody needs its result.
        """
        try:
            self.wait(self.all_reduce(torch.zeros(1)))
        except CommFailed:
            pass

    # -- life and death --------------------------------------------------------------------------------------------

    def remember_sockets(self) -> None:
        """Note which connections belong to this group: those that appeared since it was made."""
        if self.world == 1:
            return
        for name in set(os.listdir("/proc/self/fd")) - self._before:
            try:
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    self._sockets.add(int(name))
            except OSError:
                continue

    def fail(self, error: BaseException) -> None:
        """A collective failed here: remember why, and let the peers know at once."""
        with self._lock:
            if self.error is not None:
                return
            self.error = first_line(error)
        self.sever()

    def sever(self) -> None:
        """Shut the connections of this group down. Listening sockets must stay: gloo aborts the process otherwise."""
        self.remember_sockets()
        for descriptor in self._sockets:
            try:
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    connection.getpeername()
                    connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        self._sockets.clear()

    def close_behind(self) -> None:
        """Let go of the group without waiting for it."""
        group, self.group, store, self.store = self.group, None, self.store, None
        if group is not None:
            held = [group, store]
            del group, store
            threading.Thread(target=held.clear, name="sunfleck-close", daemon=True).start()


def first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    line = text[0] if text else type(error).__name__
    return line.split("] ", 1)[-1][:200]


def _process_group(store: Any, rank: int, world: int, device: Any, host: str, timeout_s: float) -> Any:
    """A ProcessGroup of its own for one round: gloo for CPU tensors, and NCCL for CUDA tensors where there is a GPU."""
    timeout = timedelta(seconds=timeout_s)
    group = ProcessGroup(store, rank, world)
    options = ProcessGroupGloo._Options()
    options._devices = [_gloo_device(host)]
    options._timeout = timeout
    options._threads = 2
    gloo = ProcessGroupGloo(store, rank, world, options)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
    if device.type == "cuda":
        from torch.distributed import ProcessGroupNCCL

        nccl_options = ProcessGroupNCCL.Options()
        nccl_options._timeout = timeout
        nccl = ProcessGroupNCCL(PrefixStore("nccl", store), rank, world, nccl_options)
        group._register_backend(torch.device("cuda"), ProcessGroup.BackendType.NCCL, nccl)
        group._set_default_backend(ProcessGroup.BackendType.NCCL)
    else:
        group._set_default_backend(ProcessGroup.BackendType.GLOO)
    return group


def _gloo_device(host: str) -> Any:
    """Listen where the peers can reach us: GLOO_SOCKET_IFNAME if the site sets it, else the node's own address."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        return ProcessGroupGloo.create_device(interface=interface.split(",")[0], lazy_init=True)
    name = "127.0.0.1" if host in ("", "localhost") else host
    return ProcessGroupGloo.create_device(hostname=name, lazy_init=True)
