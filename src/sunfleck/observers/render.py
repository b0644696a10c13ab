"""PURE. Terminal pictures of live answers and of a run's numbers: values in, rich renderables out.

Made to be read at 80 columns; the last column is the one that gives way. Rich drops colours by itself where there
is no terminal, so nothing here is told by colour alone, and all text is plain ASCII.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sunfleck.core.model import Cost, JobPhase, NodePhase, Target

from .fitted import Column, Fitted
from .live import ExplainView, JobRow, NodeRow, StatusView
from .palette import ink_on, job_colours
from .summary import JobSummary, Summary
from .words import duration, node_list, one_line, quantity, short_time

_PHASE_STYLES = {
    JobPhase.RUNNING: "green",
    JobPhase.FINISHED: "green",
    JobPhase.FAILED: "bold red",
    JobPhase.CANCELLED: "yellow",
}
_BRIEF = 150
_STRIP_NODES = 48
"""Beyond this many nodes the strip counts instead of naming them."""


# -- cells --------------------------------------------------------------------------------------------------------


def metric_text(metrics: dict[str, float], target: Target | None) -> str:
    """The metric that counts: the target's, else the loss, else the first one reported."""
    name = target.metric if target is not None else "loss" if "loss" in metrics else next(iter(metrics), "")
    return f"{name} {quantity(metrics.get(name))}" if name else "-"


def target_text(metrics: dict[str, float], target: Target | None) -> str:
    if target is None:
        return "-"
    text = f"{'>=' if target.at_least else '<='} {target.value:g}"
    return f"{text} reached" if target.reached(metrics.get(target.metric)) else text


def nodes_text(row: JobRow) -> str:
    """Observed nodes, and the planned number where it differs: `3`, or `3>4` on the way from 3 to 4."""
    if row.phase.final:
        return "-"
    n_observed, n_planned = len(row.observed), len(row.planned)
    return str(n_observed) if n_observed == n_planned else f"{n_observed}>{n_planned}"


# -- tables ------------------------------------------------------------------------------------------------------


def jobs_table(rows: Sequence[JobRow], now_s: float) -> RenderableType:
    """squeue-like: one row per job. NODES is observed, or observed>planned while it changes; SIZES is min:max."""
    if not rows:
        return Text("no jobs; submit one with `sunfleck submit train.py --nodes MIN:MAX`")
    colours = job_colours(row.job for row in rows)
    table = Fitted(
        [
            Column("JOB"),
            Column("NAME", most=16),
            Column("STATE"),
            Column("TIME", rank=2, right=True),
            Column("NODES", right=True),
            Column("SIZES", rank=3, right=True),
            Column("SAMPLES/S", rank=1, right=True),
            Column("METRIC"),
            Column("TARGET"),
        ],
        remark="REASON",
    )
    for row in rows:
        table.add(
            Text(row.job, style=colours[row.job]),
            row.name,
            _phase_text(row),
            duration((now_s if row.ended_s is None else row.ended_s) - row.submitted_s),
            nodes_text(row),
            f"{row.min_nodes}:{row.max_nodes}",
            "-" if row.phase.final else quantity(row.samples_per_s),
            metric_text(row.metrics, row.target),
            target_text(row.metrics, row.target),
            remark=_brief(row.reason) if row.phase.final else one_line(row.reason),
        )
    return table


def nodes_table(rows: Sequence[NodeRow], now_s: float) -> RenderableType:
    """sinfo-like: one row per node."""
    if not rows:
        return Text("no nodes in the pool now")
    leaving = any(row.leaves_s is not None for row in rows)
    table = Fitted(
        [
            Column("NODE"),
            Column("STATE"),
            Column("JOB"),
            Column("CPUS", rank=2, right=True),
            Column("GPUS", rank=3, right=True),
            Column("KIND", rank=4),
            Column("HOST", rank=5),
            Column("IN POOL", rank=1, right=True),
            *([Column("WANTED IN", right=True)] if leaving else []),
        ],
        remark="REASON",
    )
    for row in rows:
        wanted = "-" if row.leaves_s is None else duration(row.leaves_s - now_s)
        table.add(
            row.name,
            row.phase.value,
            row.job or "-",
            f"{row.cpus:g}",
            str(row.n_gpus),
            row.kind,
            row.host,
            duration(now_s - row.joined_s),
            *([wanted] if leaving else []),
            remark=one_line(row.reason),
        )
    return table


