"""Idle-interval CSV: `start_s,end_s,node`, one line per fragment, with or without a header."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import numpy as np

from ..trace import IdleTrace, from_arrays
from .text import Rejects

HEADER = "start_s,end_s,node"


def parse_intervals(text: str, names: Sequence[str] | None = None) -> IdleTrace:
    """A trace from the CSV's text. Nodes are numbered as in `names`; others (all, without `names`) follow in order
    of first appearance. Lines that begin with # are comments. Lines that are not a fragment are counted in the
    trace's notes and left out."""
    number: dict[str, int] = {name: i for i, name in enumerate(names or ())}
    start: list[float] = []
    end: list[float] = []
    node: list[int] = []
    rejects = Rejects("lines")
    header_seen = False
    for i, line in enumerate(text.splitlines(), 1):
        parts = line.split(",")
        try:
            lo, hi, name = float(parts[0]), float(parts[1]), parts[2].strip()
            if len(parts) != 3 or not name:
                raise IndexError
        except (ValueError, IndexError):
            stripped = line.strip()
            if not stripped or stripped.startswith("#"):
                continue
            if not header_seen and not start and "start" in stripped.lower():
                header_seen = True
            else:
                rejects.add(i, line, "not start_s,end_s,node")
            continue
        if not (isfinite(lo) and isfinite(hi)) or hi <= lo:
            rejects.add(i, line, "does not end after it starts")
            continue
        start.append(lo)
        end.append(hi)
        node.append(number.setdefault(name, len(number)))
    return from_arrays(
        np.array(start, np.float64),
        np.array(end, np.float64),
        np.array(node, np.int64),
        tuple(number),
        notes=rejects.notes(),
    )


def format_intervals(trace: IdleTrace, header: Sequence[str] = ()) -> str:
    """The CSV of a trace: `header` as comments, then the fragments. Whole seconds are written without a point."""
    lines = [*(f"# {line}" for line in header), HEADER]
    lines += [f"{start:.12g},{end:.12g},{name}" for start, end, name in trace]
    return "\n".join(lines) + "\n"
