"""Virtual nodes on this machine: each is an agent process with a share of the CPUs.

Without offers all nodes are ours from the start. With offers (a trace of idle intervals, see `offers`) an agent is
started when its node becomes idle, and the node is reclaimed when the interval ends: the controller has `grace_s` to
release it, after which agent and workers are killed, as a batch system would do it.

All of this runs in the thread of the fabric. A new controller with the same run directory finds the agents of its
predecessor by their pid files, waits for them to call in, and goes on with the schedule, which counts from `epoch_s`.
Only workers are limited: an agent must answer at once, whatever its workers do.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import msgspec

from sunfleck.core.events import NodesJoined, NodesLost, NodesReclaimed, NodesReleased
from sunfleck.core.model import NodeSpec

from .base import Emit
from .offers import Offer, Timetable
from .processes import Loop, Timer, Watched, is_alive, pid_from, send_signal
from .shares import Shares

__all__ = ["LocalCluster", "Offer"]

log = logging.getLogger(__name__)

AGENT = "sunfleck.executor.launch.agent"
RESTART_PAUSE_S = 0.5
RESTART_PAUSE_MAX_S = 30.0
LEAVE_PATIENCE_S = 2.0
"""What an agent may take to leave beyond the grace of its workers, before it is killed."""


class WorkerOfHello(Protocol):
    @property
    def job(self) -> str: ...


class AgentHello(Protocol):
    """What is needed of executor.launch.wire.Hello."""

    @property
    def node(self) -> NodeSpec: ...
    @property
    def agent_pid(self) -> int: ...
    @property
    def workers(self) -> Sequence[WorkerOfHello]: ...


class Agents(Loop, Protocol):
    """What is needed of executor.launch.fabric.Fabric."""

    def subscribe(self, listener: Any) -> None: ...
    def post(self, action: Callable[[], None]) -> None: ...
    def now(self) -> float: ...
    def leave_node(self, node: str, grace_s: float) -> None: ...


class Phase(StrEnum):
    """absent -> starting -> joined -> (reclaimed ->) leaving -> absent; killed -> absent from anywhere."""

    ABSENT = "absent"
    STARTING = "starting"
    JOINED = "joined"
    RECLAIMED = "reclaimed"
    LEAVING = "leaving"
    KILLED = "killed"


class _Node:
    def __init__(self, spec: NodeSpec, timetable: Timetable | None) -> None:
        self.spec, self.timetable = spec, timetable
        self.phase = Phase.ABSENT
        self.agent: Watched | None = None
        self.adopted = False
        """Its agent was started by an earlier controller, and may hold a worker: it is heard before it must go."""
        self.deadline: Timer | None = None
        self.deadline_s = 0.0
        self.asked_back_at = 0.0
        self.why_killed = ""
        self.given_back: Offer | bool = False
        """The offer that the controller released before its end (True without offers)."""
        self.n_failures = 0


class LocalCluster:
    """See cluster.base.Cluster. `limit_note` says in words what stands between a node and its share of the CPUs;
    empty: nothing. Stop it before the fabric."""

    def __init__(
        self,
        emit: Emit,
        agents: Agents,
        *,
        run_dir: Path,
        endpoint_path: Path,
        n_nodes: int,
        node_cpus: float | None = None,
        offers: Sequence[Offer] | None = None,
        epoch_s: float | None = None,
        pool: str = "pool",
        warm: Sequence[str] = ("torch",),
        leave_grace_s: float = 0.2,
        call_in_s: float = 10.0,
    ) -> None:
        self._emit, self._agents = emit, agents
        self._run_dir, self._endpoint_path, self._pool = run_dir, endpoint_path, pool
        self._warm, self._leave_grace_s, self._call_in_s = tuple(warm), leave_grace_s, call_in_s
        self._epoch_s = time.time() if epoch_s is None else epoch_s
        self._shares = Shares(pool, run_dir, n_nodes, node_cpus)
        self.limit_note = self._shares.note
        self._nodes: dict[str, _Node] = {}
        for index in range(n_nodes):
            spec = NodeSpec(name=f"node{index}", cpus=self._shares.node_cpus, memory_bytes=_memory_bytes() // n_nodes)
            mine = None if offers is None else Timetable([offer for offer in offers if offer.node == index])
            self._nodes[spec.name] = _Node(spec, mine)
        self._stopping = False
        self._all_gone = threading.Event()
        self._prewarm: subprocess.Popen[bytes] | None = None

    # -- Cluster -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._log_path("").parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._shares.open()
        self.limit_note = self._shares.note
        if self._warm:
            self._prewarm = subprocess.Popen(
                [sys.executable, "-m", "sunfleck.executor.launch.zygotes", str(self._run_dir), ",".join(self._warm)],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._agents.post(self._begin)

    @property
    def warming(self) -> bool:
        """Whether the first zygote still imports its modules; workers that are asked for meanwhile wait for it."""
        return self._prewarm is not None and self._prewarm.poll() is None

    def request(self, n_nodes: int) -> None:
        """Nodes come by the schedule, not by asking."""

    def release(self, nodes: Sequence[str]) -> None:
        def release_all() -> None:
            for name in nodes:
                if name in self._nodes:
                    self._release(self._nodes[name])

        self._agents.post(release_all)

    def stop(self) -> None:
        self._agents.post(self._end)
        if not self._all_gone.wait(5.0):
            log.error("agents of %s still run", [n.spec.name for n in self._nodes.values() if n.agent])
        self._stop_zygotes()
        self._shares.close()
        for path in self._run_dir.glob("[az]-*"):
            path.unlink(missing_ok=True)

    def _log_path(self, name: str) -> Path:
        return self._endpoint_path.parent / "agents" / f"{name}.log"

    # -- life of a node ------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._dismiss_strangers()
        for node in self._nodes.values():
            self._adopt(node)
            self._drive(node)
        self._agents.subscribe(self)  # not before: who calls in must be known

    def _drive(self, node: _Node) -> None:
        """Start or reclaim the node if it is time to, and come back at the next change."""
        if self._stopping:
            return
        now_s = time.time() - self._epoch_s
        offer = node.timetable.at(now_s) if node.timetable is not None else None
        if node.timetable is not None:
            next_s = node.timetable.next_change_s(now_s)
            if next_s is not None:
                self._agents.call_later(next_s - now_s + 0.0005, lambda: self._drive(node))
        here = node.timetable is None or offer is not None
        spent = node.given_back is True or (offer is not None and node.given_back is offer)
        if node.phase is Phase.ABSENT and here and not spent:
            self._start_agent(node)
        elif node.phase is Phase.JOINED and not here:
            self._reclaim(node, now_s)
        elif node.phase is Phase.STARTING and not here and not node.adopted:
            self._kill(node, "its offer ended before it had joined")

    def _adopt(self, node: _Node) -> None:
        """An agent of this node that outlived an earlier controller will call in, or is killed."""
        pid = pid_from(self._pid_path(node), [AGENT, str(self._run_dir)])
        if pid is not None:
            node.phase = Phase.STARTING
            self._shares.procs_file(node.spec.name)
            node.adopted = True
            self._follow(node, pid, None)

    def _dismiss_strangers(self) -> None:
        """Agents of an earlier, larger pool would wait for ever new controllers that have no place for them."""
        for path in self._run_dir.glob("a-*.pid"):
            name = path.stem.removeprefix("a-")
            if name not in self._nodes:
                spec = NodeSpec(name=name, cpus=self._shares.node_cpus)
                stranger = self._nodes[name] = _Node(spec, Timetable([]))  # never ours again
                self._adopt(stranger)
                self._kill(stranger, "no node of this pool any more")

    def _start_agent(self, node: _Node) -> None:
        name = node.spec.name
        argv = [sys.executable, "-m", AGENT, "--endpoint", str(self._endpoint_path), "--run-dir", str(self._run_dir)]
        argv += ["--node", msgspec.json.encode(node.spec).decode()]
        argv += [word for file in self._shares.procs_file(name) for word in ("--cgroup", str(file))]
        argv += ["--cpus", ",".join(map(str, self._shares.cpus_of(int(name.removeprefix("node")))))]
        with open(self._log_path(name), "ab") as output:
            child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=self._shares.inherit(),
                start_new_session=True,
            )
        self._pid_path(node).write_text(str(child.pid))  # now, so that a successor of ours cannot miss it
        node.phase, node.adopted = Phase.STARTING, False
        self._follow(node, child.pid, child)

    def _follow(self, node: _Node, pid: int, child: subprocess.Popen[bytes] | None) -> None:
        node.agent = Watched(self._agents, pid, child, lambda how: self._on_agent_ended(node, how))
        self._set_deadline(node, self._call_in_s, lambda: self._kill(node, "its agent did not call in"))

    def _set_deadline(self, node: _Node, delay_s: float | None, action: Callable[[], None]) -> None:
        if node.deadline is not None:
            node.deadline.cancel()
        node.deadline = None if delay_s is None else self._agents.call_later(delay_s, action)
        node.deadline_s = self._agents.now() + (delay_s or 0.0)

    def _reclaim(self, node: _Node, now_s: float) -> None:
        ended = [offer for offer in node.timetable.offers if offer.end_s <= now_s] if node.timetable else []
        grace_s = ended[-1].grace_s if ended else 0.0
        node.phase, node.asked_back_at = Phase.RECLAIMED, self._agents.now()
        self._shares.lift(node.spec.name)
        self._set_deadline(node, grace_s, lambda: self._kill(node, f"not released within its {grace_s:g} s of grace"))
        self._emit(NodesReclaimed(nodes=(node.spec.name,), grace_s=grace_s, reason="wanted by the cluster"))

    def _release(self, node: _Node) -> None:
        late_s = self._leave_grace_s + LEAVE_PATIENCE_S
        if node.phase is Phase.RECLAIMED:
            node.phase = Phase.LEAVING
            left_s = node.deadline_s - self._agents.now()
            self._set_deadline(node, min(left_s, late_s), lambda: self._kill(node, "its agent did not leave in time"))
        elif node.phase is Phase.JOINED:
            node.phase, node.asked_back_at = Phase.LEAVING, self._agents.now()
            timetable = node.timetable
            node.given_back = True if timetable is None else (timetable.at(time.time() - self._epoch_s) or False)
            self._set_deadline(node, late_s, lambda: self._kill(node, f"its agent did not leave within {late_s:g} s"))
        else:
            return
        self._agents.leave_node(node.spec.name, self._leave_grace_s)

    def _kill(self, node: _Node, why: str) -> None:
        if node.agent is None or node.phase is Phase.KILLED:
            return
        node.phase, node.why_killed = Phase.KILLED, why
        log.warning("%s: %s: killed", node.spec.name, why)
        node.agent.kill()
        self._shares.kill(node.spec.name, 0.0)

    # -- what agents say and do ----------------------------------------------------------------------------------

    def on_agent_joined(self, hello: AgentHello) -> None:
        node = self._nodes.get(hello.node.name)
        if node is None or node.agent is None or node.agent.pid != hello.agent_pid:
            log.warning("agent %d of %s is none of ours", hello.agent_pid, hello.node.name)
            return
        if self._stopping or node.phase in (Phase.LEAVING, Phase.KILLED):
            self._agents.leave_node(node.spec.name, self._leave_grace_s)
            return
        first = node.phase is Phase.STARTING
        if first:
            node.phase, node.n_failures = Phase.JOINED, 0
            self._set_deadline(node, None, lambda: None)
        holders = [worker.job for worker in hello.workers]
        holding = {hello.node.name: holders[0]} if holders else {}
        self._emit(NodesJoined(nodes=(node.spec,), holding=holding))
        if first:
            self._drive(node)  # its offer may have ended in the meantime

    def on_agent_message(self, node: str, message: object) -> None:
        """Workers are the executor's business."""

    def on_agent_lost(self, name: str, reason: str) -> None:
        node = self._nodes.get(name)
        if node is None or reason == "goodbye" or node.phase not in (Phase.JOINED, Phase.RECLAIMED, Phase.LEAVING):
            return
        if node.agent is not None and not node.agent.ended:
            self._kill(node, f"its agent is silent ({reason})")

    def _on_agent_ended(self, node: _Node, how: str) -> None:
        """Nothing is said about the node until its workers are gone too."""
        if node.phase in (Phase.JOINED, Phase.RECLAIMED):
            node.why_killed = f"its agent ended by itself ({how})"
        if node.phase is Phase.LEAVING and how in ("exit code 0", "gone"):
            self._when_empty(node, how)
        else:
            self._sweep(node, lambda: self._when_empty(node, how))

    def _sweep(self, node: _Node, then: Callable[[], None]) -> None:
        """Kill what the agent could not: by cgroup, or where there is none by the workers' environment."""
        if self._shares.limited:
            then()
            return
        found = importlib.util.find_spec("sunfleck.executor.launch.zygote")
        assert found is not None
        assert found.origin is not None
        mark = f"SUNFLECK_AGENT_SOCKET={self._run_dir / ('a-' + node.spec.name)}"
        child = subprocess.Popen([sys.executable, "-S", found.origin, "sweep", mark], stdin=subprocess.DEVNULL)
        Watched(self._agents, child.pid, child, lambda _: then())

    def _when_empty(self, node: _Node, how: str, n_tries: int = 0) -> None:
        if not self._shares.kill(node.spec.name, 0.0) and n_tries < 1000:
            self._agents.call_later(0.002, lambda: self._when_empty(node, how, n_tries + 1))
            return
        self._on_node_empty(node, how)

    def _on_node_empty(self, node: _Node, how: str) -> None:
        phase, name = node.phase, node.spec.name
        node.phase, node.agent = Phase.ABSENT, None
        self._set_deadline(node, None, lambda: None)
        if phase is Phase.LEAVING:
            handback_s = self._agents.now() - node.asked_back_at
            self._emit(NodesReleased(nodes=(name,), handback_s=handback_s))
        elif phase is Phase.STARTING and not self._stopping:
            log.warning("%s: agent did not start (%s): %s", name, how, self._log_path(name))
        elif phase is not Phase.STARTING:
            self._emit(NodesLost(nodes=(name,), reason=node.why_killed))
        if self._stopping:
            self._check_all_gone()
        elif phase is Phase.LEAVING:
            self._drive(node)
        else:
            pause_s = min(RESTART_PAUSE_S * 2**node.n_failures, RESTART_PAUSE_MAX_S)
            node.n_failures += 1
            self._agents.call_later(pause_s, lambda: self._drive(node))

    # -- the end -------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        self._stopping = True
        for node in self._nodes.values():
            if node.phase in (Phase.JOINED, Phase.RECLAIMED):
                self._release(node)
            elif node.phase is Phase.STARTING and node.agent is not None:
                node.agent.kill(signal.SIGTERM)
        self._agents.call_later(2.0, self._kill_all)
        self._check_all_gone()

    def _kill_all(self) -> None:
        for node in self._nodes.values():
            self._kill(node, "still there two seconds after the pool had ended")

    def _check_all_gone(self) -> None:
        if all(node.agent is None for node in self._nodes.values()):
            self._all_gone.set()

    def _stop_zygotes(self) -> None:
        if self._prewarm is not None:
            self._prewarm.kill()
            self._prewarm.wait()
        paths = [path.with_suffix("") for path in self._run_dir.glob("z-*.pid")]
        running = {pid for path in paths if (pid := pid_from(path.with_suffix(".pid"), [str(path)])) is not None}
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in running:
                send_signal(pid, number)
            deadline = time.monotonic() + 3.0
            while running and time.monotonic() < deadline:
                running = {pid for pid in running if is_alive(pid)}
                time.sleep(0.005)

    def _pid_path(self, node: _Node) -> Path:
        return self._run_dir / f"a-{node.spec.name}.pid"


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
