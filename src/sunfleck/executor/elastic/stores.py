"""The rendezvous stores of a pool, one a node, as the controller's process sees them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sunfleck.core.model import NodeSpec, Program
from sunfleck.executor.base import Agents
from sunfleck.executor.launch.wire import Announce, StartWorker, StopWorker, ToWorker, WorkerId

from .store import JOB


@dataclass
class _Store:
    worker: WorkerId
    host: str
    port: int = 0


class Stores:
    """Starts a store where a job is about to train, restarts one that died, and says which one a round should use.

    Used in the fabric's thread only.
    """

    def __init__(self, agents: Agents, jobs_dir: Path, on_ready: Callable[[], None]) -> None:
        self._agents = agents
        self._log_dir = jobs_dir / JOB
        self._on_ready = on_ready
        self._stores: dict[str, _Store] = {}
        self._restarts: dict[str, int] = {}

    def want(self, node: NodeSpec, warm: tuple[str, ...]) -> None:
        """A job is about to train on this node. The store is forked from the zygote that the job uses anyway."""
        if node.name in self._stores:
            return
        restart = self._restarts[node.name] = self._restarts.get(node.name, -1) + 1
        worker = WorkerId(job=JOB, node=node.name, restart=restart)
        self._stores[node.name] = _Store(worker, node.host)
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._agents.send(
            node.name,
            StartWorker(
                worker=worker,
                program=Program(module="sunfleck.executor.elastic.store", warm=warm),
                env={"SUNFLECK_WORKER": str(worker), "SUNFLECK_NODE_HOST": node.host},
                log_path=str(self._log_dir / f"{node.name}.log"),
                limited=False,
            ),
        )

    def found(self, node: NodeSpec, worker: WorkerId) -> None:
        """An agent says that this store runs there: ask it for its port."""
        self._restarts[node.name] = max(self._restarts.get(node.name, -1), worker.restart)
        self._stores[node.name] = _Store(worker, node.host)
        self._agents.send(node.name, ToWorker(worker=worker, payload=Announce()))

    def ready(self, worker: WorkerId, port: int) -> None:
        store = self._stores.get(worker.node)
        if store is not None and store.worker == worker:
            store.port = port
            self._on_ready()

    def gone(self, worker: WorkerId) -> None:
        """It exited. Started again when the next round wants it."""
        store = self._stores.get(worker.node)
        if store is not None and store.worker == worker:
            del self._stores[worker.node]

    def node_lost(self, node: str) -> None:
        self._stores.pop(node, None)

    def distrust(self, host: str, port: int) -> None:
        """Workers could not reach it: end it, so that the next round takes another or a new one."""
        for node, store in list(self._stores.items()):
            if (store.host, store.port) == (host, port):
                self._agents.send(node, StopWorker(worker=store.worker, grace_s=0.0))
                del self._stores[node]

    def pick(self, nodes: tuple[str, ...]) -> tuple[str, int] | None:
        """Address for a round of workers on these nodes, in order of preference; None when none is up yet."""
        for node in (*nodes, *self._stores):
            store = self._stores.get(node)
            if store is not None and store.port:
                return store.host, store.port
        return None

    @property
    def workers(self) -> list[WorkerId]:
        return [s.worker for s in self._stores.values()]
