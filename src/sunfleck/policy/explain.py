"""PURE. Reasons in words: why a job has the nodes it has, or none."""

from __future__ import annotations

from collections.abc import Sequence

from sunfleck.core.model import JobId, JobView, Profiling

from .objective import Worth


class Explainer:
    """Compares, for each job of an allocation, the next step up with the cheapest node elsewhere.

    Gains and losses are given per node, in percent of what a job's first node is worth (weights included), so that
    they compare between jobs.
    """

    def __init__(
        self,
        jobs: Sequence[JobView],
        worths: Sequence[Worth],
        sizes: Sequence[int],
        n_nodes: int,
        profiling: Profiling | None,
    ) -> None:
        self._rows = {job.job: (w, n) for job, w, n in zip(jobs, worths, sizes, strict=True)}
        self._n_nodes, self._profiling = n_nodes, profiling
        self._free = n_nodes - sum(sizes)
        unit = sum(w.rate(1) for w in worths) / len(worths) if worths else 1.0
        self._unit = unit if unit > 0.0 else 1.0
        held = (
            (self._loss(w, job.spec.min_nodes, job.spec.multiple, n), job.spec.name, job.job)
            for job, w, n in zip(jobs, worths, sizes, strict=True)
            if n > 0 and (profiling is None or profiling.job != job.job)
        )
        self._cheapest = sorted(held)[:2]

    def reason(self, job: JobView) -> str:
        """Why this job has what it has in the allocation."""
        w, n = self._rows[job.job]
        spec, there = job.spec, self._n_nodes
        if self._profiling is not None and self._profiling.job == job.job:
            left = self._profiling.remaining
            then = f", then at {', '.join(map(str, left))}" if left else ""
            return f"profiling at {n} {_nodes(n)}{then}: its throughput there is not known yet"
        small = self.too_small(job)
        if small:
            return small
        if n == 0:
            wants = f"{spec.min_nodes} {_nodes(spec.min_nodes)}"
            if job.nodes:
                return f"stopped for now: its nodes are worth more elsewhere{self._elsewhere(job.job)}"
            waits = "paused" if job.started else "queued"
            if self._free >= spec.min_nodes:
                return f"{waits}: it gains nothing from a node by what is known of it"
            return f"{waits}: it needs {wants}, and all nodes are worth more elsewhere{self._elsewhere(job.job)}"
        efficiency = w.rate(n) / (n * w.rate(1)) if w.rate(1) > 0.0 else 0.0
        assumed = "" if any(s.n_nodes == n for s in job.scales) else " (assumed, not measured yet)"
        have = f"{n} of {there} nodes: the optimum, at efficiency {efficiency:.2f}{assumed}"
        if n >= spec.max_nodes:
            return f"{have}; it asks for no more"
        if n + spec.multiple > min(spec.max_nodes, there):
            return f"{have}; there are no more to take" if spec.multiple == 1 else f"{have}; no larger size fits"
        gain = (w.rate(n + spec.multiple) - w.rate(n)) / spec.multiple
        if gain <= 0.0:
            return f"{have}; it would train no faster with more"
        more = "one more node" if spec.multiple == 1 else f"each of {spec.multiple} more nodes"
        return f"{have}; {more} would gain it {self._percent(gain)} of a first node{self._elsewhere(job.job)}"

    def too_small(self, job: JobView) -> str:
        """Why the pool can never give this job its smallest size as it is now; empty if it can."""
        there = self._n_nodes
        if job.spec.min_nodes <= there:
            return ""
        return f"queued: min_nodes {job.spec.min_nodes} exceeds the {there} {_nodes(there)} there"

    def _elsewhere(self, job: JobId) -> str:
        for loss, name, other in self._cheapest:
            if other != job:
                return f"; the cheapest node elsewhere is worth {self._percent(loss)} to {name}"
        return ""

    def _loss(self, w: Worth, smallest: int, multiple: int, n: int) -> float:
        step = multiple if n - multiple >= smallest else n
        return (w.rate(n) - w.rate(n - step)) / step

    def _percent(self, rate: float) -> str:
        return f"{100.0 * rate / self._unit:.0f} %"


def _nodes(n: int) -> str:
    return "node" if n == 1 else "nodes"
