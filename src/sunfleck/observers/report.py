"""The report of a run: one HTML file that needs nothing else, drawn from a view and its numbers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from sunfleck.core.errors import SunfleckError
from sunfleck.core.model import JobId, Target

from . import figures
from .figures import Curves, PlotsMissing
from .live import CurvePoint
from .palette import job_colours
from .summary import JobSummary, Summary, percentile
from .views import PoolView
from .words import duration, quantity, short_time

MOST_JOBS_DRAWN = 16
"""More panels than this nobody looks at; the table has every job."""

_CLOCK_BEGINS_S = 1e9
"""Times beyond this are seconds since the Unix epoch; smaller ones come from a simulation's clock."""


class Tile(NamedTuple):
    label: str
    value: str
    detail: str


def write(
    path: str | os.PathLike[str],
    view: PoolView,
    result: Summary,
    *,
    title: str = "",
    targets: Mapping[str, Target] | None = None,
    curves: Curves | None = None,
    notes: Sequence[str] = (),
    now_s: float | None = None,
) -> Path:
    """Write the report and return its absolute path. Arguments as of `page`.

    Raises SunfleckError when the plotting libraries are missing or the file cannot be written.
    """
    text = page(view, result, title=title, targets=targets, curves=curves, notes=notes, now_s=now_s)
    file = Path(path).absolute()
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text, encoding="utf-8")
        draft.replace(file)
    except OSError as error:
        draft.unlink(missing_ok=True) if draft.parent.is_dir() else None
        raise SunfleckError(
            f"cannot write the report to {file}: {error.strerror}; free space there or choose another path"
        ) from error
    return file


def page(
    view: PoolView,
    result: Summary,
    *,
    title: str = "",
    targets: Mapping[str, Target] | None = None,
    curves: Curves | None = None,
    notes: Sequence[str] = (),
    now_s: float | None = None,
) -> str:
    """HTML text.

    `targets`: as given to `summary`; `curves`: points by job id as a running pool's `explain` gives them, else the
    measured points of the view; `notes`: what limits these numbers, such as oversubscribed nodes; `now_s`: when the
    run ended or was looked at (default: its last event).
    """
    try:
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup
    except ImportError as error:
        raise PlotsMissing(error) from error
    end_s = view.last_s if now_s is None else now_s
    wanted = {
        job.job: target
        for job in view.jobs.values()
        if (target := (targets or {}).get(job.job) or (targets or {}).get(job.spec.name) or job.spec.target)
    }
    known = {job: points for job, points in (curves or measured_curves(view)).items() if points and job in view.jobs}
    drawn = list(view.jobs)[:MOST_JOBS_DRAWN]
    drawn_curves = [job for job in view.jobs if job in known][:MOST_JOBS_DRAWN]

    def picture(when: object, draw: Callable[[], bytes]) -> Markup:
        return Markup(draw().decode()) if when else Markup("")

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(resources.files(__package__).joinpath("report.html.j2").read_text("utf-8"))
    return template.render(
        title=title or f"Pool {view.pool}",
        version=view.version,
        began=_moment(view.first_s),
        lasted=duration(end_s - (view.first_s if view.first_s is not None else end_s)),
        tiles=_tiles(view, result),
        nodes_svg=picture(view.nodes, lambda: figures.nodes_figure(view, end_s)),
        jobs_svg=picture(drawn, lambda: figures.jobs_figure(view, wanted, end_s, drawn)),
        curves_svg=picture(drawn_curves, lambda: figures.curves_figure(view, known, drawn_curves)),
        profiled=bool(view.profiles),
        n_not_drawn=len(view.jobs) - len(drawn),
        jobs=_job_rows(view, result),
        points=[(view.jobs[job].spec.name, known[job]) for job in drawn_curves],
        happenings=_happenings(view),
        notes=tuple(notes),
        quantity=quantity,
        short_time=short_time,
    )


def node_picture(view: PoolView, now_s: float | None = None, form: str = "svg") -> bytes:
    """The node-by-time picture alone, black on white: form `svg` or `png`."""
    return figures.nodes_figure(view, view.last_s if now_s is None else now_s, alone=True, form=form)


