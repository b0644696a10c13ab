"""Standard Workload Format (Feitelson's archive): `;` header lines, then 18 numbers a job, -1 for unknown."""

from __future__ import annotations

from dataclasses import dataclass, field

from sunfleck.core.errors import InvalidRequest

from ..trace import IdleTrace
from .easy import reschedule
from .records import JobRecord, idle_by_count, nodes_used, without_outages
from .text import Rejects

FIELDS = 18
SHARED = 0.05
"""When more of the jobs than this take part of a node, nodes are shared."""
_STATES = {0: "failed", 1: "completed", 2: "partial", 3: "last partial", 4: "failed partial", 5: "cancelled"}


@dataclass(frozen=True)
class Swf:
    """A workload: its header by key (several lines of one key are joined), its jobs, and what could not be used."""

    header: dict[str, str]
    records: list[JobRecord]
    notes: list[str] = field(default_factory=list)

    def number(self, key: str) -> int | None:
        """A whole number of the header, if it is there and is one."""
        try:
            return int(float(self.header[key].split()[0]))
        except (KeyError, ValueError, IndexError):
            return None


def parse_swf(text: str) -> Swf:
    """Header and jobs. Jobs that never ran (no wait time, no run time or no processors) are counted and left out."""
    header: dict[str, str] = {}
    rejects, idle = Rejects("lines"), 0
    rows: list[tuple[str, float, float, float, int, float, int, int]] = []
    for i, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not stripped:
            continue
        if stripped.startswith(";"):
            key, colon, value = stripped.lstrip("; \t").partition(":")
            if colon and key and key.replace(" ", "").isalnum():
                header[key.strip()] = (
                    f"{header[key.strip()]}; {value.strip()}" if key.strip() in header else value.strip()
                )
            continue
        parts = stripped.split()
        try:
            if len(parts) < 11:
                raise ValueError
            submit, wait, run, procs, asked, limit = (float(parts[k]) for k in (1, 2, 3, 4, 7, 8))
            status, queue = int(float(parts[10])), int(float(parts[14])) if len(parts) > 14 else -1
        except ValueError:
            rejects.add(i, line, f"not {FIELDS} numbers")
            continue
        n = procs if procs > 0 else asked
        if wait < 0 or run <= 0 or n <= 0 or submit < 0:
            idle += 1
            continue
        rows.append((parts[0], submit, wait, run, int(n), limit, status, queue))
    workload = Swf(header, [], rejects.notes())
    per_node = _processors_per_node(workload)
    n_parts = sum(1 for row in rows if row[4] % per_node)
    if n_parts > SHARED * len(rows):
        workload.notes.append(
            f"{n_parts} jobs use part of a node, and which share one is not recorded: a processor counts as a node"
        )
        per_node = 1
    elif per_node > 1:
        workload.notes.append(f"{per_node} processors are one node, and part of a node counts as a whole one")
    workload.header["ProcessorsPerNode"] = str(per_node)
    workload.records.extend(
        JobRecord(
            job=job,
            submit_s=submit,
            start_s=submit + wait,
            end_s=submit + wait + run,
            n_nodes=-(-n // per_node),
            requested_s=limit if limit > 0 else None,
            state=_STATES.get(status, str(status)),
        )
        for job, submit, wait, run, n, limit, status, _ in rows
    )
    if idle:
        workload.notes.append(f"{idle} jobs never ran, or not for a known time, and were left out")
    return workload


def _processors_per_node(workload: Swf) -> int:
    nodes, procs = workload.number("MaxNodes"), workload.number("MaxProcs")
    return max(1, round(procs / nodes)) if nodes and procs and nodes > 0 else 1


def swf_trace(text: str, *, rescheduled: bool = False, n_nodes: int | None = None) -> IdleTrace:
    """The holes in the recorded schedule, or in what EASY backfill makes of the submissions; outages are cut out.

    The machine has `n_nodes`, or as many as the header says, or as were in use at once if that is more. Raises
    InvalidRequest when there is no job."""
    workload = parse_swf(text)
    records, notes = workload.records, list(workload.notes)
    if not records:
        raise InvalidRequest("this SWF file holds no job that ran" + (f": {notes[0]}" if notes else ""))
    used = nodes_used(records)
    nodes, procs = workload.number("MaxNodes"), workload.number("MaxProcs")
    if procs and workload.header["ProcessorsPerNode"] == "1":
        nodes = procs
    size = n_nodes or nodes or used
    if size < used and n_nodes is None and not rescheduled:
        notes.append(f"{used} nodes were in use at once, more than the {size} of the header: the larger figure is used")
        size = used
    if rescheduled:
        records, more = reschedule(records, size)
        notes += ["scheduled anew by EASY backfill", *more]
    begin = min(r.start_s for r in records)
    end = max(r.end_s or r.start_s for r in records)
    return without_outages(idle_by_count(records, size, begin, end, notes))
