"""sim and estimate: what policies make of a trace, and what a site's own records say about its holes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from sunfleck.cli.options import json_option
from sunfleck.core.errors import InvalidRequest
from sunfleck.policy.base import Policy
from sunfleck.policy.curves import by_key
from sunfleck.policy.registry import make, names
from sunfleck.sim.page import page
from sunfleck.sim.readers import read_trace
from sunfleck.sim.report import Figures, figures, table
from sunfleck.sim.run import Outcome, World, run_elastic, run_published
from sunfleck.sim.trace import IdleTrace
from sunfleck.sim.trace_stats import TraceStats, describe
from sunfleck.sim.workload import SimJob, TrueCosts, hpo, true_curves, workload

PUBLISHED = TrueCosts(start_s=0.0, rescale_up_s=18.0, rescale_down_s=12.0, preempt_s=12.0)
ORACLE_WORLD = World(decision_s=0.0, handback_s=0.0)
TOLD = {"greedy", "oracle", "paper-milp", "freetrain-true", "freetrain-linear", "freetrain-noisy"}
"""Policies that are told scaling curves; the others measure, or need none."""
ADAPTIVE = {"optimum", "oracle", "paper-milp", "freetrain-true", "freetrain-linear", "freetrain-noisy", "malletrain"}
"""Policies that have a horizon."""


@click.command()
@click.option(
    "--trace", "trace_path", required=True, metavar="FILE", help="Idle intervals or events, SWF, sacct; a folder."
)
@click.option("--jobs", "jobs_wish", required=True, metavar="FILE|hpo:N|nas:N", help="The workload.")
@click.option("--policy", default="optimum", show_default=True, metavar="NAME[,NAME...]", help="Or `all`.")
@click.option("--semantics", type=click.Choice(["elastic", "published"]), default="elastic", show_default=True)
@click.option("--nodes", "n_nodes", type=click.IntRange(min=1), help="Only the first so many nodes of the trace.")
@click.option("--days", type=click.FloatRange(min=0, min_open=True), help="Only so many days of it.")
@click.option("--start", "start_s", type=float, help="Second of the trace to begin at [default: its first].")
@click.option("--max-running", type=click.IntRange(min=1), help="Most jobs at once [default: the policy's own].")
@click.option("--rescale-up", "up_s", type=click.FloatRange(min=0), help="Seconds that growing costs.")
@click.option("--rescale-down", "down_s", type=click.FloatRange(min=0), help="Seconds that shrinking costs.")
@click.option("--t-fwd", metavar="S|auto", help="Horizon of the optimiser [default: the policy's own].")
@click.option("--objective", type=click.Choice(["normalised", "raw"]), help="What is added up [default: normalised].")
@click.option("--curves", "curves_path", default="", metavar="FILE", help="CSV model,nodes,samples_per_s.")
@click.option("--noise", type=click.FloatRange(0, 1), default=0.0, show_default=True, help="Of reports, relative.")
@click.option("--measured", is_flag=True, help="With --semantics published: curves are measured, not told.")
@click.option("--rescheduled", is_flag=True, help="SWF: schedule its jobs anew by EASY backfill.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--report", "report_path", type=click.Path(dir_okay=False), metavar="FILE", help="Write an HTML report.")
@json_option
def sim(
    trace_path: str,
    jobs_wish: str,
    policy: str,
    semantics: str,
    n_nodes: int | None,
    days: float | None,
    start_s: float | None,
    max_running: int | None,
    up_s: float | None,
    down_s: float | None,
    t_fwd: str | None,
    objective: str | None,
    curves_path: str,
    noise: float,
    measured: bool,
    rescheduled: bool,
    seed: int,
    report_path: str | None,
    as_json: bool,
) -> None:
    """Simulate policies on a trace of idle nodes, with the controller that a real pool runs.

    U, H and E compare with a static pool, with an oracle, and with every idle second used at perfect scaling.
    """
    chosen = [name for name in names() if name != "oracle"] if policy == "all" else policy.split(",")
    unknown = [name for name in chosen if name not in names()]
    if unknown:
        raise InvalidRequest(f"unknown policy `{unknown[0]}`; the policies are: {', '.join(names())}")
    trace = cut(read_trace(trace_path, rescheduled=rescheduled), n_nodes, days, start_s)
    jobs = with_costs(workload(jobs_wish, curves_path=curves_path, noise=noise), semantics, up_s, down_s)
    say = Console(stderr=True)
    for note in trace.notes:
        say.print(f"trace: {note}", style="dim", highlight=False)
    told = semantics == "published" and not measured
    options: dict[str, Any] = {"max_running": max_running}
    horizon = {} if t_fwd is None else {"t_fwd_s": _horizon(t_fwd)}
    rows: list[Figures] = []
    outcomes: list[Outcome] = []
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn(),
        console=say, transient=True, disable=not say.is_terminal,
    ) as bar:  # fmt: skip
        best = _oracle(trace, jobs, semantics, options, bar)
        for name in chosen:
            made = policy_for(name, jobs, told, {**options, **horizon, "objective": objective}, semantics)
            task = bar.add_task(name, total=1.0)

            def tell(share: float, task: Any = task) -> None:
                bar.update(task, completed=share)

            if semantics == "published":
                outcome = run_published(trace, jobs, made, seed=seed, measured=not told, progress=tell)
            else:
                outcome = run_elastic(trace, jobs, made, World(seed=seed), progress=tell)
            bar.remove_task(task)
            _faults(outcome)
            outcomes.append(outcome)
            rows.append(figures(trace, jobs, outcome, max_running, best))
            if as_json:
                click.echo(json.dumps(rows[-1].as_dict()))
    if not as_json:
        click.echo(table(rows))
    if report_path:
        text = page(trace, rows, outcomes, f"{jobs_wish} on {Path(trace_path).name}")
        try:
            Path(report_path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise InvalidRequest(f"cannot write the report to {report_path}: {error.strerror}") from error
        say.print(f"report: {report_path}", highlight=False)


def cut(trace: IdleTrace, n_nodes: int | None, days: float | None, start_s: float | None) -> IdleTrace:
    """The wanted nodes and time of a trace, on an axis from 0."""
    if n_nodes is not None:
        if n_nodes > len(trace.names):
            raise InvalidRequest(f"the trace has {len(trace.names)} nodes, not {n_nodes}; lower --nodes")
        trace = trace.first_nodes(n_nodes)
    begin = trace.begin_s if start_s is None else start_s
    length = trace.end_s - begin if days is None else min(days * 86_400.0, trace.end_s - begin)
    if length <= 0:
        raise InvalidRequest(f"the trace ends at {trace.end_s:.0f} s; give an earlier --start")
    trace = trace.window(begin, length)
    if not len(trace):
        raise InvalidRequest("no node is idle in that part of the trace; choose other --nodes, --start or --days")
    return trace


def with_costs(jobs: Sequence[SimJob], semantics: str, up_s: float | None, down_s: float | None) -> list[SimJob]:
    """Jobs with the costs of the world they run in. Those of a job list stay unless an option says otherwise."""
    changed = []
    for job in jobs:
        costs = job.costs
        if semantics == "published":
            costs = replace(costs, start_s=0.0)
            if job.costs == TrueCosts():
                costs = PUBLISHED
        if up_s is not None:
            costs = replace(costs, rescale_up_s=up_s)
        if down_s is not None:
            costs = replace(costs, rescale_down_s=down_s, preempt_s=down_s)
        changed.append(job.with_costs(costs))
    return changed


def policy_for(name: str, jobs: Sequence[SimJob], told: bool, given: dict[str, Any], semantics: str) -> Policy:
    """The policy of that name, told what it is entitled to know."""
    options = {key: value for key, value in given.items() if value is not None}
    if name not in ADAPTIVE:
        options.pop("t_fwd_s", None)
        if name != "greedy":
            options.pop("objective", None)
    elif "t_fwd_s" in given and given["t_fwd_s"] is None:
        options["t_fwd_s"] = None
    if name == "paper-milp":
        options.pop("max_running", None) if given.get("max_running") is None else None
    if name in TOLD or (told and name == "optimum"):
        options["curves"] = by_key(true_curves(jobs))
    if name == "optimum" and told:
        options.update(n_scales=0, free_start=True, forecast=False)
    return make(name, **options)


def _oracle(
    trace: IdleTrace, jobs: Sequence[SimJob], semantics: str, options: dict[str, Any], bar: Progress
) -> Outcome:
    """What the oracle makes of this trace: the denominator of H."""
    free = [job.with_costs(TrueCosts(0.0, 0.0, 0.0, 0.0)) for job in jobs]
    made = make("oracle", curves=by_key(true_curves(jobs)), **options)
    task = bar.add_task("oracle", total=1.0)

    def tell(share: float) -> None:
        bar.update(task, completed=share)

    if semantics == "published":
        outcome = run_published(trace, free, made, progress=tell)
    else:
        outcome = run_elastic(trace, free, made, ORACLE_WORLD, progress=tell)
    bar.remove_task(task)
    _faults(outcome)
    return outcome


def _faults(outcome: Outcome) -> None:
    if outcome.faults:
        raise RuntimeError(f"the simulation of {outcome.policy} failed: {outcome.faults[0]}")


def _horizon(text: str) -> float | None:
    if text == "auto":
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0.0:
        raise InvalidRequest(f"--t-fwd is a number of seconds above 0, or auto; not {text!r}")
    return value


@click.command()
@click.option("--sacct", "sacct_path", metavar="FILE", help="Output of sacct -P with NodeList, or of sacct --json.")
@click.option("--swf", "swf_path", metavar="FILE", help="A log in the Standard Workload Format.")
@click.option("--trace", "trace_path", metavar="FILE", help="Idle intervals or events.")
@click.option(
    "--nodes", "n_nodes", type=click.IntRange(min=1), help="Size of the machine, where the file does not say it."
)
@click.option("--days", type=click.FloatRange(min=0, min_open=True), help="Only so many days.")
@click.option("--start", "start_s", type=float, help="Second to begin at.")
@json_option
def estimate(
    sacct_path: str | None,
    swf_path: str | None,
    trace_path: str | None,
    n_nodes: int | None,
    days: float | None,
    start_s: float | None,
    as_json: bool,
) -> None:
    """How many node-hours of holes a machine has, how long they are, and what training they would have done."""
    given = [path for path in (sacct_path, swf_path, trace_path) if path]
    if len(given) != 1:
        raise InvalidRequest("give exactly one of --sacct FILE, --swf FILE and --trace FILE")
    trace = cut(read_trace(given[0], n_nodes=n_nodes), None, days, start_s)
    stats = describe(trace)
    jobs = hpo(max(200, round(2 * stats.idle_node_h)), samples=3.6e3 * 2831 * 8)
    jobs = [replace(job, submit_s=0.0) for job in jobs[:2000]]
    outcome = run_elastic(trace, jobs, make("optimum"), World())
    _faults(outcome)
    row = figures(trace, jobs, outcome, None)
    if as_json:
        click.echo(json.dumps({**stats.as_dict(), "trained": row.as_dict(), "notes": list(trace.notes)}))
        return
    click.echo("\n".join(_page(stats, row, trace.notes)))


def _page(stats: TraceStats, row: Figures, notes: Sequence[str]) -> list[str]:
    days = stats.span_s / 86_400.0
    length = stats.length_s
    return [
        f"{stats.n_nodes} nodes over {days:.1f} days",
        f"  idle              {stats.idle_node_h:,.0f} node-hours, {stats.idle_share:.1%} of the machine",
        f"  idle at once      {stats.idle_nodes_mean:.1f} nodes on average; half of the time up to"
        f" {stats.idle_nodes[50]:g}, a twentieth of it more than {stats.idle_nodes[95]:g}",
        f"  holes             {stats.n_fragments:,} of a node each; half of them shorter than {length[50]:.0f} s,"
        f" a tenth longer than {length[90]:.0f} s",
        f"  short holes       {stats.short_share:.0%} are shorter than 10 minutes and hold"
        f" {stats.short_time_share:.0%} of the idle time",
        "",
        "Malleable training in these holes, simulated with the default policy (ShuffleNet, curves measured):",
        f"  used              {row.node_use:.1%} of the idle node-hours",
        f"  trained           {row.E * stats.idle_node_h:,.0f} node-hours' worth at perfect scaling (E = {row.E:.3f})",
        f"  lost              {row.lost_rescale:.2%} to changes of size, {row.lost_reclaim:.2%} to nodes taken back",
        *(["", *(f"note: {note}" for note in notes)] if notes else []),
    ]
