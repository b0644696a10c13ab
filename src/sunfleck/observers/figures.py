"""The report's figures, drawn by matplotlib as SVG text (or PNG) without touching any global state of it.

Inside a page, ink is `currentColor` and the background is transparent, so one picture serves light and dark; a
picture that stands alone is black on white.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sunfleck.core.errors import SunfleckError
from sunfleck.core.model import JobId, Target

from .live import CurvePoint
from .palette import IDLE_COLOUR, ink_on, job_colours
from .timelines import JobTimeline
from .views import PoolView
from .words import duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK = "#010203"
"""Stands for currentColor until the SVG is text."""
_LABELLED_NODES = 40
_IDLE_FILL = (*(int(IDLE_COLOUR[i : i + 2], 16) / 255 for i in (1, 3, 5)), 0.16)
_IDLE_HATCH = "////"
_Rectangle = tuple[float, float, float]
"""(start_s, end_s, row)."""

Curves = Mapping[JobId, Sequence[CurvePoint]]


class PlotsMissing(SunfleckError):
    """The plotting libraries are not installed."""

    def __init__(self, missing: ImportError) -> None:
        super().__init__(f"a report needs {missing.name or 'matplotlib'}: pip install 'sunfleck[plot]'")


def nodes_figure(view: PoolView, now_s: float, *, alone: bool = False, form: str = "svg") -> bytes:
    """One row per node: coloured while a job's round held it, grey while it was ours and idle, blank while not ours."""
    names = sorted(view.nodes, key=lambda name: (len(name), name))
    colours = job_colours(view.jobs)
    origin_s = view.first_s or 0.0
    held: dict[JobId, list[_Rectangle]] = {job: [] for job in view.jobs}
    ours: list[_Rectangle] = []
    reclaims: list[tuple[float, float]] = []
    losses: list[tuple[float, float]] = []
    for row, name in enumerate(names):
        node = view.nodes[name]
        for stay in node.presences:
            end_s = now_s if stay.end_s is None else stay.end_s
            ours.append((stay.start_s - origin_s, end_s - origin_s, row))
            if stay.reclaimed_s is not None:
                reclaims.append((stay.reclaimed_s - origin_s, row))
            if stay.lost:
                losses.append((end_s - origin_s, row))
        for hold in node.holds:
            end_s = now_s if hold.end_s is None else hold.end_s
            held[hold.job].append((hold.start_s - origin_s, end_s - origin_s, row))

    def draw(figure: Figure) -> None:
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        ink = _ink(alone)
        axes = figure.subplots()
        _rectangles(axes, ours, _IDLE_FILL)
        _rectangles(axes, ours, "none", IDLE_COLOUR, _IDLE_HATCH)  # apart: SVG gives both one opacity
        key: list[Any] = []
        for job, rectangles in held.items():
            if rectangles:
                _rectangles(axes, rectangles, colours[job])
                _name_inside(axes, view.jobs[job].spec.name, rectangles, colours[job], now_s - origin_s)
                key.append(Patch(facecolor=colours[job], label=view.jobs[job].spec.name))
        idle = Patch(facecolor="none", edgecolor=IDLE_COLOUR, linewidth=0, hatch=_IDLE_HATCH, label="in the pool, idle")
        key.append(idle)
        if reclaims:
            axes.plot(*zip(*reclaims, strict=True), "|", color=ink, markersize=_mark_size(names), markeredgewidth=1.6)
            key.append(Line2D([], [], color=ink, marker="|", linestyle="", markeredgewidth=1.6, label="reclaimed"))
        if losses:
            axes.plot(*zip(*losses, strict=True), "x", color=ink, markersize=5, markeredgewidth=1.6)
            key.append(Line2D([], [], color=ink, marker="x", linestyle="", markeredgewidth=1.6, label="lost"))
        for restart_s in view.restarts_s:
            axes.axvline(restart_s - origin_s, color=ink, linestyle=":", linewidth=1.2)
        if view.restarts_s:
            key.append(Line2D([], [], color=ink, linestyle=":", linewidth=1.2, label="new controller"))
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_xlim(0.0, max(now_s - origin_s, 1e-9))
        if len(names) <= _LABELLED_NODES:
            axes.set_yticks(range(len(names)), names)
        else:
            axes.set_ylabel(f"{len(names)} nodes")
            axes.set_yticks([])
        axes.tick_params(axis="y", length=0)
        _time_axis(axes)
        figure.legend(handles=key, loc="outside upper left", ncols=min(len(key), 6), frameon=False, fontsize=9)

    height = 1.1 + 0.27 * min(len(names), _LABELLED_NODES)
    return _save(draw, (9.6, height), "nodes", alone=alone, form=form)


