"""Idle-event lists: one line per instant, `time<TAB>indices that become idle<TAB>indices that stop being idle`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..trace import IdleTrace, from_arrays
from .text import Rejects


def parse_events(text: str, names: Sequence[str] | None = None) -> IdleTrace:
    """A trace from such a list. `names` are the nodes in order of their index (the list itself only has indices);
    nodes still idle at the end leave with the last line. Lines that make no sense are counted and left out; a node
    that joins while it is idle, or leaves while it is not, is counted and ignored."""
    since: dict[int, float] = {}
    start: list[float] = []
    end: list[float] = []
    node: list[int] = []
    rejects = Rejects("lines")
    n_odd = 0
    largest = -1
    first_s: float | None = None
    last_s = float("-inf")
    for i, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            when, joins, leaves = [*line.split("\t"), "", ""][:3]
            time_s = float(when)
            joined = [int(part) for part in joins.split()]
            left = [int(part) for part in leaves.split()]
        except ValueError:
            rejects.add(i, line, "not time, joins, leaves")
            continue
        if time_s < last_s or min(joined + left, default=0) < 0:
            rejects.add(i, line, "out of order" if time_s < last_s else "negative index")
            continue
        first_s, last_s = time_s if first_s is None else first_s, time_s
        largest = max(largest, *joined, *left) if joined or left else largest
        for index in left:
            began = since.pop(index, None)
            if began is None:
                n_odd += 1
            elif time_s > began:
                start.append(began)
                end.append(time_s)
                node.append(index)
        for index in joined:
            if index in since:
                n_odd += 1
            else:
                since[index] = time_s
    for index, began in since.items():
        if last_s > began:
            start.append(began)
            end.append(last_s)
            node.append(index)
    known = list(names or ())
    known += [f"n{i:05d}" for i in range(len(known), largest + 1)]
    notes = rejects.notes()
    if n_odd:
        notes.append(f"{n_odd} joins of idle nodes or leaves of busy ones were ignored")
    if since:
        notes.append(f"{len(since)} nodes were still idle at the end of the list")
    return from_arrays(
        np.array(start, np.float64),
        np.array(end, np.float64),
        np.array(node, np.int64),
        known,
        begin_s=first_s,
        end_s=last_s if first_s is not None else None,
        notes=notes,
    )
