"""PURE. EASY backfill: what an ordinary scheduler would have made of recorded submissions.

First come, first served; when the head of the queue does not fit, it gets a reservation at the earliest time at which
enough nodes are free if every running job uses its whole limit; later jobs may start at once if they end by then, or
if they only use nodes which the head does not need (Lifka, JSSPP 1995; Mu'alem and Feitelson, TPDS 12, 2001).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace

from .records import JobRecord


def reschedule(records: Sequence[JobRecord], n_nodes: int) -> tuple[list[JobRecord], list[str]]:
    """The records with new start and end times on a machine of `n_nodes`, and notes. Jobs without an end, or larger
    than the machine, are left out, which is said."""
    usable = [r for r in records if r.end_s is not None and 0 < r.n_nodes <= n_nodes]
    notes = []
    if len(usable) < len(records):
        notes.append(f"{len(records) - len(usable)} jobs without an end or larger than the machine were left out")
    arrivals = sorted(usable, key=lambda r: r.submit_s)
    done: list[JobRecord] = []
    queue: list[JobRecord] = []
    running: list[tuple[float, int, int, float]] = []
    """(end, serial, nodes, end by limit)"""
    free, now, at, serial = n_nodes, 0.0, 0, 0

    def start(record: JobRecord) -> None:
        nonlocal free, serial
        run_s = _run_s(record)
        serial += 1
        heapq.heappush(running, (now + run_s, serial, record.n_nodes, now + _limit_s(record)))
        free -= record.n_nodes
        done.append(replace(record, start_s=now, end_s=now + run_s, nodes=()))

    while at < len(arrivals) or queue:
        times = [arrivals[at].submit_s] if at < len(arrivals) else []
        if running:
            times.append(running[0][0])
        now = max(now, min(times))
        while running and running[0][0] <= now:
            free += heapq.heappop(running)[2]
        while at < len(arrivals) and arrivals[at].submit_s <= now:
            queue.append(arrivals[at])
            at += 1
        n_started = 0
        while n_started < len(queue) and queue[n_started].n_nodes <= free:
            start(queue[n_started])
            n_started += 1
        del queue[:n_started]
        if queue and free:
            _backfill(queue, running, free, now, start)
    return done, notes


def _run_s(record: JobRecord) -> float:
    return (record.start_s if record.end_s is None else record.end_s) - record.start_s


def _limit_s(record: JobRecord) -> float:
    """What the scheduler must count with: the time limit, or the true time where no limit is recorded."""
    run_s = _run_s(record)
    return max(run_s, record.requested_s or run_s)


def _backfill(
    queue: list[JobRecord],
    running: Sequence[tuple[float, int, int, float]],
    free: int,
    now: float,
    start: Callable[[JobRecord], None],
) -> None:
    """Start what does not delay the head of the queue, and take it out."""
    head = queue[0]
    shadow_s, there = now, free
    for _, _, n, limit_s in sorted(running, key=lambda run: run[3]):
        there += n
        shadow_s = limit_s
        if there >= head.n_nodes:
            break
    extra = there - head.n_nodes
    kept = [head]
    for i, record in enumerate(queue[1:], 1):
        if free <= 0:
            kept.extend(queue[i:])
            break
        in_time = now + _limit_s(record) <= shadow_s
        if record.n_nodes <= free and (in_time or record.n_nodes <= extra):
            start(record)
            free -= record.n_nodes
            if not in_time:
                extra -= record.n_nodes
        else:
            kept.append(record)
    queue[:] = kept
