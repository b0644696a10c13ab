"""The report of a simulation as one self-contained HTML page: idle nodes over time, who had them, and the figures."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from sunfleck.core.errors import InvalidRequest

from .report import Figures
from .run import Outcome
from .trace import IdleTrace

N_SLICES = 600
"""Points of time in a picture: averages over equal parts of the trace."""
N_JOBS = 10
"""Jobs drawn one by one, those with most node-time; the others together."""

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 66rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; } th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; } svg { width: 100%; height: auto; } .note { color: #666; }
"""


def page(trace: IdleTrace, rows: Sequence[Figures], outcomes: Sequence[Outcome], title: str) -> str:
    """The page's HTML. Raises InvalidRequest when matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise InvalidRequest("the report needs matplotlib: pip install 'sunfleck[plot]'") from error
    matplotlib.use("Agg")
    keys = [key for key in rows[0].as_dict() if key != "policy"]
    head = "".join(f"<th>{html.escape(key)}</th>" for key in ("policy", *keys))
    body = "".join(
        "<tr>" + "".join(f"<td>{_cell(row.as_dict()[key])}</td>" for key in ("policy", *keys)) + "</tr>" for row in rows
    )
    pictures = [_svg(_draw_idle, trace), _svg(_draw_figures, rows)]
    pictures += [_svg(_draw_jobs, trace, outcome) for outcome in outcomes]
    notes = "".join(f'<p class="note">{html.escape(note)}</p>' for note in trace.notes)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style>"
        f"<h1>{html.escape(title)}</h1><table><tr>{head}</tr>{body}</table>{''.join(pictures)}{notes}</html>\n"
    )


def sliced(times: Sequence[float], values: Sequence[float], begin_s: float, end_s: float) -> np.ndarray[Any, Any]:
    """Averages over N_SLICES equal parts of a step function that is values[i] from times[i] on, and 0 before."""
    edges = np.linspace(begin_s, end_s, N_SLICES + 1)
    t = np.append(np.asarray(times, dtype=np.float64), end_s)
    v = np.asarray(values, dtype=np.float64)
    area = np.concatenate(([0.0], np.cumsum(v * np.maximum(np.diff(t), 0.0))))
    return np.asarray(np.diff(np.interp(edges, t, area)) / np.diff(edges))


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return html.escape(f"{value:.4g}" if isinstance(value, float) else str(value))


def _svg(draw: Any, *args: Any) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 3.2), layout="constrained")
    draw(figure.subplots(), *args)
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def _hours(trace: IdleTrace) -> np.ndarray[Any, Any]:
    return (np.arange(N_SLICES) + 0.5) * trace.span_s / N_SLICES / 3600.0


def _draw_idle(axes: Any, trace: IdleTrace) -> None:
    times, counts = trace.idle_counts()
    axes.fill_between(
        _hours(trace), sliced(times.tolist(), counts.tolist(), trace.begin_s, trace.end_s), color="#d9a520"
    )
    axes.set(title="Idle nodes", xlabel="hours", ylabel="nodes", xlim=(0, trace.span_s / 3600.0))


def _draw_figures(axes: Any, rows: Sequence[Figures]) -> None:
    at = np.arange(len(rows))
    shown = [("U", [r.U for r in rows]), ("H", [r.H or 0.0 for r in rows]), ("E", [r.E for r in rows])]
    for i, (name, values) in enumerate(shown):
        bars = axes.bar(at + 0.27 * (i - 1), values, 0.25, label=name)
        axes.bar_label(bars, fmt="%.3f", fontsize=7)
    axes.set_xticks(at, [r.policy for r in rows])
    axes.set(title="By policy", ylim=(0, 1.15))
    axes.legend(ncols=3, loc="upper right", frameon=False)


def _draw_jobs(axes: Any, trace: IdleTrace, outcome: Outcome) -> None:
    steps: dict[str, tuple[list[float], list[float]]] = {}
    for time_s, job, n in outcome.tally.history:
        times, sizes = steps.setdefault(job, ([], []))
        times.append(time_s)
        sizes.append(float(n))
    curves = {job: sliced(t, n, trace.begin_s, trace.end_s) for job, (t, n) in steps.items()}
    largest = sorted(curves, key=lambda job: (-curves[job].sum(), job))[:N_JOBS]
    layers = [curves[job] for job in sorted(largest)]
    others = [curve for job, curve in curves.items() if job not in largest]
    labels = sorted(largest)
    if others:
        layers.append(np.sum(others, axis=0))
        labels.append(f"{len(others)} others")
    if layers:
        colours = [f"C{i}" for i in range(len(largest))] + ["#bbbbbb"] * bool(others)
        axes.stackplot(_hours(trace), *layers, labels=labels, colors=colours)
        axes.legend(fontsize=6, ncols=7, loc="upper right", frameon=False)
    axes.set(title=f"Nodes of each job: {outcome.policy}", xlabel="hours", ylabel="nodes")
    axes.set_xlim(0, trace.span_s / 3600.0)
