"""The executor of a live pool: trains jobs on real agents. Thread-safe; the work is done in the fabric's thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from sunfleck.core.events import AnyEvent
from sunfleck.core.model import JobSpec

from .base import Agents
from .elastic.supervisor import Supervisor

STOP_S = 3.0


class LiveExecutor:
    """`jobs_dir` holds a folder per job (checkpoints, logs) and must be reachable from all nodes."""

    def __init__(self, agents: Agents, emit: Callable[[AnyEvent], None], jobs_dir: Path) -> None:
        self._agents = agents
        self.supervisor = Supervisor(agents, emit, jobs_dir)
        agents.subscribe(self.supervisor)

    def rescale(self, job: str, spec: JobSpec, nodes: Sequence[str], grace_s: float) -> None:
        wanted = tuple(nodes)
        self._agents.post(lambda: self.supervisor.rescale(job, spec, wanted, grace_s))

    def stop_job(self, job: str, grace_s: float, save: bool) -> None:
        self._agents.post(lambda: self.supervisor.stop_job(job, grace_s, save))

    def stop(self) -> None:
        """Kill whatever still runs; wait for it, at most STOP_S seconds."""
        quiet = threading.Event()
        self._agents.post(lambda: self.supervisor.stop(quiet.set))
        quiet.wait(STOP_S)
