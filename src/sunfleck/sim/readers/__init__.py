"""Readers of traces: a file or folder in, an IdleTrace out. `read_trace` finds out what it is given."""

from __future__ import annotations

from pathlib import Path

from sunfleck.core.errors import InvalidRequest

from ..trace import IdleTrace
from .intervals import parse_intervals
from .text import read_text

__all__ = ["read_trace"]


def read_trace(path: Path | str) -> IdleTrace:
    """The trace in a file, or in a folder that holds `*_idle_intervals.csv[.gz]` and, if it is there,
    `nodes_column_order.txt` with the names of all nodes in their order.

    Raises InvalidRequest when there is nothing of that kind or nothing usable in it."""
    path = Path(path)
    names: list[str] | None = None
    file = path
    if path.is_dir():
        found = sorted([*path.glob("*intervals.csv"), *path.glob("*intervals.csv.gz")])
        if not found:
            raise InvalidRequest(f"{path} holds no *intervals.csv or *intervals.csv.gz, so it is no trace")
        file = found[0]
        order = path / "nodes_column_order.txt"
        if order.is_file():
            names = read_text(order).split()
    trace = parse_intervals(read_text(file), names)
    if not len(trace):
        why = trace.notes[0] if trace.notes else "it is empty"
        raise InvalidRequest(f"{file} holds no idle interval (start_s,end_s,node): {why}")
    return trace
