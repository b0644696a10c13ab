"""The composition root: the one place that chooses adapters. A mode is a choice made here, and never an `if` elsewhere.

`run` is a pool's controller process: it replays the journal, builds the local cluster and the live executor around
the controller, and drives the engine until the pool is asked to stop.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import msgspec

from sunfleck import __version__
from sunfleck.api import ENDPOINT, REMEMBERED
from sunfleck.cluster.local import LocalCluster
from sunfleck.cluster.offers import Offer
from sunfleck.config import Config, private_dir
from sunfleck.core.controller import Controller, ControllerConfig
from sunfleck.core.errors import InvalidRequest, JournalUnavailable
from sunfleck.core.events import AnyEvent, ControllerRestarted, PoolStarted, PoolStopRequested
from sunfleck.engine import Engine, Item, ThreadPlanner, WallClock
from sunfleck.executor.elastic import warmed
from sunfleck.executor.launch.fabric import Fabric
from sunfleck.executor.launch.keys import ensure_keys
from sunfleck.executor.live import LiveExecutor
from sunfleck.observers.journal import Journal
from sunfleck.observers.views import PoolView
from sunfleck.policy.registry import make as make_policy
from sunfleck.service import Service

log = logging.getLogger("sunfleck")

REJOIN_PATIENCE_S = 10.0
"""How long a restarted controller waits for agents that outlived the last one."""


class Recorder:
    """Observer: journal first, then the views that answer queries."""

    def __init__(self, journal: Journal, view: PoolView) -> None:
        self._journal = journal
        self._view = view
        self._said: str | None = None

    def on_event(self, time_s: float, event: AnyEvent) -> None:
        self._journal.append(time_s, event)
        self._view.add(time_s, event)

    def on_turn_end(self) -> None:
        try:
            self._journal.commit()
        except JournalUnavailable as error:
            if self._said is None:
                log.error("%s; training goes on, events are kept in memory and written when it can be again", error)
            self._said = str(error)
        else:
            if self._said is not None:
                log.warning("the journal can be written again; nothing was lost")
            self._said = None

    @property
    def warnings(self) -> list[str]:
        return [] if self._journal.fault is None else [f"journal: {self._journal.fault}"]


@contextmanager
def only_one(pool_dir: Path, pool: str) -> Iterator[None]:
    """Hold the pool: a second controller for the same folder is refused."""
    with (pool_dir / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            pid = file.read().strip() or "?"
            raise InvalidRequest(
                f"pool {pool!r} is already up (pid {pid}); end it with `sunfleck down`, or name another with --pool"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def offers(config: Config, epoch_s: float) -> list[Offer] | None:
    """When which virtual node is ours, by the configured trace; None: always."""
    if not config.trace:
        return None
    if config.trace == "demo":
        from sunfleck.demo.idle import DEMO_S, demo_offers

        plain = demo_offers(config.trace_s or DEMO_S, n_loops=30, n_nodes=config.n_nodes)
    else:
        from sunfleck.sim.readers import read_trace

        trace = read_trace(config.trace).first_nodes(config.n_nodes)
        if config.trace_start_s or config.trace_length_s:
            length_s = config.trace_length_s or trace.end_s - config.trace_start_s
            trace = trace.window(config.trace_start_s, length_s)
        trace = trace.shift(-trace.begin_s)
        if config.trace_s:
            trace = trace.compress(trace.span_s / config.trace_s)
        plain = list(zip(trace.start.tolist(), trace.end.tolist(), trace.node.tolist(), strict=True))
    return [Offer(start_s=start, end_s=end, node=node, grace_s=config.grace_s) for start, end, node in plain]


def policy_options(config: Config) -> dict[str, object]:
    """What was set for the policy, by its own names. Not every policy knows every option: what was left alone is not
    passed on, and what was set and is not known is refused by name."""
    given: dict[str, object] = {}
    if config.t_fwd_s:
        given["t_fwd_s"] = config.t_fwd_s
    if config.objective != "normalised":
        given["objective"] = config.objective
    if config.profile_scales != Config().profile_scales:
        given["n_scales"] = config.profile_scales
    return given


def _remember(path: Path, config: Config) -> None:
    """Beside, then renamed: a full disk must not cost the pool its settings."""
    beside = path.with_suffix(".new")
    beside.write_bytes(msgspec.json.format(msgspec.json.encode(config)))
    beside.replace(path)


def move_aside(pool_dir: Path) -> None:
    """`--fresh`: keep the old journal and jobs under a dated name, and begin with none."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for n in itertools.count():
        aside = pool_dir / "old" / (stamp if n == 0 else f"{stamp}-{n}")
        if not aside.exists():
            break
    for name in ("journal.db", "journal.db-wal", "journal.db-shm", "jobs", REMEMBERED):
        path = pool_dir / name
        if path.exists():
            aside.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.rename(aside / name)


