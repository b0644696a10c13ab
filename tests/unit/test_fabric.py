"""Keys, fabric and client over real sockets."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.auth

from sunfleck.core.errors import InvalidRequest, PoolUnavailable, SunfleckError
from sunfleck.core.model import NodeSpec
from sunfleck.executor.launch import wire
from sunfleck.executor.launch.client import Client
from sunfleck.executor.launch.endpoint import read_endpoint
from sunfleck.executor.launch.fabric import Fabric
from sunfleck.executor.launch.keys import KeyPair, ensure_keys, load_client_keys, secure_client
from tests.fakes.pool import Listener, wait_for


def on_request(method: str, params: dict[str, Any], reply: Any) -> None:
    if method == "echo":
        reply(params)
    elif method == "later":
        threading.Timer(0.05, lambda: reply("from another thread")).start()
    elif method == "refuse":
        raise InvalidRequest("not like this: do it like that")
    elif method == "fail":
        raise ZeroDivisionError
    elif method == "unencodable":
        reply(object())
    elif method == "twice":
        reply(1)
        reply(2)


class Wired:
    def __init__(self, tmp_path: Path, **options: Any) -> None:
        self.path = tmp_path / "pool" / "endpoint.json"
        self.options = {"heartbeat_s": 0.05, "lost_after_s": 0.5, "on_request": on_request, **options}
        self.context = zmq.Context()
        self.start()

    def start(self) -> None:
        self.fabric = Fabric(ensure_keys(self.path.parent), self.path, **self.options)
        self.listener = Listener()
        self.fabric.subscribe(self.listener)
        self.endpoint = self.fabric.start()

    def connect(self, client: KeyPair | None = None, port: int | None = None) -> zmq.Socket[bytes]:
        socket = self.context.socket(zmq.DEALER)
        socket.linger = 0
        secure_client(socket, client or load_client_keys(self.path.parent), self.endpoint.server_public.encode())
        socket.connect(f"tcp://127.0.0.1:{port or self.endpoint.agent_port}")
        return socket

    def hello(self, socket: zmq.Socket[bytes], node: str = "n", pid: int = 1, protocol: int = wire.PROTOCOL) -> None:
        socket.send(wire.encode(wire.Hello(protocol=protocol, node=NodeSpec(name=node), agent_pid=pid)))

    def close(self) -> None:
        self.fabric.stop()
        self.context.destroy(linger=0)


def receive(socket: zmq.Socket[bytes]) -> Any:
    assert socket.poll(10_000), "no answer"
    return wire.decode_from_controller(socket.recv())


@pytest.fixture
def wired(tmp_path: Path) -> Iterator[Wired]:
    found = Wired(tmp_path)
    yield found
    found.close()


def test_keys_are_private_and_kept(tmp_path: Path) -> None:
    first = ensure_keys(tmp_path / "pool")
    assert stat.S_IMODE((tmp_path / "pool").stat().st_mode) == 0o700
    files = list((tmp_path / "pool" / "keys").iterdir())
    assert len(files) == 4
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert ensure_keys(tmp_path / "pool") == first
    assert first.server != first.client


def test_keys_that_others_can_read_are_refused(tmp_path: Path) -> None:
    ensure_keys(tmp_path / "pool")
    secret = tmp_path / "pool" / "keys" / "client.key_secret"
    secret.chmod(0o644)
    with pytest.raises(SunfleckError, match="chmod 600"):
        load_client_keys(tmp_path / "pool")
    (tmp_path / "pool").chmod(0o755)
    with pytest.raises(SunfleckError, match="chmod 700"):
        ensure_keys(tmp_path / "pool")


def test_two_controllers_that_start_at_once_get_the_same_keys(tmp_path: Path) -> None:
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(ensure_keys(tmp_path / "pool"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


def test_endpoint_file_has_no_secret(wired: Wired) -> None:
    text = wired.path.read_text()
    keys = ensure_keys(wired.path.parent)
    assert keys.server.public.decode() == msgspec.json.decode(text)["server_public"]
    assert keys.server.secret.decode() not in text
    assert keys.client.secret.decode() not in text
    assert stat.S_IMODE(wired.path.stat().st_mode) == 0o600
    assert read_endpoint(wired.path).pid == os.getpid()


@pytest.mark.parametrize("which", ["agent_port", "client_port"])
def test_a_stranger_is_not_let_in(wired: Wired, which: str) -> None:
    stranger = wired.connect(KeyPair(*zmq.curve_keypair()), getattr(wired.endpoint, which))
    wired.hello(stranger, "stranger")
    known = wired.connect()
    wired.hello(known, "known")
    assert isinstance(receive(known), wire.Welcome)
    assert not stranger.poll(300)
    assert [hello.node.name for hello in wired.listener.hellos] == ["known"]


def test_an_unencrypted_connection_is_not_let_in(wired: Wired) -> None:
    plain = wired.context.socket(zmq.DEALER)
    plain.linger = 0
    plain.connect(f"tcp://127.0.0.1:{wired.endpoint.agent_port}")
    wired.hello(plain)
    assert not plain.poll(300)
    assert not wired.listener.hellos


def test_a_port_in_use_names_the_fix(wired: Wired, tmp_path: Path) -> None:
    other = Fabric(ensure_keys(tmp_path / "other"), tmp_path / "other" / "e.json", agent_port=wired.endpoint.agent_port)
    with pytest.raises(SunfleckError, match=r"port \d+: Address already in use; give another"):
        other.start()


def test_hello_welcome_and_messages_in_order(wired: Wired) -> None:
    agent = wired.connect()
    wired.hello(agent)
    welcome = receive(agent)
    assert welcome == wire.Welcome(heartbeat_s=0.05, patience_s=120.0)
    for n in range(1000):
        payload = wire.Done(step=n)
        worker = wire.WorkerId(job="j", node="n", restart=0)
        agent.send(wire.encode(wire.FromWorker(worker=worker, payload=payload)))
    wait_for(lambda: len(wired.listener.messages) == 1000)
    assert [payload.step for payload in wired.listener.said()] == list(range(1000))
    wired.fabric.post(lambda: wired.fabric.send("n", wire.LeaveNode(grace_s=1.5)))
    assert receive(agent) == wire.LeaveNode(grace_s=1.5)


def test_another_protocol_is_refused_with_a_reason(wired: Wired) -> None:
    agent = wired.connect()
    wired.hello(agent, protocol=99)
    refused = receive(agent)
    assert isinstance(refused, wire.Refused)
    assert "99" in refused.reason
    agent.send(msgspec.msgpack.encode({"m": "Hello", "protocol": 7, "something": "else"}))
    assert "7" in receive(agent).reason
    assert not wired.listener.hellos


def test_rubbish_harms_nobody(wired: Wired) -> None:
    agent = wired.connect()
    agent.send(b"\xc1 rubbish")
    agent.send_multipart([b"too", b"many", b"frames"])
    agent.send(msgspec.msgpack.encode({"m": "Nonsense"}))
    wired.hello(agent)
    assert isinstance(receive(agent), wire.Welcome)


def test_silence_means_lost_and_hello_brings_it_back(wired: Wired) -> None:
    agent = wired.connect()
    wired.hello(agent)
    receive(agent)
    wait_for(lambda: wired.listener.lost)
    node, reason = wired.listener.lost[0]
    assert node == "n"
    assert "no heartbeat" in reason
    agent.send(wire.encode(wire.Heartbeat()))
    assert isinstance(receive(agent), wire.SayHello)
    wired.hello(agent)
    wait_for(lambda: len(wired.listener.hellos) == 2)


def test_heartbeats_keep_it(wired: Wired) -> None:
    agent = wired.connect()
    wired.hello(agent)
    receive(agent)
    until = time.monotonic() + 1.2
    while time.monotonic() < until:
        agent.send(wire.encode(wire.Heartbeat()))
        assert isinstance(receive(agent), wire.HeartbeatAck)
        time.sleep(0.05)
    assert not wired.listener.lost


def test_goodbye(wired: Wired) -> None:
    agent = wired.connect()
    wired.hello(agent)
    agent.send(wire.encode(wire.Goodbye()))
    wait_for(lambda: wired.listener.lost == [("n", "goodbye")])


def test_a_second_agent_of_a_node_replaces_the_first(wired: Wired) -> None:
    first, second = wired.connect(), wired.connect()
    wired.hello(first, pid=1)
    receive(first)
    wired.hello(second, pid=2)
    receive(second)
    wait_for(lambda: len(wired.listener.hellos) == 2)
    assert wired.listener.lost == [("n", "replaced by agent 2")]
    wired.fabric.post(lambda: wired.fabric.send("n", wire.LeaveNode(grace_s=0)))
    assert isinstance(receive(second), wire.LeaveNode)


def test_messages_before_hello_wait_for_it(wired: Wired) -> None:
    """What an agent says to a controller that was just restarted must not get lost."""
    agent = wired.connect()
    worker = wire.WorkerId(job="j", node="n", restart=0)
    for n in range(3):
        agent.send(wire.encode(wire.FromWorker(worker=worker, payload=wire.Done(step=n))))
    assert isinstance(receive(agent), wire.SayHello)
    assert not wired.listener.messages
    wired.hello(agent)
    wait_for(lambda: len(wired.listener.messages) == 3)
    assert [payload.step for payload in wired.listener.said()] == [0, 1, 2]


def test_a_restarted_controller_takes_the_same_ports(wired: Wired) -> None:
    before = wired.endpoint
    wired.fabric.stop(forget=False)
    wired.start()
    assert (wired.endpoint.agent_port, wired.endpoint.client_port) == (before.agent_port, before.client_port)
    assert wired.endpoint.server_public == before.server_public


def test_timers_run_in_order_and_can_be_cancelled(wired: Wired) -> None:
    seen: list[str] = []
    done = threading.Event()

    def arm() -> None:
        wired.fabric.call_later(0.06, lambda: seen.append("third"))
        wired.fabric.call_later(0.02, lambda: seen.append("second"))
        wired.fabric.call_later(0.0, lambda: seen.append("first"))
        wired.fabric.call_later(0.03, lambda: seen.append("never")).cancel()
        wired.fabric.call_later(0.1, done.set)

    wired.fabric.post(arm)
    assert done.wait(10)
    assert seen == ["first", "second", "third"]


def test_a_late_listener_is_told_who_is_there(wired: Wired) -> None:
    agent = wired.connect()
    wired.hello(agent)
    receive(agent)
    late = Listener()
    wired.fabric.subscribe(late)
    wait_for(lambda: late.hellos)
    assert len(wired.listener.hellos) == 1


def test_a_listener_that_raises_does_not_stop_the_others(wired: Wired, caplog: pytest.LogCaptureFixture) -> None:
    class Bad(Listener):
        def on_agent_joined(self, hello: wire.Hello) -> None:
            raise RuntimeError("bad listener")

    wired.fabric.post(lambda: wired.fabric._listeners.insert(0, Bad()))
    agent = wired.connect()
    wired.hello(agent)
    wait_for(lambda: wired.listener.hellos)
    assert "bad listener" in caplog.text


# -- clients -----------------------------------------------------------------------------------------------------


def test_calls_and_errors_of_their_kind(wired: Wired) -> None:
    with Client(wired.path) as client:
        assert client.call("echo", a=1, b=["x"]) == {"a": 1, "b": ["x"]}
        assert client.call("later") == "from another thread"
        with pytest.raises(InvalidRequest, match="do it like that"):
            client.call("refuse")
        with pytest.raises(SunfleckError, match="ZeroDivisionError"):
            client.call("fail")
        with pytest.raises(SunfleckError, match="unencodable"):
            client.call("unencodable")
        assert client.call("twice") == 1
        assert client.call("echo") == {}


def test_no_pool_and_no_answer(wired: Wired, tmp_path: Path) -> None:
    with Client(tmp_path / "nowhere" / "endpoint.json") as client, pytest.raises(PoolUnavailable, match="sunfleck up"):
        client.call("echo", timeout_s=0.1)
    with Client(wired.path) as client:
        with pytest.raises(PoolUnavailable, match="did not answer"):
            client.call("silence", timeout_s=0.2)
        wired.fabric.stop(forget=False)
        with pytest.raises(PoolUnavailable, match=r"did not answer within 0\.3 s"):
            client.call("echo", timeout_s=0.3)


def test_a_client_follows_a_restarted_controller(wired: Wired) -> None:
    with Client(wired.path) as client:
        assert client.call("echo", n=1) == {"n": 1}
        wired.fabric.stop(forget=False)
        threading.Timer(0.3, wired.start).start()
        assert client.call("echo", timeout_s=10, n=2) == {"n": 2}
        wired.fabric.stop(forget=False)
        wired.options["client_port"] = 0
        wired.path.unlink()  # so that it chooses new ports
        wired.start()
        assert client.call("echo", timeout_s=10, n=3) == {"n": 3}