def measured_curves(view: PoolView) -> dict[JobId, tuple[CurvePoint, ...]]:
    """The points that the jobs' own settled reports give; nothing is assumed here."""
    return {
        job.job: tuple(
            CurvePoint(
                n_nodes=n,
                samples_per_s=stats.mean_per_s,
                measured=True,
                stderr_per_s=stats.stderr_per_s if stats.n_reports > 1 else None,
                n_reports=stats.n_reports,
            )
            for n, stats in sorted(job.scales.items())
        )
        for job in view.jobs.values()
    }


def _tiles(view: PoolView, result: Summary) -> list[Tile]:
    aimed = [job for job in result.jobs if job.target is not None]
    checked = [job for job in result.jobs if job.samples_lost is not None]
    used = "-" if result.used_fraction is None else f"{result.used_fraction:.1%}"
    offered = f"{result.node_seconds_used:.0f} of {result.node_seconds_offered:.0f} node-seconds offered"
    tiles = [
        Tile("idle node time used", used, offered),
        Tile("samples trained", quantity(result.samples), f"by {_count(len(result.jobs), 'job')}"),
    ]
    if aimed:
        tiles.append(Tile("targets reached", f"{sum(bool(job.reached) for job in aimed)} of {len(aimed)}", "jobs"))
    if checked:
        lost = sum(job.samples_lost or 0 for job in checked)
        repeated = sum(job.samples_repeated or 0 for job in checked)
        ledgers = f"ledgers of {_count(len(checked), 'job')} checked"
        tiles.append(Tile("samples lost, repeated", f"{lost}, {repeated}", ledgers))
    if result.reclaims:
        detail = f"p50 {short_time(result.handback_s_p50)}, {_count(result.reclaims, 'node')} reclaimed"
        tiles.append(Tile("hand-back, p99", short_time(result.handback_s_p99), detail))
    stalls = [stall for job in view.jobs.values() for stall in job.stalls_s]
    for label, values, what in (
        ("stall of a rescale, p50", stalls, "stall"),
        ("plan found in, p50", [solve.solve_s for solve in view.solves], "plan"),
    ):
        if values:
            detail = f"p99 {short_time(percentile(values, 99))}, {_count(len(values), what)}"
            tiles.append(Tile(label, short_time(percentile(values, 50)), detail))
    return tiles


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _job_rows(view: PoolView, result: Summary) -> list[dict[str, Any]]:
    colours = job_colours(view.jobs)
    return [
        {
            "id": job.job,
            "colour": colours[job.job],
            "numbers": numbers,
            "target": _target_text(numbers),
            "sizes": f"{job.spec.min_nodes} to {job.spec.max_nodes}",
            "took": "-" if job.ended_s is None else duration(job.ended_s - job.submitted_s),
            "error": job.error,
        }
        for job, numbers in zip(view.jobs.values(), result.jobs, strict=True)
    ]


def _target_text(numbers: JobSummary) -> str:
    if numbers.target is None:
        return "-"
    return f"{numbers.target:g}, {'reached' if numbers.reached else 'not reached'}"


def _happenings(view: PoolView) -> list[tuple[str, str]]:
    """What went wrong or was out of the ordinary, in order of time."""
    origin_s = view.first_s or 0.0
    found = [(time_s, "a new controller took over and went on from the journal") for time_s in view.restarts_s]
    for job in view.jobs.values():
        found += [(time_s, f"{job.spec.name}: worker lost on {detail}") for time_s, detail in job.deaths]
        if job.error and job.ended_s is not None:
            found.append((job.ended_s, f"{job.spec.name}: {job.phase.value}: {job.error}"))
    for name, node in view.nodes.items():
        found += [(stay.end_s, f"{name} was lost") for stay in node.presences if stay.lost and stay.end_s is not None]
    found += [(time_s, f"no plan: {error}") for time_s, error in view.plan_failures]
    return [(duration(time_s - origin_s), text) for time_s, text in sorted(found)]


def _moment(time_s: float | None) -> str:
    if time_s is None or time_s < _CLOCK_BEGINS_S:
        return ""
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
