"""The worker's socket never makes training wait."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sunfleck.executor.elastic.link import AgentGone, Link
from sunfleck.executor.launch.wire import Announce, EndProgram, Left, decode_from_worker, encode


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[Link, socket.socket]]:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.bind(str(tmp_path / "s"))
    server.listen()
    link = Link(str(tmp_path / "s"), "j@a#0")
    agent, _ = server.accept()
    agent.settimeout(5)
    assert agent.recv(100) == b"j@a#0"
    yield link, agent
    link.close()
    agent.close()
    server.close()


def test_commands_are_read_in_order_without_waiting(ends: tuple[Link, socket.socket]) -> None:
    link, agent = ends
    began = time.monotonic()
    assert link.read() == []
    assert time.monotonic() - began < 1
    agent.send(encode(Announce()))
    agent.send(encode(EndProgram(save=True)))
    assert link.read(5.0) == [Announce(), EndProgram(save=True)]


def test_an_agent_that_does_not_read_never_blocks_us_and_old_reports_are_dropped(
    ends: tuple[Link, socket.socket],
) -> None:
    link, agent = ends
    began = time.monotonic()
    for step in range(3000):
        link.send(Left(round=0, step=step))
    assert time.monotonic() - began < 5
    assert link.n_dropped > 0
    assert not link.flush(0.05)
    agent.setblocking(False)
    steps = []
    while True:
        try:
            steps.append(decode_from_worker(agent.recv(1000)).step)
        except BlockingIOError:
            if link.flush(0.5):
                break
    while True:
        try:
            steps.append(decode_from_worker(agent.recv(1000)).step)
        except BlockingIOError:
            break
    assert steps == sorted(steps)
    assert steps[-1] == 2999


def test_a_closed_agent_is_noticed(ends: tuple[Link, socket.socket]) -> None:
    link, agent = ends
    agent.close()
    with pytest.raises(AgentGone):
        link.read(5.0)
    with pytest.raises(AgentGone):
        link.send(Left(round=0, step=0))


def test_outside_of_a_pool_there_is_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUNFLECK_AGENT_SOCKET", raising=False)
    assert Link.from_environment() is None
