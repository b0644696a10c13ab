"""PURE. Which jobs a plan considers, out of a queue that may hold thousands.

With a cap, jobs that run stay, and the queue fills up to the cap first come first served, as in both papers. Without
one the optimum itself decides how many run; only as many queued jobs are then looked at as could possibly get nodes:

- at most one per node;
- if no queued job weighs more than a job that runs, at most one per node that no running job needs for its smallest
  size: stopping a job to start one that is worth no more can only lose.

Queued jobs are taken heaviest first, then in order of arrival. Among jobs of one shape this loses nothing: of two that
differ in weight or arrival alone, an optimum never prefers the second.
"""

from __future__ import annotations

from dataclasses import dataclass

from sunfleck.core.model import JobView, Snapshot


@dataclass(frozen=True)
class Admission:
    """`jobs`: to be considered, in order of arrival. `waits`: why the others are not."""

    jobs: tuple[JobView, ...]
    waits: str = ""


def admit(snapshot: Snapshot, max_running: int | None) -> Admission:
    """The jobs of a snapshot that a plan considers."""
    jobs, n_nodes = snapshot.jobs, len(snapshot.nodes)
    running = [job for job in jobs if job.nodes]
    queued = [job for job in jobs if not job.nodes and job.spec.min_nodes <= n_nodes]
    if max_running is not None:
        running = running[:max_running]
        room = max_running - len(running)
        waits = f"queued: {max_running} jobs run already, which is the limit"
        chosen = queued[:room]
    else:
        room = n_nodes
        if queued and running:
            heaviest = max(job.spec.weight for job in queued)
            if heaviest <= min(job.spec.weight for job in running):
                room = n_nodes - sum(min(job.spec.min_nodes, len(job.nodes)) for job in running)
        room = max(0, room)
        if len(queued) > room:
            chosen = sorted(queued, key=lambda job: -job.spec.weight)[:room]  # stable: arrival decides
        else:
            chosen = queued
        waits = f"queued: the {n_nodes} nodes there are with jobs that came before it or weigh more"
    if len(running) + len(chosen) == len(jobs):
        return Admission(jobs)
    names = {job.job for job in running} | {job.job for job in chosen}
    return Admission(tuple(job for job in jobs if job.job in names), waits)
