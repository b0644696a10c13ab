"""Virtual nodes with real agents and workers: they come and go by schedule, by force and by accident."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

import psutil
import pytest

from sunfleck.cluster.cgroup import PREFIX, group_name
from sunfleck.cluster.local import LocalCluster, Offer
from sunfleck.core.events import AnyEvent, NodesJoined, NodesLost, NodesReclaimed, NodesReleased
from sunfleck.executor.launch import wire
from tests.fakes.pool import Pool, alive, marked, no_leaks, wait_for, zygote_pids

pytestmark = pytest.mark.system

STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleep = [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(1000)"]
a = subprocess.Popen(sleep)
b = subprocess.Popen(sleep, start_new_session=True)
print(os.getpid(), a.pid, b.pid, flush=True)
while True:
    pass
"""


class Nodes:
    """A pool with a local cluster on top, and what it reports."""

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self.pool = Pool(heartbeat_s=0.2)
        self.events: list[AnyEvent] = []
        self.at: list[float] = []
        self.cluster: LocalCluster | None = None

    def start(self, offers: Sequence[Offer] | None = None, n_nodes: int = 2, **options: Any) -> LocalCluster:
        self.cluster = LocalCluster(
            self.emit,
            self.pool.fabric,
            run_dir=self.pool.run_dir,
            endpoint_path=self.pool.endpoint_path,
            n_nodes=n_nodes,
            offers=offers,
            **{"node_cpus": 0.5, "warm": (), **options},
        )
        self.cluster.start()
        return self.cluster

    def emit(self, event: AnyEvent) -> None:
        self.at.append(time.time())
        self.events.append(event)

    def of(self, kind: type[Any], node: str | None = None) -> list[Any]:
        """Events of a kind (about a node)."""
        return [e for e in list(self.events) if isinstance(e, kind) and (node is None or node in names(e))]

    def joined(self, n_nodes: int) -> None:
        wait_for(lambda: len(self.of(NodesJoined)) >= n_nodes, f"{n_nodes} nodes joined")

    def family(self, node: str = "node0", text: str = STUBBORN) -> list[int]:
        worker = self.pool.start_worker(text, node)
        found = wait_for(lambda: self.pool.log(worker) if self.pool.log(worker).endswith("\n") else "", "pids")
        return [int(word) for word in found.split()]

    def restart_controller(self) -> None:
        """The old one is gone without a word; its agents are not."""
        assert self.cluster is not None
        self.pool.fabric.stop(forget=False)
        for node in self.cluster._nodes.values():
            if node.agent is not None and node.agent._child is not None:
                node.agent._child.returncode = 0  # not ours any more: keep Popen from waiting for it
        self.events.clear()
        self.pool.start_fabric()

    def close(self) -> None:
        if self.cluster is not None:
            self.cluster.stop()
            assert not [p for p in marked(self.mark) if p.pid != os.getpid()], "stop() leaves nothing running"
            left = sorted(path.name for path in self.pool.run_dir.iterdir())
            assert not [name for name in left if not name.startswith("agent-")], left
            name = group_name("pool", self.pool.run_dir)
            assert name.startswith(PREFIX)
            assert not [path for path in CGROUP_ROOTS if os.path.exists(os.path.join(path, name))]
        self.pool.close()


CGROUP_ROOTS = ["/sys/fs/cgroup", "/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct"]


def names(event: Any) -> list[str]:
    return [getattr(node, "name", node) for node in event.nodes]


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with no_leaks() as mark:
        found = Nodes(mark)
        try:
            yield found
        finally:
            found.close()


