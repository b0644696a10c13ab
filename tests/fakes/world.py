"""A tiny world around the controller: it obeys commands, in whatever order a test likes, and checks every invariant.

It is the contract of cluster, executor and planner in fifty lines: what they may answer, and when.
"""

from __future__ import annotations

from collections.abc import Callable

from sunfleck.core import events as e
from sunfleck.core.commands import (
    AnyCommand,
    ReleaseNodes,
    RequestNodes,
    RescaleJob,
    Solve,
    StopJob,
    StopPool,
    WakeAt,
)
from sunfleck.core.controller import Controller, ControllerConfig
from sunfleck.core.model import JobSpec, NodeSpec, Plan, PlannedJob, Snapshot
from sunfleck.core.state import violations

Planner = Callable[[Snapshot], Plan]


def spread(snapshot: Snapshot) -> Plan:
    """A planner without an optimiser: jobs in order take nodes they have, then free ones, up to an even share."""
    if not snapshot.jobs:
        return Plan(jobs=())
    free = [node.name for node in snapshot.nodes if node.job is None]
    share = max(1, len(snapshot.nodes) // len(snapshot.jobs))
    planned = []
    for job in snapshot.jobs:
        sizes = [0, *job.spec.sizes(len(snapshot.nodes))]
        reachable = [n for n in sizes if n <= min(share, len(job.nodes) + len(free))]
        want = reachable[-1] if reachable else 0
        keep = list(job.nodes)[:want]
        more = [free.pop(0) for _ in range(want - len(keep))]
        planned.append(PlannedJob(job=job.job, nodes=tuple(keep + more), reason=f"an even share: {want}"))
    return Plan(jobs=tuple(planned), solver="spread")


class World:
    """`pending` holds answers that the adapters still owe; `deliver(i)` lets the i-th of them arrive."""

    def __init__(self, planner: Planner = spread, capacity: int | None = None) -> None:
        self.controller = Controller(ControllerConfig(capacity=capacity))
        self.planner = planner
        self.now = 0.0
        self.pending: list[e.AnyEvent] = []
        self.running: dict[str, frozenset[str]] = {}
        self.rounds: dict[str, int] = {}
        self.wakes: list[float] = []
        self.alive: set[str] = set()
        self.log: list[e.AnyEvent] = []
        self.commands: list[AnyCommand] = []
        self.pool_stopped = False

    @property
    def state(self):
        return self.controller.state

    def send(self, event: e.AnyEvent) -> list[AnyCommand]:
        self.log.append(event)
        commands = self.controller.handle(event, self.now)
        wrong = violations(self.state)
        assert not wrong, f"after {event}: {wrong}"
        for command in commands:
            self.commands.append(command)
            self.obey(command)
        return commands

    def obey(self, command: AnyCommand) -> None:
        if isinstance(command, Solve):
            plan = self.planner(command.snapshot)
            self.pending.append(e.PlanReady(generation=command.snapshot.generation, plan=plan, solve_s=0.001))
        elif isinstance(command, RescaleJob):
            self.rescale(command.job, frozenset(command.nodes))
        elif isinstance(command, StopJob):
            self.rescale(command.job, frozenset())
            self.pending.append(e.JobStopped(job=command.job))
        elif isinstance(command, ReleaseNodes):
            for name in command.nodes:
                holders = [job for job, nodes in self.running.items() if name in nodes]
                assert not holders, f"{name} is released while {holders} run there"
            self.pending.append(e.NodesReleased(nodes=command.nodes))
        elif isinstance(command, WakeAt):
            self.wakes.append(command.time_s)
        elif isinstance(command, StopPool):
            self.pool_stopped = True
        else:
            assert isinstance(command, RequestNodes)

    def rescale(self, job: str, nodes: frozenset[str]) -> None:
        before = self.running.get(job, frozenset())
        for other, others in self.running.items():
            assert other == job or not (others & nodes), f"{job} is sent where {other} still runs"
        # What was owed for an earlier command is superseded.
        self.pending = [p for p in self.pending if not (isinstance(p, e.RoundFormed) and p.job == job)]
        self.running[job] = before | nodes
        if before - nodes:
            self.pending.append(e.WorkersLeft(job=job, nodes=tuple(sorted(before - nodes)), planned=True))
        if nodes:
            self.rounds[job] = self.rounds.get(job, -1) + 1
            survivors = before & nodes
            self.pending.append(
                e.RoundFormed(
                    job=job,
                    round=self.rounds[job],
                    nodes=tuple(sorted(nodes)),
                    step=0,
                    took_s=0.1,
                    stall_s=0.01 if survivors else None,
                    cause="rescale" if survivors else "start",
                )
            )

    def deliver(self, index: int = 0) -> None:
        event = self.pending.pop(index)
        if isinstance(event, e.WorkersLeft):
            self.running[event.job] = self.running.get(event.job, frozenset()) - frozenset(event.nodes)
        if isinstance(event, e.NodesReleased):
            self.alive -= set(event.nodes)
        if isinstance(event, e.RoundFormed) and not set(event.nodes) <= self.alive:
            return  # a node of that round is gone: it can never form
        self.send(event)

    def settle(self, limit: int = 10_000) -> None:
        """Deliver everything that is owed, in order."""
        while self.pending:
            limit -= 1
            assert limit, "the controller and its adapters never come to rest"
            self.deliver()

    # -- what happens to it --------------------------------------------------------------------------------------

    def join(self, *names: str) -> None:
        self.alive |= set(names)
        self.send(e.NodesJoined(nodes=tuple(NodeSpec(name=name) for name in names)))

    def reclaim(self, *names: str, grace_s: float = 5.0) -> None:
        self.send(e.NodesReclaimed(nodes=names, grace_s=grace_s))

    def lose(self, *names: str) -> None:
        self.alive -= set(names)
        for job in self.running:
            self.running[job] -= frozenset(names)
        self.send(e.NodesLost(nodes=names, reason="test"))

    def submit(self, job: str, min_nodes: int = 1, max_nodes: int = 8, multiple: int = 1) -> None:
        spec = JobSpec(name=job, min_nodes=min_nodes, max_nodes=max_nodes, multiple=multiple)
        self.send(e.JobSubmitted(job=job, spec=spec))

    def restart(self, patience_s: float = 10.0) -> None:
        """A new controller replays everything, as after kill -9; the planner's answer dies with the old one."""
        self.pending = [p for p in self.pending if not isinstance(p, e.PlanReady)]
        old = self.controller
        self.controller = Controller(old.config)
        for event in self.log:
            self.controller.handle(event, self.now)
        self.send(e.ControllerRestarted(patience_s=patience_s))

    def rejoin(self) -> None:
        for name in sorted(self.alive):
            holder = next((job for job, nodes in self.running.items() if name in nodes), None)
            holding = {} if holder is None else {name: holder}
            self.send(e.NodesJoined(nodes=(NodeSpec(name=name),), holding=holding))
