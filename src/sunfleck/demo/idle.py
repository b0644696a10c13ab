"""The idle nodes of the demo: a small generated trace that ships with the package, and how it was made.

`idle.csv` is a two-hour slice of a trace of 8 nodes from `sunfleck.sim.synthetic` with an idle share of about 0.7
and fragment lengths as published for Summit. The slice is the first one, going through seeds and start times in
order, in which everything happens that the demo is to show; `accept` says what. `python -m sunfleck.demo.idle`
makes the file anew, byte for byte. Run in two minutes, its median fragment lasts about eight seconds.
"""

from __future__ import annotations

import sys
from importlib.resources import files

import numpy as np

from sunfleck.sim.readers.intervals import format_intervals, parse_intervals
from sunfleck.sim.synthetic import generate, header
from sunfleck.sim.trace import IdleTrace

N_NODES = 8
SLICE_S = 7200.0
DEMO_S = 120.0
"""How long the demo takes to run through the slice once."""

FOUND = (34, 75900.0)
"""Seed and start of the shipped slice, as `find` gives them."""

_DAY_S = 86400.0


def demo_trace() -> IdleTrace:
    """The shipped trace, on its own two-hour axis."""
    text = files("sunfleck.demo").joinpath("idle.csv").read_text(encoding="utf-8")
    return parse_intervals(text, [f"n{i:04d}" for i in range(N_NODES)]).window(0.0, SLICE_S)


def demo_offers(duration_s: float = DEMO_S, n_loops: int = 5, n_nodes: int = N_NODES) -> list[tuple[float, float, int]]:
    """When which node is ours: (start_s, end_s, node index) by start time, compressed so that one pass through the
    trace takes `duration_s`, and repeated so that jobs which are not done by then go on."""
    if not 1 <= n_nodes <= N_NODES:
        raise ValueError(f"the demo's trace has 1 to {N_NODES} nodes, not {n_nodes}")
    trace = demo_trace().first_nodes(n_nodes)
    trace = trace.compress(trace.span_s / duration_s).loop(n_loops)
    return list(zip(trace.start.tolist(), trace.end.tolist(), trace.node.tolist(), strict=True))


def accept(trace: IdleTrace) -> bool:
    """Whether a slice shows what the demo is to show. Times in the comments are at the demo's pace (60 x)."""
    times, counts = trace.idle_counts()
    held = np.diff(np.append(times, trace.end_s))
    if not 32 <= len(trace) <= 50:  # dozens of joins and reclaims
        return False
    if not 5.3 <= trace.mean_idle_nodes <= 5.9:
        return False
    if not 3 <= counts[0] <= 6:  # something to begin with, room to grow
        return False
    if trace.window(0.0, 600.0).mean_idle_nodes < 3.5:  # a good start
        return False
    if held[counts == N_NODES].sum() < 0.12 * trace.span_s:  # all nodes at times
        return False
    if not 30.0 <= held[counts == 0].sum() <= 180.0:  # nothing at all for 0.5 to 3 s
        return False
    if times[counts == 0][0] < 0.2 * trace.span_s:  # not before the jobs are under way
        return False
    if np.sum(trace.end - trace.start < 90.0) > 4:  # few fragments below 1.5 s
        return False
    if times.size < 34 or held.max() > 900.0:  # never quiet for more than 15 s
        return False
    return _bursts(trace) >= 2


def _bursts(trace: IdleTrace) -> int:
    """How often five or more of the nodes leave at one instant."""
    _, n = np.unique(trace.end[trace.end < trace.end_s], return_counts=True)
    return int(np.sum(n >= 5))


def find() -> tuple[int, float]:
    """Seed and start of the first acceptable slice. Takes some seconds; raises RuntimeError when there is none."""
    for seed in range(2000):
        day = _day(seed)
        for start_s in np.arange(0.0, _DAY_S - SLICE_S, 300.0).tolist():
            if accept(day.window(start_s, SLICE_S)):
                return seed, start_s
    raise RuntimeError("no slice of any seed below 2000 shows all that the demo is to show")


def make(seed: int, start_s: float) -> IdleTrace:
    """The slice of that seed's day that begins at start_s."""
    return _day(seed).window(start_s, SLICE_S)


def _day(seed: int) -> IdleTrace:
    return generate(n_nodes=N_NODES, duration_s=_DAY_S, seed=seed, idle_share=0.7, nodes_per_join=3.0)


def text_of(trace: IdleTrace) -> str:
    """The file's content."""
    return format_intervals(trace, header(trace, "python -m sunfleck.demo.idle"))


if __name__ == "__main__":
    found = find()
    sys.stderr.write(f"seed {found[0]}, from {found[1]:g} s\n")
    sys.stdout.write(text_of(make(*found)))
