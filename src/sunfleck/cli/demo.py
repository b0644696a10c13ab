"""demo: four real networks on nodes that come and go. report: the HTML page of any pool's journal."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.live import Live

from sunfleck import api
from sunfleck.cli.options import pool_options
from sunfleck.config import usable_cpus
from sunfleck.core.errors import InvalidRequest, PoolUnavailable, SunfleckError
from sunfleck.core.events import DatasetDescribed, SamplesCommitted
from sunfleck.demo.jobs import WARM, demo_jobs
from sunfleck.executor.elastic.ledger import verify
from sunfleck.observers import render
from sunfleck.observers.journal import JournalReader
from sunfleck.observers.live import StatusView
from sunfleck.observers.summary import Summary, summary
from sunfleck.observers.views import PoolView

HEADROOM = 0.9
"""Share of the machine's CPUs that the virtual nodes get; the rest is for controller, agents and this command."""
RESTART_AFTER_S = 5.0
"""A controller that died is started again by the demo after this long, unless somebody was quicker."""


@click.command()
@click.option("--pool", metavar="NAME", help="Name of the pool [default: demo].")
@click.option("--home", metavar="DIR", help="Folder for pools [default: your state folder].")
@click.option("--nodes", type=click.IntRange(1, 8), default=8, show_default=True, help="Virtual nodes.")
@click.option("--node-cpus", type=click.FloatRange(min=0, min_open=True), help="CPUs of each [default: a fair share].")
@click.option("--seconds", type=click.FloatRange(min=20), default=120.0, show_default=True, help="Length of the trace.")
@click.option("--limit-s", type=click.FloatRange(min=1), default=300.0, show_default=True, help="Give up after this.")
@click.option("--policy", help="Who gets which nodes [default: optimum]; for comparisons.")
@click.option("--report", "report_path", type=click.Path(dir_okay=False), default="sunfleck-report.html",
              show_default=True, help="Where the HTML report goes.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One line of JSON on stdout; everything else on stderr.")
def demo(
    pool: str | None,
    home: str | None,
    nodes: int,
    node_cpus: float | None,
    seconds: float,
    limit_s: float,
    policy: str | None,
    report_path: str,
    as_json: bool,
) -> None:
    """Train four networks on 8 virtual nodes that come and go, in about two minutes."""
    for module, package in (("torch", "torch"), ("sklearn", "scikit-learn"), ("matplotlib", "matplotlib")):
        if importlib.util.find_spec(module) is None:
            raise InvalidRequest(f"the demo needs {package}: pip install 'sunfleck[demo]'")
    console = Console(stderr=as_json)
    flags = {
        "pool": pool or "demo",
        "home": home,
        "nodes": nodes,
        "node_cpus": node_cpus or round(min(1.0, HEADROOM * usable_cpus() / nodes), 4),
        "trace": "demo",
        "trace_s": seconds,
        "warm": WARM,
        "policy": policy,
    }
    with api.up(flags, fresh=True) as running:
        try:
            finished = _watch(running, flags, console, limit_s)
        finally:
            _end(running, console)
        result, view = read(running.journal)
        path = write_report(view, result, Path(report_path), running.name)
    if as_json:
        click.echo(msgspec.json.encode(result).decode())
    else:
        console.print(render.summary_page(result))
    console.print(f"report: {path}", soft_wrap=True)
    if not finished:
        raise SunfleckError(f"not every job reached its end within {limit_s:g} s; see {running.directory / 'jobs'}")
    missed = [job.name for job in result.jobs if job.reached is False or job.samples_lost or job.samples_repeated]
    if missed:
        raise SunfleckError(f"these jobs missed their target, or lost or repeated samples: {', '.join(missed)}")


def _watch(running: api.Pool, flags: dict[str, Any], console: Console, limit_s: float) -> bool:
    """Submit the jobs as they arrive and show the pool until all have ended. Returns whether they did in time."""
    waiting = demo_jobs()
    began = time.monotonic()
    last: StatusView | None = None
    gone_since: float | None = None
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        while time.monotonic() - began < limit_s:
            try:
                while waiting and waiting[0].arrives_s <= time.monotonic() - began:
                    running.submit_spec(waiting[0].spec)
                    waiting = waiting[1:]
                last = running.status(timeout_s=2.0)
                gone_since = None
                live.update(render.live_page(last))
                if not waiting and all(job.phase.final for job in last.jobs):
                    return True
            except PoolUnavailable:
                gone_since = gone_since or time.monotonic()
                live.console.print("the controller does not answer; workers go on training without it")
                if time.monotonic() - gone_since > RESTART_AFTER_S:
                    _restart(flags, live.console)
            time.sleep(0.25)
    return False


def _restart(flags: dict[str, Any], console: Console) -> None:
    try:
        api.up(flags).close()
        console.print("started a new controller; it goes on from the journal")
    except SunfleckError as error:  # somebody else was quicker, or it is still dying
        console.print(f"no new controller: {error}")


def _end(running: api.Pool, console: Console) -> None:
    try:
        running.down()
    except PoolUnavailable:
        console.print("the controller is gone already")


def read(journal: Path) -> tuple[Summary, PoolView]:
    """Fold a journal, and check its ledger of samples."""
    view = PoolView()
    time_s = 0.0
    with JournalReader.open(journal) as reader:
        for entry in reader.iterate():
            view.add(entry.time_s, entry.event)
            time_s = entry.time_s
    return summary(view, {}, time_s, checked), view


def checked(spans: list[SamplesCommitted], dataset: DatasetDescribed) -> tuple[int, int]:
    """(samples lost, samples repeated) of one job's ledger."""
    found = verify(spans, dataset)
    return found.lost, found.repeated


def write_report(view: PoolView, result: Summary, path: Path, pool: str) -> Path:
    from sunfleck.observers.report import write

    return write(path, view, result, title=f"Pool {pool}")


@click.command()
@pool_options
@click.option("--output", type=click.Path(dir_okay=False), default="sunfleck-report.html", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="The numbers as one line of JSON instead of a page.")
def report(pool: str | None, home: str | None, output: str, as_json: bool) -> None:
    """Make the HTML report of a pool, running or not, from its journal."""
    from sunfleck.config import load

    config = load({"pool": pool, "home": home})
    result, view = read(config.pool_dir / "journal.db")
    if as_json:
        click.echo(msgspec.json.encode(result).decode())
    else:
        path = write_report(view, result, Path(output), config.pool)
        click.echo(f"report: {path}")
