"""submit, jobs, explain, logs, cancel."""

from __future__ import annotations

import time
from pathlib import Path

import click
import msgspec
from rich.console import Console

from sunfleck import api
from sunfleck.cli.options import KeyValue, NodesRange, TargetType, json_option, pool_options
from sunfleck.core.model import JobPhase, Target
from sunfleck.observers import render


@click.command()
@pool_options
@click.option("--nodes", type=NodesRange(), default="1:1", show_default=True, help="Sizes the job may have.")
@click.option("--name", help="Name of the job [default: the script's].")
@click.option("--cwd", metavar="DIR", help="Folder to run in [default: this one].")
@click.option("--env", type=KeyValue(), multiple=True, help="Set an environment variable; repeatable.")
@click.option("--weight", type=float, default=1.0, show_default=True, help="Importance relative to other jobs.")
@click.option("--priority", type=int, default=0, show_default=True, help="Jobs of a higher one are served first.")
@click.option("--total-samples", type=click.FloatRange(min=0), help="Samples it is going to train; for --deadline-s.")
@click.option("--deadline-s", type=click.FloatRange(min=0), help="Seconds from now by which they should be trained.")
@click.option("--target", type=TargetType(), help="What it is to reach, for example 'accuracy>=0.97'; shown only.")
@click.option("--architecture", default="", metavar="KEY", help="Jobs with the same key share their profile.")
@click.option("--max-restarts", type=click.IntRange(min=0), default=3, show_default=True, help="Worker deaths borne.")
@click.option("--wait", is_flag=True, help="Wait until it has ended; exit with 1 unless it finished.")
@click.argument("script", type=click.Path())
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def submit(
    pool: str | None,
    home: str | None,
    nodes: tuple[int, int, int],
    name: str | None,
    cwd: str | None,
    env: tuple[tuple[str, str], ...],
    weight: float,
    priority: int,
    total_samples: float | None,
    deadline_s: float | None,
    target: Target | None,
    architecture: str,
    max_restarts: int,
    wait: bool,
    script: str,
    args: tuple[str, ...],
) -> None:
    """Queue a training SCRIPT; ARGS after `--` are the script's own."""
    with api.connect(pool, home=home) as found:
        job = found.submit(
            script,
            nodes=nodes,
            args=args,
            name=name,
            cwd=cwd,
            env=dict(env),
            weight=weight,
            priority=priority,
            total_samples=total_samples,
            deadline_s=deadline_s,
            target=target,
            architecture=architecture,
            max_restarts=max_restarts,
        )
        click.echo(job.id)
        if wait:
            row = job.wait()
            if row.phase is not JobPhase.FINISHED:
                click.echo(f"sunfleck: job {job.id} ({row.name}) {row.phase}: {row.reason}", err=True)
                raise SystemExit(1)


@click.command()
@pool_options
@json_option
def jobs(pool: str | None, home: str | None, as_json: bool) -> None:
    """All jobs of the pool."""
    with api.connect(pool, home=home) as found:
        view = found.status()
    if as_json:
        click.echo(msgspec.json.encode(view.jobs).decode())
    else:
        Console().print(render.jobs_table(view.jobs, view.now_s))


@click.command()
@pool_options
@json_option
@click.argument("job")
def explain(pool: str | None, home: str | None, as_json: bool, job: str) -> None:
    """Why JOB has the nodes it has, or none."""
    with api.connect(pool, home=home) as found:
        view = found.explain(job)
    if as_json:
        click.echo(msgspec.json.encode(view).decode())
    else:
        Console().print(render.explain_page(view))


@click.command()
@pool_options
@click.argument("job")
def cancel(pool: str | None, home: str | None, job: str) -> None:
    """End JOB and keep its last checkpoint."""
    with api.connect(pool, home=home) as found:
        found.job(job).cancel()


@click.command()
@pool_options
@click.option("--follow", "-f", is_flag=True, help="Go on printing until the job has ended.")
@click.option("--node", help="Only the output from this node.")
@click.argument("job")
def logs(pool: str | None, home: str | None, follow: bool, node: str | None, job: str) -> None:
    """What the workers of JOB print, each line behind its node's name; the node that printed last comes last."""
    with api.connect(pool, home=home) as found:
        wanted = found.job(job)
        offsets: dict[Path, int] = {}
        while True:
            ended = not follow or wanted.status().phase.final
            # Whoever printed last comes last.
            for path in sorted(wanted.log_files(), key=lambda path: path.stat().st_mtime):
                if node is None or path.stem == node:
                    offsets[path] = _print_new_lines(path, offsets.get(path, 0), last=ended)
            if ended:
                break
            time.sleep(0.25)
        if not offsets:
            if node is None:
                click.echo(f"job {wanted.id} has printed nothing yet", err=True)
            else:
                click.echo(f"job {wanted.id} has printed nothing on node {node}", err=True)


def _print_new_lines(path: Path, offset: int, last: bool) -> int:
    """Print whole lines from `offset` on (the unfinished one too when `last`); return where they end."""
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n") and not last:
                break
            click.echo(f"{path.stem} | ".encode() + line.rstrip(b"\n"))
            offset += len(line)
    return offset