@pytest.fixture(params=["quota", "affinity"])
def either(request: pytest.FixtureRequest, nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    """With cgroups, where there are some, and without."""
    if request.param == "affinity":
        monkeypatch.setattr("sunfleck.cluster.shares.open_cpu_groups", lambda pool, run_dir: None)
    return nodes


def test_without_offers_all_nodes_join_and_stay(nodes: Nodes) -> None:
    nodes.start(n_nodes=3)
    nodes.joined(3)
    assert sorted(names(e)[0] for e in nodes.of(NodesJoined)) == ["node0", "node1", "node2"]
    assert all(e.nodes[0].cpus == 0.5 and e.holding == {} for e in nodes.of(NodesJoined))
    assert len(nodes.events) == 3


def test_a_released_node_is_free_and_is_not_taken_again(either: Nodes) -> None:
    cluster = either.start()
    either.joined(2)
    pids = either.family()
    cluster.release(["node0", "no such node"])
    wait_for(lambda: either.of(NodesReleased))
    assert not [pid for pid in pids if alive(pid)]
    released = either.of(NodesReleased)[0]
    assert released.nodes == ("node0",)
    assert 0 < released.handback_s < 5.0
    cluster.release(["node0"])
    time.sleep(0.7)
    assert len(either.events) == 3


def test_offers_come_and_go_by_the_clock(nodes: Nodes) -> None:
    epoch_s = time.time()
    offers = [
        Offer(start_s=0.0, end_s=2.0, node=0, grace_s=2.0),
        Offer(start_s=0.5, end_s=60.0, node=1, grace_s=2.0),
        Offer(start_s=2.5, end_s=60.0, node=0, grace_s=2.0),
    ]
    cluster = nodes.start(offers, epoch_s=epoch_s)
    wait_for(lambda: nodes.of(NodesReclaimed, "node0"))
    asked_at = nodes.at[nodes.events.index(nodes.of(NodesReclaimed)[0])]
    assert nodes.of(NodesReclaimed)[0].grace_s == 2.0
    assert 2.0 <= asked_at - epoch_s < 3.0
    cluster.release(["node0"])
    wait_for(lambda: nodes.of(NodesReleased, "node0"))
    wait_for(lambda: len(nodes.of(NodesJoined, "node0")) == 2)
    assert not nodes.of(NodesLost)
    assert not nodes.of(NodesReclaimed, "node1")


def test_a_node_that_is_not_released_in_time_is_taken(either: Nodes) -> None:
    either.start([Offer(start_s=0.0, end_s=3.0, node=0, grace_s=0.3)], n_nodes=1, epoch_s=time.time())
    either.joined(1)
    pids = either.family()
    wait_for(lambda: either.of(NodesLost))
    assert not [pid for pid in pids if alive(pid)]
    assert "not released within its 0.3 s" in either.of(NodesLost)[0].reason
    took_s = either.at[-1] - either.at[-2]
    assert 0.3 <= took_s < 3.0
    assert [type(e) for e in either.events] == [NodesJoined, NodesReclaimed, NodesLost]


def test_an_agent_that_dies_is_replaced(either: Nodes) -> None:
    either.start()
    either.joined(2)
    pids = either.family()
    agent = next(h.agent_pid for h in either.pool.listener.hellos if h.node.name == "node0")
    os.kill(agent, signal.SIGKILL)
    wait_for(lambda: either.of(NodesLost))
    assert not [pid for pid in pids if alive(pid)], "nothing is said before its workers are gone"
    assert "killed by signal 9" in either.of(NodesLost)[0].reason
    wait_for(lambda: len(either.of(NodesJoined, "node0")) == 2)
    assert len(either.of(NodesLost)) == 1


def test_an_agent_that_hangs_is_replaced(nodes: Nodes) -> None:
    nodes.pool.options["lost_after_s"] = 1.0
    nodes.pool.fabric.stop()
    nodes.pool.start_fabric()
    nodes.start(n_nodes=1)
    nodes.joined(1)
    os.kill(nodes.pool.listener.hellos[0].agent_pid, signal.SIGSTOP)
    wait_for(lambda: nodes.of(NodesLost))
    assert "no heartbeat" in nodes.of(NodesLost)[0].reason
    nodes.joined(2)


def test_agent_and_zygote_die_together(either: Nodes) -> None:
    either.start(n_nodes=1)
    either.joined(1)
    pids = either.family()
    for pid in [*zygote_pids(either.pool.run_dir), either.pool.listener.hellos[0].agent_pid]:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: either.of(NodesLost))
    assert not [pid for pid in pids if alive(pid)]
    either.joined(2)


