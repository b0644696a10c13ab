"""PURE. Snapshots: what a policy is shown of the state.

A queue may hold thousands of jobs of which a plan moves a few, so jobs that only wait keep the view they were last
shown in, and jobs of one architecture share one tuple of measurements.
"""

from __future__ import annotations

from .model import JobPhase, JobView, NodeName, NodeView, ScaleStats, Snapshot
from .state import JobState, State


class Snapshots:
    """Takes snapshots, and remembers what it can show again. Holds nothing that matters to the result."""

    def __init__(self) -> None:
        self._scales: dict[int, tuple[ScaleStats, ...]] = {}
        """By the identity of the dictionary: measurements in order, as last shown."""
        self._n_measured = 0

    def take(self, state: State, now_s: float) -> Snapshot:
        nodes = tuple(
            NodeView(name=name, kind=node.spec.kind, job=node.job, joined_s=node.joined_s)
            for name, node in sorted(state.nodes.items())
            if node.usable
        )
        usable = {node.name for node in nodes}
        if state.n_measured != self._n_measured:
            self._n_measured = state.n_measured
            for job in state.active.values():
                job.view = None
        if len(self._scales) > 2 * len(state.active) + 64:  # of jobs that have ended
            self._scales.clear()
        now_shown: dict[int, tuple[ScaleStats, ...]] = {}
        return Snapshot(
            generation=state.generation,
            now_s=now_s,
            nodes=nodes,
            jobs=tuple(
                job.view or self._view(job, usable, now_shown)
                for job in state.active.values()
                if job.phase is not JobPhase.STOPPING
            ),
            profiling=state.profiling,
            history=state.history,
        )

    def _view(self, job: JobState, usable: set[NodeName], now_shown: dict[int, tuple[ScaleStats, ...]]) -> JobView:
        """`now_shown`: measurements already put in order for this snapshot."""
        key = id(job.scales)
        scales = now_shown.get(key)
        if scales is None:
            scales = tuple(job.scales[n] for n in sorted(job.scales))
            shown = self._scales.get(key)
            if shown == scales:
                scales = shown
            now_shown[key] = self._scales[key] = scales
        view = JobView(
            job=job.job,
            spec=job.spec,
            submitted_s=job.submitted_s,
            nodes=tuple(sorted((job.requested or frozenset()) & usable)),
            started=job.trained,
            rescaling=job.rescaling,
            scales=scales,
            costs=job.costs,
            size_since_s=job.size_since_s,
            samples=float(job.samples),
        )
        if job.phase is JobPhase.QUEUED and not job.planned and not job.requested and not job.observed:
            job.view = view
        return view
