"""Readers of traces: a file or folder in, an IdleTrace out. `read_trace` finds out what it is given."""

from __future__ import annotations

from pathlib import Path

from sunfleck.core.errors import InvalidRequest

from ..trace import IdleTrace
from .events import parse_events
from .intervals import parse_intervals
from .sacct import parse_sacct, parse_sacct_json, sacct_trace
from .swf import FIELDS, swf_trace
from .text import read_text

__all__ = ["read_trace"]

_IN_FOLDER = ("*intervals.csv*", "*events.txt*", "*.swf*", "*.sacct*", "*sacct*.csv*", "*.json*")
"""What makes a folder a trace, best first."""


def read_trace(path: Path | str, *, rescheduled: bool = False, n_nodes: int | None = None) -> IdleTrace:
    """The trace in a file: idle intervals, idle events, SWF, `sacct -P` or `sacct --json`, plain or gzip, told apart by
    their content. A folder is a trace when it holds such a file; then `nodes_column_order.txt` or `nodes.txt` in it
    name the nodes in order, and COLUMNS.txt the columns of a sacct dump without a header.

    `rescheduled`: SWF jobs are scheduled anew by EASY backfill instead of as recorded. `n_nodes`: size of the machine
    where the file does not say it. Raises InvalidRequest when there is nothing of the kind or nothing usable in it."""
    path = Path(path)
    file = _in_folder(path) if path.is_dir() else path
    text = read_text(file)
    kind = _kind(text)
    if rescheduled and kind != "swf":
        raise InvalidRequest(f"{file} is no SWF file; only submissions of jobs can be scheduled anew")
    if kind == "swf":
        return swf_trace(text, rescheduled=rescheduled, n_nodes=n_nodes)
    if kind == "json":
        return sacct_trace(parse_sacct_json(text), n_nodes=n_nodes)
    if kind == "sacct":
        columns = file.parent / "COLUMNS.txt"
        return sacct_trace(parse_sacct(text, read_text(columns).strip() if columns.is_file() else ""), n_nodes=n_nodes)
    if kind == "events":
        trace = parse_events(text, _names(file.parent, "nodes.txt"))
    else:
        trace = parse_intervals(text, _names(file.parent, "nodes_column_order.txt") if path.is_dir() else None)
    if not len(trace):
        why = trace.notes[0] if trace.notes else "it is empty"
        raise InvalidRequest(f"{file} holds no idle interval (start_s,end_s,node): {why}")
    return trace


def _in_folder(folder: Path) -> Path:
    for pattern in _IN_FOLDER:
        found = sorted(p for p in folder.glob(pattern) if p.is_file())
        if len(found) > 1:
            names = ", ".join(p.name for p in found)
            raise InvalidRequest(f"{folder} holds several traces ({names}); name one of them")
        if found:
            return found[0]
    raise InvalidRequest(f"{folder} is no trace: it holds no idle intervals, idle events, SWF or sacct file")


def _kind(text: str) -> str:
    """What a file is, by its first lines."""
    lines = [line for line in text[:8192].splitlines() if line.strip() and not line.startswith("#")][:20]
    first = lines[0] if lines else ""
    if first.lstrip().startswith(";"):
        return "swf"
    if first.lstrip().startswith("{"):
        return "json"
    if "|" in first or "JobID" in first:
        return "sacct"
    if len(first.split()) == FIELDS and "," not in first and "\t" not in first.strip():
        return "swf"
    if any("\t" in line for line in lines):
        return "events"
    return "intervals"


def _names(folder: Path, file: str) -> list[str] | None:
    path = folder / file
    return read_text(path).split() if path.is_file() else None
