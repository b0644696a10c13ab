"""An agent's connection to whoever is controller now: Hello, heartbeats, and what waits while nobody answers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import zmq

from sunfleck.core.errors import PoolUnavailable

from . import wire
from .endpoint import Endpoint, read_endpoint
from .keys import load_client_keys, secure_client

HELLO_EVERY_S = 0.5
"""How often an agent that nobody has welcomed introduces itself, and looks where the controller is."""
OUTBOX_LIMIT = 20_000
"""Messages kept while the controller is away; the oldest go first."""
MISSED = 3
"""Heartbeats without an answer after which the controller counts as away."""


class Uplink:
    """`welcomed` means that a controller knows us: only then messages go out at once; otherwise they wait, in order,
    for the next Welcome."""

    def __init__(self, endpoint: Path, poller: zmq.Poller, hello: Callable[[], wire.Hello]) -> None:
        self._path, self._poller, self._hello = endpoint, poller, hello
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._endpoint: Endpoint | None = None
        self._outbox: deque[bytes] = deque(maxlen=OUTBOX_LIMIT)
        self._heartbeat_s = 1.0
        self._heard = time.monotonic()
        self.patience_s = 120.0
        self.welcomed = False
        self.refused = ""
        self.next_tick = 0.0
        self._hello_waits = False

    def connect(self) -> None:
        """Connect to the controller named by the endpoint file, if that is not the one we are connected to.
        Raises SunfleckError when our keys are missing; a missing endpoint file only means: later."""
        try:
            endpoint = read_endpoint(self._path)
        except PoolUnavailable:
            return
        if endpoint == self._endpoint:
            return
        if self._socket is not None:
            self._poller.unregister(self._socket)
            self._socket.close(linger=0)
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.immediate = True  # what cannot be sent stays in the outbox, where it is behind the next Hello
        socket.sndhwm = socket.rcvhwm = OUTBOX_LIMIT
        socket.reconnect_ivl = 50  # milliseconds
        socket.reconnect_ivl_max = 1000
        socket.setsockopt(zmq.HEARTBEAT_IVL, 5_000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 20_000)
        if ":" in endpoint.host:
            socket.ipv6 = True
        secure_client(socket, load_client_keys(self._path.parent), endpoint.server_public.encode())
        socket.connect(f"tcp://{endpoint.host}:{endpoint.agent_port}")
        self._poller.register(socket, zmq.POLLIN)
        self._socket, self._endpoint, self._hello_waits = socket, endpoint, False
        self.welcomed = False
        self._say_hello()

    def send(self, message: wire.AgentMessage) -> None:
        data = wire.encode(message)
        if not self.welcomed or self._outbox or not self._send(data):
            self._outbox.append(data)

    def receive(self) -> Iterator[wire.ControllerMessage]:
        """What the controller has said, but for what only concerns the connection itself."""
        while self._socket is not None:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message: wire.ControllerMessage = wire.decode_from_controller(data)
            except msgspec.DecodeError:
                continue  # of a newer controller, which will refuse us
            self._heard = time.monotonic()
            if isinstance(message, wire.Welcome):
                self._heartbeat_s, self.patience_s = message.heartbeat_s, message.patience_s
                self.welcomed = True
                self.next_tick = self._heard + self._heartbeat_s
                self._flush()
            elif isinstance(message, wire.Refused):
                self.refused = message.reason
            elif isinstance(message, wire.SayHello):
                self._say_hello()
            elif not isinstance(message, wire.HeartbeatAck):
                yield message

    def tick(self, now: float) -> None:
        """To be called when `next_tick` has come (earlier does no harm), and when the socket turns writable."""
        if self._hello_waits:
            self._say_hello()
        if now < self.next_tick:
            return
        if self.welcomed and now - self._heard > MISSED * self._heartbeat_s:
            self.welcomed = False
        if self.welcomed:
            self._flush()
            self._send(wire.encode(wire.Heartbeat()))
            self.next_tick = now + self._heartbeat_s
        else:
            self.connect()
            self._say_hello()
            self.next_tick = now + HELLO_EVERY_S

    def out_of_patience(self, now: float) -> bool:
        return now - self._heard > self.patience_s

    def close(self, goodbye: bool) -> None:
        """With a Goodbye that is on its way when this returns, if anybody listens."""
        if self._socket is not None:
            if goodbye and self.welcomed:
                self._flush()
                self._send(wire.encode(wire.Goodbye()))
            self._poller.unregister(self._socket)
            self._socket.close(linger=200 if self.welcomed else 0)
        self._context.term()

    def _say_hello(self) -> None:
        """Now, or as soon as there is a connection."""
        self.welcomed = False
        waits = not self._send(wire.encode(self._hello()))
        if waits != self._hello_waits and self._socket is not None:
            self._hello_waits = waits
            self._poller.register(self._socket, zmq.POLLIN | (zmq.POLLOUT if waits else 0))

    def _send(self, data: bytes) -> bool:
        if self._socket is None:
            return False
        try:
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _flush(self) -> None:
        while self._outbox and self._send(self._outbox[0]):
            self._outbox.popleft()