def jobs_figure(view: PoolView, targets: Mapping[JobId, Target], now_s: float, jobs: Sequence[JobId]) -> bytes:
    """One row per job: its size, its metric with the target, its settled throughput, over one time axis."""
    colours = job_colours(view.jobs)
    origin_s = view.first_s or 0.0

    def draw(figure: Figure) -> None:
        grid = figure.subplots(len(jobs), 3, sharex=True, squeeze=False)
        for row, name in enumerate(jobs):
            job, colour = view.jobs[name], colours[name]
            size_axes, metric_axes, rate_axes = grid[row]
            _size(size_axes, job, colour, origin_s, now_s)
            for profile in view.profiles:
                if profile.job == name:
                    end_s = now_s if profile.end_s is None else profile.end_s
                    span = (profile.start_s - origin_s, end_s - origin_s)
                    size_axes.axvspan(*span, 0.95, 1.0, color=_INK, alpha=0.6, linewidth=0)
            _metric(metric_axes, job, targets.get(name), colour, origin_s)
            times = [t - origin_s for t, _ in job.samples_per_s]
            rate_axes.plot(times, [rate for _, rate in job.samples_per_s], ".", color=colour, markersize=4)
            rate_axes.set_ylim(bottom=0)
            size_axes.set_ylabel(job.spec.name, fontweight="bold")
        grid[0][0].set_title("nodes", fontsize=9, loc="left")
        grid[0][2].set_title("samples/s, settled", fontsize=9, loc="left")
        for axes in grid[-1]:
            _time_axis(axes)
        grid[0][0].set_xlim(0.0, max(now_s - origin_s, 1e-9))

    return _save(draw, (9.6, 0.5 + 1.55 * len(jobs)), "jobs", grid=(len(jobs), 3))


def curves_figure(view: PoolView, curves: Curves, jobs: Sequence[JobId]) -> bytes:
    """Throughput by size: measured points with their standard error, assumed ones hollow, and perfect scaling from
    the smallest measured size."""
    colours = job_colours(view.jobs)
    n_columns = 4
    n_rows = -(-len(jobs) // n_columns)

    def draw(figure: Figure) -> None:
        from matplotlib.ticker import MaxNLocator

        grid = figure.subplots(n_rows, n_columns, squeeze=False)
        for axes in grid.flat[len(jobs) :]:
            axes.set_axis_off()
        for axes, name in zip(grid.flat, jobs, strict=False):
            points = curves[name]
            measured = [point for point in points if point.measured]
            assumed = [point for point in points if not point.measured]
            n_most = max(point.n_nodes for point in points)
            if measured:
                first = measured[0]
                slope = first.samples_per_s / first.n_nodes
                axes.plot([0, n_most], [0, slope * n_most], ":", color=_INK, alpha=0.6, linewidth=1)
            axes.plot([p.n_nodes for p in points], [p.samples_per_s for p in points], color=colours[name], linewidth=1)
            axes.errorbar(
                [p.n_nodes for p in measured],
                [p.samples_per_s for p in measured],
                yerr=[p.stderr_per_s or 0.0 for p in measured],
                fmt="o", color=colours[name], markersize=5, capsize=2,
            )  # fmt: skip
            axes.plot(
                [p.n_nodes for p in assumed], [p.samples_per_s for p in assumed], "o", color=colours[name],
                markerfacecolor="none", markersize=5,
            )  # fmt: skip
            axes.set_title(view.jobs[name].spec.name, fontsize=10, loc="left", fontweight="bold")
            axes.set_xlim(0, n_most + 0.5)
            axes.set_ylim(bottom=0)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        for axes in grid[-1]:
            axes.set_xlabel("nodes")
        for row in grid:
            row[0].set_ylabel("samples/s")

    return _save(draw, (9.6, 2.3 * n_rows), "curves", grid=(n_rows, n_columns))


# -- parts -------------------------------------------------------------------------------------------------------


def _size(axes: Axes, job: JobTimeline, colour: str, origin_s: float, now_s: float) -> None:
    from matplotlib.ticker import MaxNLocator

    end_s = now_s if job.ended_s is None else job.ended_s
    times = [t - origin_s for t, _ in job.sizes]
    sizes = [n for _, n in job.sizes]
    if times and end_s - origin_s > times[-1]:
        times.append(end_s - origin_s)
        sizes.append(sizes[-1])
    axes.fill_between(times, sizes, step="post", color=colour, alpha=0.35, linewidth=0)
    axes.step(times, sizes, where="post", color=colour, linewidth=1.4)
    axes.set_ylim(0, max(job.spec.max_nodes, max(sizes, default=1)) * 1.08)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))


def _metric(axes: Axes, job: JobTimeline, target: Target | None, colour: str, origin_s: float) -> None:
    name = target.metric if target is not None else "loss" if "loss" in job.metrics else next(iter(job.metrics), "")
    series = job.metrics.get(name, [])
    axes.plot([t - origin_s for t, _ in series], [value for _, value in series], color=colour, linewidth=1.4)
    text = name
    if target is not None:
        axes.axhline(target.value, color=_INK, linestyle="--", linewidth=1, alpha=0.8)
        text = f"{name}, target {target.value:g}"
    axes.set_title(text, fontsize=9, loc="left")