def status_page(view: StatusView) -> RenderableType:
    """Everything at a glance: pool, node strip, jobs, last plan, warnings."""
    parts: list[RenderableType] = [_headline(view), node_strip(view), jobs_table(view.jobs, view.now_s)]
    if view.plan is not None:
        plan = view.plan
        gap = f", gap {plan.gap:.2%}" if plan.gap else ""
        parts.append(
            Text(
                f"last plan: {plan.solver or 'policy'} in {short_time(plan.solve_s)}{gap},"
                f" {duration(view.now_s - plan.time_s)} ago",
                style="dim",
            )
        )
    parts += [Text(f"warning: {one_line(warning)}", style="bold yellow") for warning in view.warnings]
    return Group(*parts)


def live_page(view: StatusView) -> RenderableType:
    """The same, to be drawn again and again: no line that comes and goes, so that the table does not jump."""
    colours = job_colours(row.job for row in view.jobs)
    table = Fitted(
        [
            Column("JOB"),
            Column("NAME", most=16),
            Column("STATE"),
            Column("NODES", right=True),
            Column("SAMPLES/S", right=True),
            Column("SAMPLES", rank=2, right=True),
            Column("METRIC"),
            Column("TARGET"),
            Column("RESCALES", rank=1, right=True),
        ]
    )
    for row in view.jobs:
        table.add(
            Text(row.job, style=colours[row.job]),
            row.name,
            _phase_text(row),
            nodes_text(row),
            "-" if row.phase.final else quantity(row.samples_per_s),
            quantity(row.samples),
            metric_text(row.metrics, row.target),
            target_text(row.metrics, row.target),
            str(row.n_rescales),
        )
    failures = [f"{row.name} failed: {_brief(row.reason)}" for row in view.jobs if row.phase is JobPhase.FAILED]
    last = Text("; ".join([*map(one_line, view.warnings), *failures]) or " ", style="bold yellow")
    return Group(_headline(view), node_strip(view), table, last)


def node_strip(view: StatusView) -> Text:
    """Who holds which node: `n1:j2`, `n3:-` when idle, `n4:j1!` when it is leaving, `n5:?` when it is silent."""
    colours = job_colours(row.job for row in view.jobs)
    if len(view.nodes) > _STRIP_NODES:
        held = Counter(row.job or ("silent" if row.phase is NodePhase.SILENT else "idle") for row in view.nodes)
        return Text("  ".join(f"{who}:{n}" for who, n in sorted(held.items(), key=lambda item: (-item[1], item[0]))))
    strip = Text()
    for row in sorted(view.nodes, key=lambda row: (len(row.name), row.name)):
        mark = {NodePhase.LEAVING: "!", NodePhase.SILENT: "?"}.get(row.phase, "")
        colour = colours.get(row.job or "")
        style = f"{ink_on(colour)} on {colour}" if colour else "dim"
        strip.append(f" {row.name}:{row.job or ('' if mark else '-')}{mark} ", style=style)
        strip.append(" ")
    return strip


def explain_page(view: ExplainView) -> RenderableType:
    """Why a job has the nodes it has: the three node sets, the reason, curve and costs with their origin."""
    row = view.row
    size = f"{len(row.observed)} of {view.n_pool_nodes} nodes"
    parts: list[RenderableType] = [
        Text(f"job {row.job} ({row.name}) is {row.phase.value} on {size}; it takes {row.min_nodes} to {row.max_nodes}"),
    ]
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    facts.add_row("why", one_line(view.reason) or "-")
    for detail in view.details:
        facts.add_row("", one_line(detail))
    for name, nodes in (("planned", row.planned), ("requested", row.requested), ("observed", row.observed)):
        facts.add_row(name, node_list(nodes))
    costs = view.costs
    named_costs = (
        ("start", costs.start_s),
        ("grow", costs.rescale_up_s),
        ("shrink", costs.rescale_down_s),
        ("preempted", costs.preempt_s),
    )
    facts.add_row("costs", ", ".join(f"{name} {_cost_text(cost)}" for name, cost in named_costs))
    if view.t_fwd_s is not None:
        facts.add_row("horizon", f"a change must pay for itself within {view.t_fwd_s:g} s")
    if view.profiling is not None:
        rest = ", then " + ", ".join(map(str, view.profiling.remaining)) if view.profiling.remaining else ""
        facts.add_row("profiling", f"held at {view.profiling.n_nodes} nodes to be measured there{rest}")
    if view.plan is not None:
        ago = duration(view.now_s - view.plan.time_s)
        facts.add_row("plan", f"{view.plan.solver or 'policy'}, objective {view.plan.objective:.4g}, {ago} ago")
    if view.log_path:
        facts.add_row("log", view.log_path)
    parts.append(facts)
    parts.append(_curve_table(view) if view.curve else Text("scaling curve: nothing measured yet"))
    return Group(*parts)


