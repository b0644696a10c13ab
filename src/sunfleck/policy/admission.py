"""PURE. Which jobs a plan considers, out of a queue that may hold thousands.

With a cap, jobs that run stay, and the queue fills up to the cap first come first served, as in both papers. Without
one the optimum itself decides how many run; only as many queued jobs are then looked at as could possibly get nodes:

- of jobs with the same smallest size, no more than fit side by side, heaviest first, then in order of arrival;
- with the normalised objective, and if no queued job weighs more than a job that runs: side by side on the nodes
  that are left beside one for each running job that can run on one. Stopping such a job on its last node, to start
  one that is worth no more there, can only lose.

Of two jobs that differ in weight or arrival alone an optimum never prefers the second, and no node is left idle for
a job that was not looked at: if it could have run there, one that was looked at could have as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from sunfleck.core.model import JobView, Snapshot

from .objective import URGENCY


@dataclass(frozen=True)
class Admission:
    """`jobs`: to be considered, in order of arrival. `waits`: why the others are not."""

    jobs: tuple[JobView, ...]
    waits: str


def admit(snapshot: Snapshot, max_running: int | None, *, normalised: bool = True) -> Admission:
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
            heaviest = max(_weight(job) for job in queued)
            if normalised and heaviest <= min(_weight(job) for job in running):
                room = max(0, n_nodes - sum(1 for job in running if job.spec.min_nodes == 1))
        chosen = []
        taken: dict[int, int] = {}
        for job in sorted(queued, key=_lightness):  # stable: arrival decides between equals
            smallest = job.spec.min_nodes
            if (taken.get(smallest, 0) + 1) * smallest <= room:
                taken[smallest] = taken.get(smallest, 0) + 1
                chosen.append(job)
        waits = "queued: all nodes are with jobs that came before it or weigh more"
    if len(running) + len(chosen) == len(jobs):
        return Admission(jobs, waits)
    names = {job.job for job in running} | {job.job for job in chosen}
    return Admission(tuple(job for job in jobs if job.job in names), waits)


def _weight(job: JobView) -> tuple[int, float]:
    """Priority class, then weight; a deadline may multiply the weight."""
    urgent = 1.0 + URGENCY if job.spec.deadline_s is not None and job.spec.total_samples is not None else 1.0
    return job.spec.priority, urgent * job.spec.weight


def _lightness(job: JobView) -> tuple[int, float]:
    priority, weight = _weight(job)
    return -priority, -weight
