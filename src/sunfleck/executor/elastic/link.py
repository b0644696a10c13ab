"""The worker's end of the socket to its node's agent (SOCK_SEQPACKET; wire messages, one a packet).

Training must never wait for the agent: reads and writes do not block, and reports that do not fit into the socket are
kept, a bounded number of them, until it takes them again. Only three moments block: waiting for a round, and the last
words of a worker that leaves.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections import deque

from sunfleck.executor.launch.wire import (
    AnyWorkerCommand,
    AnyWorkerMessage,
    decode_to_worker,
    encode,
)

_MAX_PACKET_BYTES = 1 << 20
_MAX_PENDING = 256
_FULL = (errno.EAGAIN, errno.EWOULDBLOCK, errno.ENOBUFS)


class AgentGone(ConnectionError):
    """The agent has closed the socket: this worker is on its own and must end."""


class Link:
    def __init__(self, path: str, worker: str) -> None:
        """Connect and introduce ourselves. Raises OSError when no agent listens there."""
        self.worker = worker
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(path)
        self._socket.send(worker.encode())
        self._socket.setblocking(False)
        self._pending: deque[bytes] = deque()
        self.n_dropped = 0

    @classmethod
    def from_environment(cls) -> Link | None:
        """The link of this process, or None when it was not started by an agent."""
        path = os.environ.get("SUNFLECK_AGENT_SOCKET")
        return cls(path, os.environ["SUNFLECK_WORKER"]) if path else None

    def send(self, message: AnyWorkerMessage) -> None:
        """Queue a message and send what the socket takes. Never blocks."""
        self._pending.append(encode(message))
        self._drain()
        while len(self._pending) > _MAX_PENDING:
            self._pending.popleft()
            self.n_dropped += 1

    def flush(self, timeout_s: float = 1.0) -> bool:
        """Block until everything is sent, at most `timeout_s`. Returns whether it is."""
        deadline = time.monotonic() + timeout_s
        while self._pending:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([], [self._socket], [], left)[1]:
                return False
            try:
                self._drain()
            except AgentGone:
                return False
        return True

    def read(self, timeout_s: float = 0.0) -> list[AnyWorkerCommand]:
        """Every command that is there; waits up to `timeout_s` for the first. Raises AgentGone."""
        if self._pending:
            self._drain()
        commands: list[AnyWorkerCommand] = []
        while True:
            try:
                packet = self._socket.recv(_MAX_PACKET_BYTES)
            except BlockingIOError:
                if commands or timeout_s <= 0:
                    return commands
                poller = select.poll()
                poller.register(self._socket, select.POLLIN)
                poller.poll(timeout_s * 1000)
                timeout_s = 0.0
                continue
            except ConnectionError as error:
                raise AgentGone(str(error)) from error
            if not packet:
                raise AgentGone("the agent closed the socket")
            commands.append(decode_to_worker(packet))

    def close(self) -> None:
        self._socket.close()

    def _drain(self) -> None:
        while self._pending:
            try:
                self._socket.send(self._pending[0])
            except OSError as error:
                if error.errno in _FULL:
                    return
                raise AgentGone(str(error)) from error
            self._pending.popleft()
