"""Synchronous client of a pool's controller, for CLI and API. `clients` is the other end."""

from __future__ import annotations

import threading
import time
import uuid
from pathlib import Path
from typing import Any

import msgspec
import zmq

from sunfleck.core.errors import PoolUnavailable, SunfleckError

from .clients import Answer, Request
from .endpoint import Endpoint, read_endpoint
from .keys import load_client_keys, secure_client

POLL_S = 0.1
"""How often a waiting client looks whether the controller has moved."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Answer)


class Client:
    """Calls the controller that the endpoint file names, and follows it when it is restarted.

    A request is sent at most once: when the controller dies after it was sent, `call` raises PoolUnavailable and
    whether it was carried out is not known. One call at a time; threads wait for each other.
    """

    def __init__(self, endpoint: Path) -> None:
        self._path = endpoint
        self._lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._connected: Endpoint | None = None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._disconnect()
        self._context.term()

    def call(self, method: str, timeout_s: float = 5.0, **params: Any) -> Any:
        """The controller's answer. Raises PoolUnavailable when there is none within `timeout_s`, and what the
        controller raised, by its kind, when it refused."""
        with self._lock:
            deadline = time.monotonic() + timeout_s
            request = Request(uuid.uuid4().hex, method, params)
            self._send(_encoder.encode(request), deadline, timeout_s)
            answer = self._receive(request.id, deadline, timeout_s)
        if answer.error is not None:
            raise _kinds().get(answer.error.kind, SunfleckError)(answer.error.message)
        return answer.result

    def _send(self, data: bytes, deadline: float, timeout_s: float) -> None:
        while True:
            try:
                socket = self._connect()
            except PoolUnavailable:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(POLL_S)
                continue
            if socket.poll(int(POLL_S * 1000), zmq.POLLOUT):
                try:
                    socket.send(data, zmq.NOBLOCK)
                    return
                except zmq.Again:
                    pass
            if time.monotonic() >= deadline:
                raise self._unavailable(timeout_s)

    def _receive(self, request_id: str, deadline: float, timeout_s: float) -> Answer:
        assert self._socket is not None
        while (left_s := deadline - time.monotonic()) > 0:
            if self._socket.poll(int(min(left_s, 1.0) * 1000) + 1):
                answer = _decoder.decode(self._socket.recv())
                if answer.id == request_id:  # otherwise it belongs to a call that was given up
                    return answer
            elif self._moved():
                self._disconnect()
                raise PoolUnavailable("the controller was restarted during the call; look before you repeat it")
        raise self._unavailable(timeout_s)

    def _unavailable(self, timeout_s: float) -> PoolUnavailable:
        where = self._connected
        pid = f"controller {where.pid} on {where.host}" if where else "the controller"
        return PoolUnavailable(
            f"{pid} did not answer within {timeout_s:g} s: if it is dead, `sunfleck up` starts it again"
            " with everything it knew"
        )

    def _moved(self) -> bool:
        try:
            return read_endpoint(self._path) != self._connected
        except PoolUnavailable:
            return False

    def _connect(self) -> zmq.Socket[bytes]:
        endpoint = read_endpoint(self._path)
        if self._socket is not None and endpoint == self._connected:
            return self._socket
        self._disconnect()
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.immediate = True  # queue nothing for a controller that is not there: then "sent" means sent
        socket.reconnect_ivl = 50  # milliseconds
        socket.reconnect_ivl_max = 500
        if ":" in endpoint.host:
            socket.ipv6 = True
        secure_client(socket, load_client_keys(self._path.parent), endpoint.server_public.encode())
        socket.connect(f"tcp://{endpoint.host}:{endpoint.client_port}")
        self._socket, self._connected = socket, endpoint
        return socket

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _kinds() -> dict[str, type[SunfleckError]]:
    found: dict[str, type[SunfleckError]] = {}
    todo = [SunfleckError]
    while todo:
        kind = todo.pop()
        found[kind.__name__] = kind
        todo.extend(kind.__subclasses__())
    return found
