"""The controller's end of all connections: agents on one port, clients (CLI, API) on another, one thread for both.

Everything that arrives is handed to listeners in that thread, so that they need no locks. Agents are known by their
node's name; which connection a node has is decided by its latest Hello. What arrives from a connection that has not
said Hello to us yet (it was talking to our predecessor) is kept until it has, in order: nothing that an agent sent
while the controller was away is lost on the way in.
"""

from __future__ import annotations

import collections
import heapq
import itertools
import logging
import math
import os
import socket as sockets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from sunfleck.core.errors import PoolUnavailable, SunfleckError

from ..base import AgentListener
from . import wire
from .clients import Clients, OnRequest
from .endpoint import Endpoint, read_endpoint, write_endpoint
from .keys import PoolKeys, start_authenticator
from .wire import AgentMessage, ControllerMessage, Hello

log = logging.getLogger(__name__)

BACKLOG = 4096
"""Connections that may wait to be accepted: all agents of a large pool come at once. The kernel caps it."""
PENDING_LIMIT = 20_000
"""Messages kept for one connection that has not said Hello yet; the oldest go first."""
BATCH = 500
"""Messages taken from one socket before timers and posted actions get their turn."""


class _Link:
    """One connected agent."""

    def __init__(self, hello: Hello, route: bytes, now: float) -> None:
        self.hello, self.route, self.heard = hello, route, now


class _Timer:
    def __init__(self, action: Callable[[], None]) -> None:
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        self.action = None