def test_a_restarted_controller_adopts_what_runs(either: Nodes) -> None:
    epoch_s = time.time()
    offers = [
        Offer(start_s=0.0, end_s=1000.0, node=0),
        Offer(start_s=0.0, end_s=1000.0, node=1),
        Offer(start_s=1000.0, end_s=1001.0, node=2),
    ]
    either.start(offers, n_nodes=3, epoch_s=epoch_s)
    either.joined(2)
    pids = either.family()
    agents = {h.node.name: h.agent_pid for h in either.pool.listener.hellos}
    either.restart_controller()
    os.kill(agents["node1"], signal.SIGKILL)
    wait_for(lambda: not alive(agents["node1"]))
    either.start(offers, n_nodes=3, epoch_s=epoch_s)
    either.joined(2)
    assert either.of(NodesJoined, "node0")[0].holding == {"node0": "job"}
    assert either.of(NodesJoined, "node1")[0].holding == {}
    hellos = {h.node.name: h.agent_pid for h in either.pool.listener.hellos}
    assert hellos["node0"] == agents["node0"]
    assert hellos["node1"] != agents["node1"]
    assert all(alive(pid) for pid in pids)
    os.kill(agents["node0"], signal.SIGKILL)  # adopted agents are watched as well as our own
    wait_for(lambda: either.of(NodesLost, "node0"))
    assert not [pid for pid in pids if alive(pid)]


def test_agents_of_nodes_that_the_pool_has_no_more_are_not_left_behind(either: Nodes) -> None:
    either.start(n_nodes=2)
    either.joined(2)
    pids = either.family("node1")
    agents = {h.node.name: h.agent_pid for h in either.pool.listener.hellos}
    either.restart_controller()
    either.start(n_nodes=1)
    either.joined(1)
    wait_for(lambda: either.of(NodesLost, "node1"))
    assert not [pid for pid in [agents["node1"], *pids] if alive(pid)]
    assert alive(agents["node0"])
    assert not either.of(NodesJoined, "node1")


def test_an_offer_that_ended_while_the_controller_was_away(nodes: Nodes) -> None:
    epoch_s = time.time()
    offers = [Offer(start_s=0.0, end_s=3.0, node=0, grace_s=5.0)]
    nodes.start(offers, n_nodes=1, epoch_s=epoch_s)
    nodes.joined(1)
    nodes.family()
    nodes.restart_controller()
    time.sleep(max(0.0, epoch_s + 3.1 - time.time()))
    cluster = nodes.start(offers, n_nodes=1, epoch_s=epoch_s)
    wait_for(lambda: nodes.of(NodesReclaimed))
    assert nodes.of(NodesJoined)[0].holding == {"node0": "job"}
    cluster.release(["node0"])
    wait_for(lambda: nodes.of(NodesReleased))


def test_workers_have_their_share_and_agents_are_not_limited(nodes: Nodes) -> None:
    cluster = nodes.start(n_nodes=1, node_cpus=0.25)
    nodes.joined(1)
    if not cluster._shares.limited:
        pytest.skip("no writable cgroup with a CPU controller here")
    text = "import os, time\nprint(os.getpid())\nopen('up', 'w')\nwhile True: pass\n"
    pid = nodes.family(text=text)[0]
    worker = psutil.Process(pid)
    before, started = sum(worker.cpu_times()[:2]), time.monotonic()
    time.sleep(2.0)
    share = (sum(worker.cpu_times()[:2]) - before) / (time.monotonic() - started)
    assert share < 0.35
    agent = nodes.pool.listener.hellos[0].agent_pid
    with open(f"/proc/{agent}/cgroup") as file:
        assert PREFIX not in file.read()


def test_prewarmed_modules_are_there_for_the_first_worker(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    # a relative path would mean different modules here and in the worker's folder: two zygotes, rightly
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(os.path.abspath(entry) for entry in entries))
    nodes.start(n_nodes=1, warm=("fractions",))
    nodes.joined(1)
    worker = nodes.pool.start_worker("import sys; print('fractions' in sys.modules)", warm=("fractions",))
    assert nodes.pool.exit_of(worker).code == 0
    assert nodes.pool.log(worker) == "True\n"
    assert nodes.pool.listener.of(wire.WorkerStarted)[0].warm
    assert len(zygote_pids(nodes.pool.run_dir)) == 1


def test_stop_at_once_after_start(nodes: Nodes) -> None:
    nodes.start(n_nodes=4, warm=("json",))


def test_stop_with_stubborn_workers(either: Nodes) -> None:
    cluster = either.start()
    either.joined(2)
    pids = either.family("node0") + either.family("node1", STUBBORN)
    started = time.monotonic()
    cluster.stop()
    assert time.monotonic() - started < 5.0
    assert not [pid for pid in pids if alive(pid)]
    assert sorted(names(e)[0] for e in either.of(NodesReleased)) == ["node0", "node1"]
