"""What a pool answers to its clients. Queries are drawings of the state; requests become events.

Runs in the engine's thread, between events, so that every answer is of one moment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from sunfleck import __version__
from sunfleck.config import Config
from sunfleck.core.controller import Controller
from sunfleck.core.errors import InvalidRequest, SunfleckError
from sunfleck.core.events import JobCancelRequested, JobSubmitted, PoolStopRequested
from sunfleck.core.model import JobPhase, JobSpec, NodePhase
from sunfleck.core.state import JobState, NodeState
from sunfleck.engine import Call, Clock, Engine, Post
from sunfleck.observers.views import CurvePoint, ExplainView, JobRow, NodeRow, PlanRow, PoolView, StatusView
from sunfleck.policy.scaling import fit

Reply = Callable[[Any], None]
STUCK_S = 20.0
"""A job with workers that reports nothing for this long gets a word about it."""


class Service:
    """`handle` may be called from any thread; `reply` is called once, with the result or with an exception."""

    def __init__(
        self,
        config: Config,
        clock: Clock,
        view: PoolView,
        warnings: Callable[[], list[str]],
        log_path: Callable[[str], str],
        warming: Callable[[], bool] = lambda: False,
    ) -> None:
        self._config = config
        self._clock = clock
        self._view = view
        self._warnings = warnings
        self._log_path = log_path
        self._warming = warming
        self._started_s = clock.now()
        self.engine: Engine | None = None
        self._methods: dict[str, Callable[..., Any]] = {
            "ping": self._ping,
            "status": self._status,
            "explain": self._explain,
            "submit": self._submit,
            "cancel": self._cancel,
            "down": self._down,
        }

    def handle(self, method: str, params: dict[str, Any], reply: Reply) -> None:
        def answer(controller: Controller, now: float) -> None:
            try:
                found = self._methods.get(method)
                if found is None:
                    raise InvalidRequest(
                        f"the pool's controller (version {__version__}) knows no request {method!r}; "
                        "are command and pool of the same version?"
                    )
                found(controller, now, reply, **params)
            except SunfleckError as error:
                reply(error)
            except Exception as error:  # the client must not wait for ever for a bug of ours
                reply(SunfleckError(f"{method}: {type(error).__name__}: {error}"))
                raise

        self._clock.put(Call(answer))

    # -- queries -------------------------------------------------------------------------------------------------

    def _ping(self, controller: Controller, now: float, reply: Reply) -> None:
        reply({"pool": self._config.pool, "version": __version__})

    def _status(self, controller: Controller, now: float, reply: Reply) -> None:
        state = controller.state
        handbacks = self._view.handbacks_s()
        reply(
            StatusView(
                pool=self._config.pool,
                version=__version__,
                now_s=now,
                started_s=self._started_s,
                generation=state.generation,
                nodes=tuple(_node_row(controller, name, node) for name, node in sorted(state.nodes.items())),
                jobs=tuple(_job_row(controller, job, now) for job in state.jobs.values()),
                plan=_plan_row(controller),
                profiling=state.profiling,
                n_reclaims=state.n_reclaims,
                handback_s_p50=percentile(handbacks, 50),
                handback_s_p99=percentile(handbacks, 99),
                warming=self._warming(),
                stopping=state.stopping,
                warnings=tuple(self._all_warnings(controller)),
            )
        )

    def _all_warnings(self, controller: Controller) -> list[str]:
        warnings = self._warnings()
        if controller.state.plan_error:
            warnings.append(f"the policy gave no plan ({controller.state.plan_error}); what runs keeps running")
        if self.engine is not None and self.engine.faults:
            warnings.append(f"internal error, see controller.log: {self.engine.faults[-1]}")
        return warnings

    def _explain(self, controller: Controller, now: float, reply: Reply, job: str) -> None:
        found = find_job(controller, job)
        state = controller.state
        stats = tuple(found.scales[n] for n in sorted(found.scales))
        curve = fit(stats)
        n_max = min(found.spec.max_nodes, max(len(state.nodes), max(found.scales, default=1)))
        points = (
            [
                CurvePoint(
                    n_nodes=n,
                    samples_per_s=curve.at(n),
                    measured=n in found.scales,
                    stderr_per_s=_finite(found.scales[n].stderr_per_s) if n in found.scales else None,
                    n_reports=found.scales[n].n_reports if n in found.scales else 0,
                )
                for n in found.spec.sizes(n_max)
            ]
            if stats
            else []
        )
        reply(
            ExplainView(
                row=_job_row(controller, found, now),
                now_s=now,
                reason=stuck(found, now) or found.reason,
                details=tuple(_details(controller, found)),
                curve=tuple(points),
                costs=found.costs,
                profiling=state.profiling if state.profiling and state.profiling.job == found.job else None,
                plan=_plan_row(controller),
                t_fwd_s=self._config.t_fwd_s or None,
                n_pool_nodes=len(state.nodes),
                log_path=self._log_path(found.job),
            )
        )

    # -- requests ------------------------------------------------------------------------------------------------

    def _submit(self, controller: Controller, now: float, reply: Reply, spec: dict[str, Any]) -> None:
        try:
            wanted = msgspec.convert(spec, JobSpec)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"not a job: {error}") from None
        refusal = controller.refusal(wanted)
        if refusal:
            raise InvalidRequest(f"job {wanted.name!r} can never run in pool {self._config.pool!r}: {refusal}")
        if controller.state.stopping:
            raise InvalidRequest(f"pool {self._config.pool!r} is stopping; submit again when it is up")
        for warning in self._warnings():
            if warning.startswith("journal"):
                raise InvalidRequest(f"nothing is accepted that could be lost: {warning}")
        job = f"j{len(controller.state.jobs) + 1}"
        self._clock.put(Post(JobSubmitted(job=job, spec=wanted), done=lambda: reply({"job": job})))

    def _cancel(self, controller: Controller, now: float, reply: Reply, job: str) -> None:
        found = find_job(controller, job)
        if found.phase.final:
            raise InvalidRequest(f"job {found.job} ({found.spec.name}) is already {found.phase}")
        event = JobCancelRequested(job=found.job)
        self._clock.put(Post(event, done=lambda: reply({"job": found.job})))

    def _down(self, controller: Controller, now: float, reply: Reply) -> None:
        self._clock.put(Post(PoolStopRequested(), done=lambda: reply({"pool": self._config.pool})))


def find_job(controller: Controller, key: str) -> JobState:
    """By id, or by a name that only one job has (the newest unfinished one first). Raises InvalidRequest."""
    jobs = controller.state.jobs
    if key in jobs:
        return jobs[key]
    named = [job for job in jobs.values() if job.spec.name == key]
    running = [job for job in named if not job.phase.final]
    if len(running or named) == 1:
        return (running or named)[0]
    if named:
        raise InvalidRequest(f"{len(named)} jobs are named {key!r}: name one by id ({', '.join(j.job for j in named)})")
    raise InvalidRequest(f"no job {key!r}; `sunfleck jobs` lists them")


def percentile(values: list[float], percent: float) -> float | None:
    """None for no values."""
    return float(np.percentile(values, percent)) if values else None


def _finite(value: float) -> float | None:
    return value if value != float("inf") else None


def _node_row(controller: Controller, name: str, node: NodeState) -> NodeRow:
    reason = ""
    if node.phase is NodePhase.LEAVING:
        reason = "reclaimed" if node.reclaimed_s is not None else "being handed back"
        reason += f"; waits for {node.job} to leave" if node.job else "; nothing of ours runs there"
    elif node.phase is NodePhase.SILENT:
        reason = "its agent has not called in since the controller was restarted"
    elif node.phase is NodePhase.IDLE:
        planned = [job.job for job in controller.state.active_jobs if name in job.planned]
        if planned:
            reason = f"planned for {planned[0]}"
        else:
            reason = "no job can use it" if controller.state.active_jobs else "no job"
    return NodeRow(
        name=name,
        phase=node.phase,
        job=node.job,
        host=node.spec.host,
        kind=node.spec.kind,
        cpus=node.spec.cpus,
        n_gpus=node.spec.n_gpus,
        joined_s=node.joined_s,
        reason=reason,
    )


def _job_row(controller: Controller, job: JobState, now: float) -> JobRow:
    profiling = controller.state.profiling
    return JobRow(
        job=job.job,
        name=job.spec.name,
        phase=job.phase,
        min_nodes=job.spec.min_nodes,
        max_nodes=job.spec.max_nodes,
        planned=tuple(sorted(job.planned)),
        requested=tuple(sorted(job.requested or ())),
        observed=tuple(sorted(job.observed)),
        submitted_s=job.submitted_s,
        ended_s=job.ended_s,
        step=job.step,
        epoch=job.epoch,
        samples=job.samples,
        samples_per_s=job.samples_per_s,
        metrics=dict(job.metrics),
        target=job.spec.target,
        n_rescales=job.n_rescales,
        profiling=profiling is not None and profiling.job == job.job,
        reason=job.error or job.reason if job.phase is JobPhase.FAILED else stuck(job, now) or job.reason,
    )


def _plan_row(controller: Controller) -> PlanRow | None:
    state = controller.state
    if state.plan is None:
        return None
    return PlanRow(
        solver=state.plan.solver,
        time_s=state.plan_s,
        solve_s=state.plan_solve_s,
        objective=state.plan.objective,
        bound=state.plan.bound,
        gap=state.plan.gap,
        generation=state.generation,
    )


def stuck(job: JobState, now: float) -> str:
    """What a user should know of a job that has workers and does not train; empty when all is well."""
    if job.phase is JobPhase.STARTING and job.requested and now - job.phase_since_s > STUCK_S:
        return (
            f"no worker has reached its first epoch for {now - job.phase_since_s:.0f} s: "
            f"see `sunfleck logs {job.job}`; a script that never iterates run.epochs() never trains"
        )
    if job.phase is JobPhase.RUNNING and now - max(job.progress_s, job.phase_since_s) > STUCK_S:
        return (
            f"no progress for {now - max(job.progress_s, job.phase_since_s):.0f} s: a long step or evaluation, or "
            f"a worker that hangs (it is replaced after at most two minutes); see `sunfleck logs {job.job}`"
        )
    return ""


def _details(controller: Controller, job: JobState) -> list[str]:
    """What stands between planned, requested and observed, in words."""
    state = controller.state
    said: list[str] = []
    if job.phase.final:
        return said
    waiting = sorted(job.planned - (job.requested or frozenset()))
    held = [f"{n} (held by {state.nodes[n].job})" for n in waiting if n in state.nodes and state.nodes[n].job]
    if held:
        said.append("waits for nodes that others are leaving: " + ", ".join(held))
    starting = sorted((job.requested or frozenset()) - job.observed)
    if starting:
        said.append("workers are starting on " + ", ".join(starting))
    leaving = sorted(job.observed - (job.requested or frozenset()))
    if leaving:
        said.append("workers are leaving " + ", ".join(leaving))
    if job.requested is None:
        said.append("the controller was restarted and waits for its nodes to call in")
    if not state.nodes:
        said.append("the pool has no nodes now")
    if job.n_losses:
        said.append(f"workers or nodes were lost {job.n_losses} times; it went on each time")
    if job.checkpoint_step is not None:
        said.append(f"everything up to step {job.checkpoint_step} is on disk")
    return said
