"""Stores that are gone are noticed at once, and a group of one needs nobody."""

from __future__ import annotations

import socket
import time
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch", reason="training needs torch")

from sunfleck.executor.elastic.comm import Comm, CommFailed, Superseded, connect_store, first_line  # noqa: E402
from sunfleck.executor.elastic.rounds import Rounds  # noqa: E402
from sunfleck.executor.launch.wire import FormRound  # noqa: E402

CPU = torch.device("cpu")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_store_that_is_gone_fails_at_once_and_is_named() -> None:
    port = free_port()
    began = time.monotonic()
    with pytest.raises(CommFailed, match=f"^the store at localhost:{port} does not answer"):
        connect_store("localhost", port)
    assert time.monotonic() - began < 3


def test_a_group_of_one_needs_nobody() -> None:
    comm = Comm(0, 1, CPU)
    tensor = torch.ones(3)
    comm.wait(comm.all_reduce(tensor))
    comm.fail(RuntimeError("x"))
    comm.close_behind()
    assert tensor.tolist() == [1.0] * 3


def test_waiting_for_members_ends_with_a_newer_round() -> None:
    server = torch.distributed.TCPStore(
        "127.0.0.1", free_port(), is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5)
    )
    rounds = Rounds(None, "j@a#0", "j", CPU)
    form = FormRound(round=4, members=("j@a#0", "j@b#0"), store_host="127.0.0.1", store_port=server.port)
    rounds.told = FormRound(round=5, members=("j@a#0",))
    with pytest.raises(Superseded):
        rounds.meet(form, {"exists": True})
    assert server.check(["j/4/here/0"])


def test_members_who_stay_away_are_named_after_the_timeout() -> None:
    server = torch.distributed.TCPStore(
        "127.0.0.1", free_port(), is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5)
    )
    rounds = Rounds(None, "j@a#0", "j", CPU)
    form = FormRound(round=4, members=("j@a#0", "j@b#0"), store_host="127.0.0.1", store_port=server.port, timeout_s=0.2)
    with pytest.raises(CommFailed, match=r"j@b#0 did not come within 0\.2 s"):
        rounds.meet(form, {"exists": True})


def test_messages_of_gloo_are_cut_to_what_they_say() -> None:
    long = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1: reset\nframe #0"
    assert first_line(RuntimeError(long)) == "Read error [127.0.0.1]:1: reset"