def run(config: Config, *, fresh: bool = False, ready: Callable[[], None] | None = None) -> int:
    """Be the controller of a local pool until it is stopped. Returns the exit code.

    SIGTERM and SIGINT ask for an orderly stop, a second one ends at once (agents then keep training for
    `config.patience_s`, waiting for a new controller).
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    pool_dir = private_dir(config.pool_dir)
    with only_one(pool_dir, config.pool):
        if fresh:
            move_aside(pool_dir)
        jobs_dir = private_dir(pool_dir / "jobs")
        private_dir(config.run_dir)
        _remember(pool_dir / REMEMBERED, config)
        clock = WallClock()
        emit: Callable[[Item], None] = clock.put
        controller = Controller(ControllerConfig(leave_grace_s=config.leave_grace_s, capacity=config.n_nodes))
        view = PoolView(keep_ledger=False)
        with Journal.open(pool_dir / "journal.db", pool=config.pool, now_s=clock.now(), version=__version__) as journal:
            replayed = 0
            epoch_s = clock.now()
            for entry in journal.iterate():
                if replayed == 0:
                    epoch_s = entry.time_s
                controller.handle(entry.event, entry.time_s)
                view.add(entry.time_s, entry.event)
                replayed += 1
            recorder = Recorder(journal, view)
            notes: list[str] = []
            service = Service(
                config,
                clock,
                view,
                lambda: recorder.warnings + notes,
                lambda job: str(jobs_dir / job / "logs"),
                lambda: cluster.warming,
            )
            fabric = Fabric(
                ensure_keys(pool_dir),
                pool_dir / ENDPOINT,
                on_request=service.handle,
                agent_port=config.port,
                version=__version__,
                heartbeat_s=config.heartbeat_s,
                lost_after_s=6 * config.heartbeat_s,
                patience_s=config.patience_s,
            )
            executor = LiveExecutor(fabric, emit, jobs_dir)
            cluster = LocalCluster(
                emit,
                fabric,
                run_dir=config.run_dir,
                endpoint_path=pool_dir / ENDPOINT,
                n_nodes=config.n_nodes,
                node_cpus=config.cpus_per_node,
                offers=offers(config, epoch_s),
                epoch_s=epoch_s,
                pool=config.pool,
                warm=warmed(config.warm),
            )
            policy = make_policy(config.policy, **policy_options(config))
            planner = ThreadPlanner(policy, emit)
            engine = Engine(controller, clock, planner, cluster, executor, [recorder])
            service.engine = engine
            if replayed:
                log.info("pool %s goes on: %d events replayed", config.pool, replayed)
                emit(ControllerRestarted(patience_s=REJOIN_PATIENCE_S))
            else:
                emit(PoolStarted(pool=config.pool, version=__version__))
            _on_signals(engine, emit)
            fabric.start()
            try:
                cluster.start()
                if cluster.limit_note:
                    notes.append(cluster.limit_note)
                log.info("pool %s is up: %d nodes of %.3g CPUs", config.pool, config.n_nodes, config.cpus_per_node)
                if ready is not None:
                    ready()
                engine.run()
            finally:
                planner.stop()
                orderly = controller.state.stopped
                if orderly:
                    executor.stop()
                    cluster.stop()
                    shutil.rmtree(config.run_dir, ignore_errors=True)
                fabric.stop(forget=orderly)
    return 0


def _on_signals(engine: Engine, emit: Callable[[Item], None]) -> None:
    asked = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            engine.interrupt()
        else:
            asked = True
            emit(PoolStopRequested())

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