def _curve_table(view: ExplainView) -> RenderableType:
    """Speedup and efficiency are relative to the smallest size: S = P(n) / P(m), E = S m / n."""
    titles = ("NODES", "SAMPLES/S", "SPEEDUP", "EFFICIENCY")
    table = Fitted([*(Column(title, right=True) for title in titles), Column("FROM")])
    first = view.curve[0]
    for point in view.curve:
        speedup = point.samples_per_s / first.samples_per_s if first.samples_per_s > 0 else math.nan
        origin = "assumed"
        if point.measured:
            spread = "" if point.stderr_per_s is None else f" +- {quantity(point.stderr_per_s, 2)}"
            origin = f"measured{spread}, {point.n_reports} reports"
        here = " <- now" if point.n_nodes == len(view.row.observed) else ""
        table.add(
            str(point.n_nodes),
            quantity(point.samples_per_s),
            f"{speedup:.2f}",
            f"{speedup * first.n_nodes / point.n_nodes:.0%}" if math.isfinite(speedup) else "-",
            origin + here,
        )
    return table


def summary_page(result: Summary) -> RenderableType:
    """The numbers at the end of a run."""
    used = f" ({result.used_fraction:.1%} used)" if result.used_fraction is not None else ""
    lines = [
        f"node-seconds offered {result.node_seconds_offered:.1f}, used {result.node_seconds_used:.1f}{used}",
        f"samples {quantity(result.samples)} in {duration(result.elapsed_s)}",
        f"reclaims {result.reclaims}, hand-back p50 {short_time(result.handback_s_p50)},"
        f" p99 {short_time(result.handback_s_p99)}; nodes lost {result.losses}",
    ]
    table = Fitted(
        [
            Column("JOB", most=16),
            Column("STATE"),
            Column("SAMPLES", rank=3, right=True),
            Column("METRIC"),
            Column("TARGET"),
            Column("RESCALES", rank=1, right=True),
            Column("STALL P50", rank=1, right=True),
            Column("LOST", right=True),
            Column("REPEATED", right=True),
            Column("RESTARTS", rank=2, right=True),
        ]
    )
    for job in result.jobs:
        table.add(
            job.name,
            job.phase,
            quantity(job.samples),
            f"{job.metric_name} {quantity(job.metric)}",
            _reached_text(job),
            str(job.rescales),
            short_time(job.stall_s_p50),
            "-" if job.samples_lost is None else str(job.samples_lost),
            "-" if job.samples_repeated is None else str(job.samples_repeated),
            str(job.restarts),
        )
    return Group(*map(Text, lines), table)


# -- parts -------------------------------------------------------------------------------------------------------


def _headline(view: StatusView) -> Text:
    phases = Counter(row.phase for row in view.nodes)
    nodes = ", ".join(f"{phases[phase]} {phase.value}" for phase in NodePhase if phases[phase])
    text = f"pool {view.pool}: {len(view.nodes)} nodes" + (f" ({nodes})" if nodes else "")
    text += f", up {duration(view.now_s - view.started_s)}, {view.n_reclaims} reclaims"
    if view.handback_s_p50 is not None:
        text += f" (hand-back p50 {short_time(view.handback_s_p50)}, p99 {short_time(view.handback_s_p99)})"
    if view.stopping:
        text += ", stopping"
    return Text(text, style="bold")


def _phase_text(row: JobRow) -> Text:
    return Text("profiling" if row.profiling else row.phase.value, style=_PHASE_STYLES.get(row.phase, ""))


def _reached_text(job: JobSummary) -> str:
    if job.target is None:
        return "-"
    return f"{job.target:g} {'reached' if job.reached else 'not reached'}"


def _cost_text(cost: Cost) -> str:
    origin = f"measured {cost.n_measured}x" if cost.measured else "assumed"
    return f"{short_time(cost.value_s)} ({origin})"


def _brief(text: str) -> str:
    """A job's error is the tail of its log; tables show its end, where the exception is. `explain` has it all."""
    line = one_line(text)
    return line if len(line) <= _BRIEF else "..." + line[-(_BRIEF - 3) :]
