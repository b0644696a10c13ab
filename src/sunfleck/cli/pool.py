"""up, down, status, nodes."""

from __future__ import annotations

from typing import Any

import click
import msgspec
from rich.console import Console

from sunfleck import api
from sunfleck.cli.options import json_option, pool_options
from sunfleck.observers import render


@click.command()
@pool_options
@click.option("--nodes", type=click.IntRange(min=1), help="Virtual nodes [default: one per usable CPU].")
@click.option("--node-cpus", type=click.FloatRange(min=0, min_open=True), help="CPUs of each, for example 0.25.")
@click.option("--port", type=click.IntRange(0, 65535), help="TCP port for agents [default: any free one].")
@click.option("--trace", metavar="FILE", help="Idle trace that decides when nodes join and leave ('demo': ours).")
@click.option("--trace-start-s", type=click.FloatRange(min=0), help="Where in the trace to begin.")
@click.option("--trace-length-s", type=click.FloatRange(min=0), help="How much of the trace to use.")
@click.option("--trace-s", type=click.FloatRange(min=0), help="Compress that to this many seconds.")
@click.option("--grace-s", type=click.FloatRange(min=0), help="Notice the trace gives before it takes a node.")
@click.option("--policy", help="Who gets which nodes [default: optimum].")
@click.option("--t-fwd-s", type=click.FloatRange(min=0, min_open=True), help="Horizon of a plan [default: forecast].")
@click.option("--objective", type=click.Choice(["normalised", "raw"]), help="What a plan maximises.")
@click.option("--warm", help="Modules that workers find imported, comma-separated [default: torch].")
@click.option("--patience-s", type=float, help="How long agents go on without a controller [default: 120].")
@click.option("--foreground", is_flag=True, help="Stay in the foreground, for supervisors such as systemd.")
@click.option("--fresh", is_flag=True, help="Begin anew; the old journal and jobs are moved aside.")
def up(foreground: bool, fresh: bool, warm: str | None, **flags: Any) -> None:
    """Start a pool on this machine, or go on with one that was up before."""
    if warm is not None:
        flags["warm"] = tuple(filter(None, warm.split(",")))
    if foreground:
        from sunfleck import app

        raise SystemExit(app.run(api.settings(flags, fresh=fresh), fresh=fresh))
    with api.up(flags, fresh=fresh) as pool:
        status = pool.status()
        click.echo(
            f"pool {pool.name} is up: {pool.config.n_nodes} nodes of {pool.config.cpus_per_node:.3g} CPUs; "
            f"{pool.directory}"
        )
        for warning in status.warnings:
            click.echo(f"note: {warning}")


@click.command()
@pool_options
def down(pool: str | None, home: str | None) -> None:
    """Save every job, hand back every node, end the pool. `sunfleck up` goes on from there."""
    with api.connect(pool, home=home) as found:
        unwritten = [warning for warning in found.status().warnings if warning.startswith("journal:")]
        found.down()
        for warning in unwritten:
            click.echo(f"note: what happened since is not on disk: {warning}", err=True)
        click.echo(f"pool {found.name} is down")


@click.command()
@pool_options
@json_option
def status(pool: str | None, home: str | None, as_json: bool) -> None:
    """Nodes and jobs at a glance."""
    with api.connect(pool, home=home) as found:
        view = found.status()
    if as_json:
        click.echo(msgspec.json.encode(view).decode())
    else:
        Console().print(render.status_page(view))


@click.command()
@pool_options
@json_option
def nodes(pool: str | None, home: str | None, as_json: bool) -> None:
    """The pool's nodes, what each does and why."""
    with api.connect(pool, home=home) as found:
        view = found.status()
    if as_json:
        click.echo(msgspec.json.encode(view.nodes).decode())
    else:
        Console().print(render.nodes_table(view.nodes, view.now_s))