class Fabric:
    """See executor.base.Agents, which this implements.

    `on_request` gets what clients ask, in the fabric's thread; see `clients`. Ports: 0 chooses (the one used last
    time, when it is free: agents and clients then find a restarted controller without looking again).
    """

    def __init__(
        self,
        keys: PoolKeys,
        endpoint_path: Path,
        *,
        on_request: OnRequest | None = None,
        host: str = "127.0.0.1",
        agent_port: int = 0,
        client_port: int = 0,
        version: str = "",
        heartbeat_s: float = 1.0,
        lost_after_s: float = 6.0,
        patience_s: float = 120.0,
    ) -> None:
        self._keys, self._path, self._host, self._version = keys, endpoint_path, host, version
        self._ports = (agent_port, client_port)
        self._welcome = wire.Welcome(heartbeat_s=heartbeat_s, patience_s=patience_s)
        self._lost_after_s = lost_after_s
        self._listeners: list[AgentListener] = []
        self._links: dict[str, _Link] = {}
        self._nodes: dict[bytes, str] = {}  # by route
        self._pending: dict[bytes, collections.deque[AgentMessage]] = {}
        self._timers: list[tuple[float, int, _Timer]] = []
        self._order = itertools.count()
        self._posted: collections.deque[Callable[[], None]] = collections.deque()
        self._watched: dict[int, Callable[[], None]] = {}
        self._stopping = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._wake_out, self._wake_in = sockets.socketpair()
        self._wake_out.setblocking(False)
        self._wake_in.setblocking(False)
        self._clients = Clients(on_request, self.post)
        self._thread = threading.Thread(target=self._run, name="fabric", daemon=True)
        self.endpoint: Endpoint | None = None

    # -- life ----------------------------------------------------------------------------------------------------

    def start(self) -> Endpoint:
        """Bind, write the endpoint file, and begin. Raises SunfleckError when a port is taken."""
        last = self._last_ports()
        self._authenticator = start_authenticator(self._context, self._keys)
        try:
            self._socket, agent_port = self._bind(self._ports[0], last[0], "agents")
            self._client_socket, client_port = self._bind(self._ports[1], last[1], "clients")
        except BaseException:
            self._authenticator.stop()
            self._context.destroy(linger=0)
            raise
        self._clients.socket = self._client_socket
        for source in (self._socket, self._client_socket, self._wake_in):
            self._poller.register(source, zmq.POLLIN)
        self.endpoint = Endpoint(
            host=self._host,
            agent_port=agent_port,
            client_port=client_port,
            server_public=self._keys.server.public.decode(),
            pid=os.getpid(),
            version=self._version,
            started_s=time.time(),
        )
        write_endpoint(self._path, self.endpoint)
        self.call_later(self._welcome.heartbeat_s, self._drop_silent)
        self._thread.start()
        return self.endpoint

    def stop(self, *, forget: bool = True) -> None:
        """End the thread and close every socket. `forget` removes the endpoint file: the pool has ended."""
        if self._thread.ident is None:
            return
        if forget:
            self._path.unlink(missing_ok=True)
        self._stopping = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _last_ports(self) -> tuple[int, int]:
        try:
            last = read_endpoint(self._path)
        except PoolUnavailable:
            return 0, 0
        return last.agent_port, last.client_port

    def _bind(self, port: int, last: int, whom: str) -> tuple[zmq.Socket[bytes], int]:
        socket = self._context.socket(zmq.ROUTER)
        socket.linger = 300  # milliseconds: a Refused or a last reply should still get out
        socket.backlog = BACKLOG
        socket.sndhwm = socket.rcvhwm = 100_000
        socket.router_mandatory = True  # an agent that is gone is an error here, not a silent drop inside zmq
        socket.setsockopt(zmq.HEARTBEAT_IVL, 5_000)  # milliseconds; finds connections whose peer vanished
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 20_000)
        if ":" in self._host:
            socket.ipv6 = True
        self._keys.secure_server(socket)
        for choice in dict.fromkeys([port] if port else [last, 0]):
            try:
                socket.bind(f"tcp://{self._host}:{choice or '*'}")
                return socket, int(bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").rpartition(b":")[2])
            except zmq.ZMQError as error:
                if choice == 0 or port:
                    what = f"port {choice}" if choice else "any port"
                    raise SunfleckError(
                        f"cannot listen for {whom} on {self._host}, {what}: {os.strerror(error.errno or 0)};"
                        " give another host or port, or 0 to have a free port chosen"
                    ) from error
        raise AssertionError("unreachable")

    # -- what others use -----------------------------------------------------------------------------------------

    def subscribe(self, listener: AgentListener) -> None:
        """A listener that comes late is told of the agents that are there already."""
        if self._thread.ident is None:
            self._listeners.append(listener)
        elif threading.current_thread() is self._thread:
            self._listeners.append(listener)
            for link in list(self._links.values()):
                self._guard(lambda link=link: listener.on_agent_joined(link.hello))  # type: ignore[misc]
        else:
            self.post(lambda: self.subscribe(listener))

    def post(self, action: Callable[[], None]) -> None:
        self._posted.append(action)
        self._wake()

    def send(self, node: str, message: ControllerMessage) -> None:
        link = self._links.get(node)
        if link is not None:
            self._send(link.route, message)

    def call_later(self, delay_s: float, action: Callable[[], None]) -> _Timer:
        timer = _Timer(action)
        heapq.heappush(self._timers, (self.now() + delay_s, next(self._order), timer))
        return timer

    def now(self) -> float:
        return time.monotonic()

    def leave_node(self, node: str, grace_s: float) -> None:
        """Tell the node's agent to end its workers within grace_s, say Goodbye and exit."""
        self.send(node, wire.LeaveNode(grace_s=grace_s))

    def watch(self, descriptor: int, action: Callable[[], None]) -> None:
        """Run `action` in the fabric's thread whenever the descriptor is readable (a pidfd: when that process ends)."""
        self._watched[descriptor] = action
        self._poller.register(descriptor, zmq.POLLIN)

    def unwatch(self, descriptor: int) -> None:
        """Call before the descriptor is closed."""
        if self._watched.pop(descriptor, None) is not None:
            self._poller.unregister(descriptor)

    # -- the thread ----------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        try:
            self._wake_out.send(b"\0")
        except (BlockingIOError, OSError):
            pass  # it is awake already, or has ended

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        finally:
            self._authenticator.stop()
            self._socket.close()
            self._client_socket.close()
            self._context.term()
            self._wake_in.close()
            self._wake_out.close()

    def _turn(self) -> None:
        """Messages first, then timers: after a pause of ours nobody is lost whose heartbeat only waited for us."""
        if self._posted:
            wait_s = 0.0
        elif self._timers:
            wait_s = min(max(self._timers[0][0] - self.now(), 0.0), 3600.0)
        else:
            wait_s = 3600.0
        ready: dict[Any, int] = dict(self._poller.poll(math.ceil(wait_s * 1000)))
        more = self._receive() if self._socket in ready else False
        if self._client_socket in ready:
            self._clients.receive()
        if self._wake_in.fileno() in ready:
            try:
                self._wake_in.recv(4096)
            except BlockingIOError:
                pass
        for descriptor in [d for d in ready if isinstance(d, int) and d in self._watched]:
            if descriptor in self._watched:
                self._guard(self._watched[descriptor])
        for _ in range(len(self._posted)):
            self._guard(self._posted.popleft())
        now = self.now()
        while not more and self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            if timer.action is not None:
                self._guard(timer.action)

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:
            log.exception("a listener of the fabric failed")

    def _receive(self) -> bool:
        """True when the socket may hold more."""
        for _ in range(BATCH):
            try:
                route, data = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            except ValueError:
                log.warning("dropped a message with the wrong number of frames")
                continue
            try:
                message: AgentMessage = wire.decode_from_agent(data)
            except msgspec.DecodeError as error:
                self._on_undecodable(route, data, error)
                continue
            self._guard(lambda route=route, message=message: self._on_message(route, message))  # type: ignore[misc]
        return True

    def _send(self, route: bytes, message: ControllerMessage) -> None:
        try:
            self._socket.send_multipart([route, wire.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # EHOSTUNREACH: it is gone, and will be found lost; EAGAIN: its queue is full
            log.debug("not sent to %r: %s", route, error)

    # -- agents --------------------------------------------------------------------------------------------------

    def _on_undecodable(self, route: bytes, data: bytes, error: Exception) -> None:
        """A Hello of another version may not decode, yet its sender should hear why it is not wanted."""
        log.warning("undecodable message (%d bytes) from %r: %s", len(data), self._nodes.get(route, route), error)
        try:
            raw = msgspec.msgpack.decode(data)
        except msgspec.DecodeError:
            return
        if isinstance(raw, dict) and raw.get("m") == "Hello":
            self._refuse(route, raw.get("protocol"))

    def _refuse(self, route: bytes, protocol: object) -> None:
        reason = f"agent speaks protocol {protocol}, controller {wire.PROTOCOL}: install the same sunfleck on both"
        self._send(route, wire.Refused(reason=reason))

    def _on_message(self, route: bytes, message: AgentMessage) -> None:
        if isinstance(message, Hello):
            self._on_hello(route, message)
            return
        node = self._nodes.get(route)
        if node is None:
            if not isinstance(message, wire.Heartbeat | wire.Goodbye):
                self._pending.setdefault(route, collections.deque(maxlen=PENDING_LIMIT)).append(message)
            self._send(route, wire.SayHello())
            return
        self._links[node].heard = self.now()
        if isinstance(message, wire.Heartbeat):
            self._send(route, wire.HeartbeatAck())
        elif isinstance(message, wire.Goodbye):
            self._lose(node, "goodbye")
        else:
            self._tell(node, message)

    def _on_hello(self, route: bytes, hello: Hello) -> None:
        if hello.protocol != wire.PROTOCOL:
            self._refuse(route, hello.protocol)
            return
        node = hello.node.name
        old = self._links.get(node)
        if old is not None and old.route == route and old.hello.agent_pid == hello.agent_pid:
            old.heard = self.now()  # our Welcome crossed its second Hello: nothing has changed
            self._send(route, self._welcome)
            return
        if old is not None and old.hello.agent_pid != hello.agent_pid:
            self._lose(node, f"replaced by agent {hello.agent_pid}")
        elif old is not None:
            self._nodes.pop(old.route, None)
        self._links[node] = _Link(hello, route, self.now())
        self._nodes[route] = node
        self._send(route, self._welcome)
        for listener in self._listeners:
            self._guard(lambda listener=listener: listener.on_agent_joined(hello))  # type: ignore[misc]
        for message in self._pending.pop(route, ()):
            self._tell(node, message)

    def _tell(self, node: str, message: AgentMessage) -> None:
        for listener in self._listeners:
            self._guard(lambda listener=listener: listener.on_agent_message(node, message))  # type: ignore[misc]

    def _lose(self, node: str, reason: str) -> None:
        link = self._links.pop(node)
        self._nodes.pop(link.route, None)
        for listener in self._listeners:
            self._guard(lambda listener=listener: listener.on_agent_lost(node, reason))  # type: ignore[misc]

    def _drop_silent(self) -> None:
        now = self.now()
        for node, link in list(self._links.items()):
            silent_s = now - link.heard
            if silent_s > self._lost_after_s:
                self._lose(node, f"no heartbeat for {silent_s:.1f} s")
        self.call_later(self._welcome.heartbeat_s, self._drop_silent)