def _rectangles(
    axes: Axes, rectangles: Sequence[_Rectangle], fill: Any, edge: str = "none", hatch: str | None = None
) -> None:
    """One collection for all: a pool of many nodes has thousands of bars. A hatch takes its colour from `edge`."""
    from matplotlib.collections import PolyCollection

    corners = [
        [(start, row - 0.4), (end, row - 0.4), (end, row + 0.4), (start, row + 0.4)] for start, end, row in rectangles
    ]
    axes.add_collection(PolyCollection(corners, facecolors=[fill], edgecolors=edge, linewidths=0, hatch=hatch))


def _name_inside(axes: Axes, name: str, rectangles: Sequence[_Rectangle], colour: str, whole_s: float) -> None:
    """The job's name in its longest bar, where it fits: nobody should need the colours. A letter of this size is
    about 1/110 of the picture's width."""
    start, end, row = max(rectangles, key=lambda rectangle: rectangle[1] - rectangle[0])
    if whole_s > 0 and (end - start) / whole_s > (len(name) + 1) / 110:
        axes.text(
            (start + end) / 2, row, name, ha="center", va="center", fontsize=8, color=ink_on(colour), clip_on=True
        )


def _mark_size(names: Sequence[str]) -> float:
    return 13.0 if len(names) <= _LABELLED_NODES else 4.0


def _time_axis(axes: Axes) -> None:
    axes.xaxis.set_major_formatter(lambda value, _: duration(value))
    axes.set_xlabel("time since the pool started")


def _ink(alone: bool) -> str:
    return "#1b1b1b" if alone else _INK


def _save(
    draw: Callable[[Figure], None],
    size: tuple[float, float],
    salt: str,
    *,
    grid: tuple[int, int] | None = None,
    alone: bool = False,
    form: str = "svg",
) -> bytes:
    """Draw on a figure of `size` inches. `salt` keeps the ids of several SVGs in one page apart, and equal from run
    to run. `grid` (rows, columns): so many panels with fixed margins, in inches; to let matplotlib find margins for
    many panels takes it several seconds."""
    try:
        import matplotlib
        from matplotlib.figure import Figure as NewFigure
    except ImportError as error:
        raise PlotsMissing(error) from error
    ink = _ink(alone)
    look = {
        "svg.fonttype": "none",
        "svg.hashsalt": f"sunfleck-{salt}",
        "text.parse_math": False,  # a $ in a name is no formula
        "font.size": 9,
        "text.color": ink,
        "axes.labelcolor": ink,
        "axes.edgecolor": ink,
        "axes.titlecolor": ink,
        "xtick.color": ink,
        "ytick.color": ink,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.linewidth": 0.6,
        "hatch.linewidth": 0.6,
    }
    out = io.BytesIO()
    with matplotlib.rc_context(look):
        figure = NewFigure(figsize=size, layout=None if grid else "constrained", facecolor="white" if alone else "none")
        draw(figure)
        if grid:
            n_rows, n_columns = grid
            width, height = (size[0] - 0.95) / n_columns, (size[1] - 0.85) / n_rows
            figure.subplots_adjust(
                left=0.7 / size[0],
                right=1 - 0.25 / size[0],
                bottom=0.55 / size[1],
                top=1 - 0.3 / size[1],
                wspace=0.55 / (width - 0.55 * (n_columns - 1) / n_columns),
                hspace=0.45 / (height - 0.45 * (n_rows - 1) / n_rows),
            )
        for axes in figure.axes:
            axes.set_facecolor("none")
        metadata = {"Date": None, "Creator": None} if form == "svg" else {}
        figure.savefig(out, format=form, dpi=150, metadata=metadata)
    return _for_a_page(out.getvalue().decode()).encode() if form == "svg" and not alone else out.getvalue()


def _for_a_page(svg: str) -> str:
    """Only the <svg> element, ink from the page, the page's font, and no ids but those that are referred to."""
    svg = svg[svg.index("<svg") :]
    svg = svg.replace(_INK, "currentColor")
    svg = re.sub(r'font-family: [^;"]*', "font-family: system-ui, sans-serif", svg)
    svg = re.sub(r'font: ([^;"]*?px) [^;"]*', r"font: \1 system-ui, sans-serif", svg)
    referred = set(re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", svg))
    svg = re.sub(r' id="([^"]+)"', lambda found: found[0] if found[1] in referred else "", svg)
    return re.sub(r'<svg ([^>]*?)width="[^"]*"', r"<svg \1", svg, count=1).replace(' height="', ' data-height="', 1)
