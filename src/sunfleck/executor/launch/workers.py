"""The Unix socket on which an agent's workers talk to it: one SOCK_SEQPACKET connection each, in a 0700 directory."""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from collections.abc import Callable

import zmq

from .wire import WorkerId

PACKET_BYTES = 1 << 20
QUEUE_LIMIT = 1000
"""Messages kept for a worker that has not connected yet or does not read; the oldest go first."""
BATCH = 200
"""Packets taken from one worker before the others get their turn."""


class WorkerSockets:
    """`on_message` gets every packet of every worker, in order."""

    def __init__(self, path: str, poller: zmq.Poller, on_message: Callable[[WorkerId, bytes], None]) -> None:
        self.path = path
        self._poller, self._on_message = poller, on_message
        try:
            os.unlink(path)  # of an agent of this node that was killed
        except FileNotFoundError:
            pass
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        os.chmod(path, 0o600)
        self._listener.listen(128)
        self._listener.setblocking(False)
        poller.register(self._listener.fileno(), zmq.POLLIN)
        self._connections: dict[int, socket.socket] = {}
        self._names: dict[int, WorkerId] = {}
        self._current: dict[WorkerId, int] = {}
        self._queues: dict[WorkerId, deque[bytes]] = {}

    def send(self, worker: WorkerId, data: bytes) -> None:
        queue = self._queues.setdefault(worker, deque(maxlen=QUEUE_LIMIT))
        queue.append(data)
        self._flush(worker)

    def on_ready(self, descriptor: int, events: int) -> None:
        if descriptor == self._listener.fileno():
            self._accept()
        elif descriptor in self._connections:
            if events & zmq.POLLOUT and descriptor in self._names:
                self._flush(self._names[descriptor])
            if events & ~zmq.POLLOUT:
                self._read(descriptor, BATCH)

    def finish(self, worker: WorkerId) -> None:
        """It has exited: deliver what it said last, then forget it."""
        self._accept()
        for descriptor in [*self._connections]:
            if descriptor not in self._names:
                self._read(descriptor, 1)
        while (current := self._current.get(worker)) is not None:
            if not self._read(current, BATCH) and current in self._connections:
                self._close(current)
        self._queues.pop(worker, None)

    def close(self) -> None:
        for descriptor in [*self._connections]:
            self._close(descriptor)
        self._poller.unregister(self._listener.fileno())
        self._listener.close()
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            pass

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            if struct.unpack("3i", credentials)[1] not in (os.geteuid(), 0):
                connection.close()
                continue
            connection.setblocking(False)
            self._connections[connection.fileno()] = connection
            self._poller.register(connection.fileno(), zmq.POLLIN)

    def _read(self, descriptor: int, limit: int) -> bool:
        """Whether there may be more."""
        for _ in range(limit):
            try:
                data = self._connections[descriptor].recv(PACKET_BYTES)
            except BlockingIOError:
                return False
            except OSError:
                data = b""
            if not data:
                self._close(descriptor)
                return False
            name = self._names.get(descriptor)
            if name is not None:
                self._on_message(name, data)
            elif not self._introduce(descriptor, data):
                return False
        return True

    def _introduce(self, descriptor: int, data: bytes) -> bool:
        try:
            rest, _, restart = data.decode().rpartition("#")
            job, _, node = rest.rpartition("@")
            name = WorkerId(job=job, node=node, restart=int(restart))
        except ValueError:
            self._close(descriptor)
            return False
        if name in self._current:
            self._close(self._current[name])
        self._names[descriptor] = name
        self._current[name] = descriptor
        self._flush(name)
        return True

    def _flush(self, worker: WorkerId) -> None:
        queue, descriptor = self._queues.get(worker), self._current.get(worker)
        if queue is None or descriptor is None:
            return
        connection = self._connections[descriptor]
        while queue:
            try:
                connection.send(queue[0])
            except BlockingIOError:
                self._poller.modify(descriptor, zmq.POLLIN | zmq.POLLOUT)
                return
            except OSError:
                return  # too large for a packet, or gone: the latter is read as its end
            queue.popleft()
        self._poller.modify(descriptor, zmq.POLLIN)

    def _close(self, descriptor: int) -> None:
        self._poller.unregister(descriptor)
        self._connections.pop(descriptor).close()
        name = self._names.pop(descriptor, None)
        if name is not None and self._current.get(name) == descriptor:
            del self._current[name]
