"""`sacct`: parsable dumps (-P or -p, any delimiter, with or without a header line) and --json.

Only whole jobs count; steps (`123.batch`) are part of theirs. Times are local times of the site without a zone, or Unix
times; only their differences matter here. States that nobody knows yet are kept as they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from sunfleck.core.errors import InvalidRequest

from ..trace import IdleTrace
from .hostlist import expand
from .records import JobRecord, idle_by_count, idle_by_name, nodes_used, without_outages
from .text import Rejects

COLUMNS = (
    "JobID|JobIDRaw|Cluster|Partition|QOS|Account|Group|GID|User|UID|Submit|Eligible|Start|End|Elapsed|ExitCode|State|"
    "NNodes|NCPUS|ReqCPUS|ReqMem|ReqTRES|AllocTRES|Timelimit|NodeList|JobName"
)
"""Assumed of a dump without a header line: the columns that accounting exports use most."""
_NEVER = {"", "unknown", "none", "n/a", "invalid"}
_LIMIT = re.compile(r"^(?:(\d+)-)?(\d+):(\d+)(?::(\d+))?(?:\.\d+)?$")


@dataclass(frozen=True)
class Sacct:
    records: list[JobRecord]
    notes: list[str] = field(default_factory=list)


def parse_sacct(text: str, columns: str = "") -> Sacct:
    """Jobs of a `sacct` dump with `|` or `,` between fields. `columns` names the fields of one without a header.

    Lines that are no job are counted; jobs that never started are counted and left out."""
    lines = text.splitlines()
    first = next((line for line in lines if line.strip()), "")
    names = first if "JobID" in first else (columns or COLUMNS)
    delimiter = "|" if "|" in names else ","
    index = {name.strip().lower(): i for i, name in enumerate(names.split(delimiter))}
    missing = [name for name in ("jobid", "start", "end") if name not in index]
    if missing:
        raise InvalidRequest(f"this sacct dump has no column {', '.join(missing)}; its columns are {names}")
    rejects, n_never = Rejects("lines"), 0
    records: list[JobRecord] = []

    def cell(parts: Sequence[str], name: str) -> str:
        i = index.get(name)
        return parts[i].strip() if i is not None and i < len(parts) else ""

    for number, line in enumerate(lines, 1):
        if not line.strip() or (line is first and "JobID" in first):
            continue
        parts = line.split(delimiter)
        try:
            if len(parts) < len(index) - 1:
                raise ValueError("too few fields")
            job = cell(parts, "jobid")
            if "." in job:
                continue
            begun, ended = _time(cell(parts, "start")), _time(cell(parts, "end"))
            nodes = expand(cell(parts, "nodelist"))
            n = int(cell(parts, "nnodes") or 0) or len(nodes)
            submitted = _time(cell(parts, "submit"))
        except ValueError as error:
            rejects.add(number, line, str(error)[:60])
            continue
        if begun is None or n < 1 or (not nodes and "nodelist" in index):
            n_never += 1
            continue
        records.append(
            JobRecord(
                job=job,
                submit_s=begun if submitted is None else submitted,
                start_s=begun,
                end_s=ended,
                n_nodes=n,
                requested_s=_duration(cell(parts, "timelimit")),
                nodes=nodes,
                state=(cell(parts, "state").split() or [""])[0].rstrip("+"),
            )
        )
    return Sacct(records, _notes(rejects, n_never))


def parse_sacct_json(text: str) -> Sacct:
    """Jobs of `sacct --json`, of any version of its data parser."""
    try:
        jobs = json.loads(text)["jobs"]
        if not isinstance(jobs, list):
            raise TypeError("`jobs` is no list")
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"this is not the output of sacct --json: {error}") from error
    rejects, n_never = Rejects("jobs"), 0
    records: list[JobRecord] = []
    for i, job in enumerate(jobs, 1):
        try:
            times = job["time"]
            begun, ended = _number(times.get("start")), _number(times.get("end"))
            nodes = expand(job.get("nodes") or "")
            n = int(_number(job.get("allocation_nodes")) or 0) or len(nodes)
            state = job.get("state") or {}
            current = state.get("current", "") if isinstance(state, dict) else state
            limit = _number(times.get("limit"))
            record = JobRecord(
                job=str(job.get("job_id", i)),
                submit_s=_number(times.get("submission")) or begun or 0.0,
                start_s=begun or 0.0,
                end_s=ended or None,
                n_nodes=n,
                requested_s=None if limit is None else 60.0 * limit,
                nodes=nodes,
                state=current[0] if isinstance(current, list) and current else str(current),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            rejects.add(i, json.dumps(job)[:80], f"{type(error).__name__}: {error}"[:60])
            continue
        if not begun or record.n_nodes < 1 or not nodes:
            n_never += 1
        else:
            records.append(record)
    return Sacct(records, _notes(rejects, n_never))


def sacct_trace(
    dump: Sacct, *, n_nodes: int | None = None, begin_s: float | None = None, end_s: float | None = None
) -> IdleTrace:
    """The holes between the jobs of a dump; outages are cut out. With node lists they are those of the real nodes.

    A dump shows the jobs that ended while it covers, so the span is from the first recorded end to the last unless
    it is given. Jobs that still ran at its end may be missing, and nodes that nobody used are not known."""
    records, notes = dump.records, list(dump.notes)
    if not records:
        raise InvalidRequest("this sacct dump holds no job that had nodes" + (f": {notes[0]}" if notes else ""))
    ends = [r.end_s for r in records if r.end_s is not None]
    starts = [r.start_s for r in records]
    begin = begin_s if begin_s is not None else min(ends, default=min(starts))
    end = end_s if end_s is not None else max(ends + starts)
    if end <= begin:
        raise InvalidRequest("this sacct dump covers no time: all its jobs ended at once")
    names = sorted({name for r in records for name in r.nodes})
    if names:
        if n_nodes and n_nodes > len(names):
            notes.append(f"{n_nodes - len(names)} nodes that no job names are taken to be unusable, not idle")
        return without_outages(idle_by_name(records, begin, end, names, notes))
    size = n_nodes or nodes_used(records)
    notes.append(f"no node lists: the {size} nodes are virtual, and part of a node counts as a whole one")
    return without_outages(idle_by_count(records, size, begin, end, notes))


def _notes(rejects: Rejects, n_never: int) -> list[str]:
    notes = rejects.notes()
    if n_never:
        notes.append(f"{n_never} jobs never had a node and were left out")
    return notes


def _time(text: str) -> float | None:
    """Seconds; None for Unknown and the like. Raises ValueError for anything else that is no time."""
    if text.lower() in _NEVER:
        return None
    if text.replace(".", "", 1).isdigit():
        return float(text)
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def _duration(text: str) -> float | None:
    """Seconds of [days-]hours:minutes:seconds or minutes:seconds; None for UNLIMITED and whatever else is no time."""
    found = _LIMIT.match(text)
    if not found:
        return None
    days, a, b, c = (int(part) if part else 0 for part in found.groups())
    return float(86400 * days + 3600 * a + 60 * b + c) if found.group(4) else float(86400 * days + 60 * a + b)


def _number(value: Any) -> float | None:
    """A number, also in Slurm's {"set": true, "infinite": false, "number": 5}; None where it is not set."""
    if isinstance(value, dict):
        if not value.get("set", True) or value.get("infinite"):
            return None
        value = value.get("number")
    return None if value is None else float(value)


def merge_notes(*parts: Iterable[str]) -> tuple[str, ...]:
    """All notes once, in order."""
    return tuple(dict.fromkeys(note for part in parts for note in part))
