"""What an executor adapter is: it runs the workers of jobs on nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sunfleck.core.model import JobSpec


class Executor(Protocol):
    """Reports RoundFormed, WorkersLeft, Progress, JobFinished ... through `emit` given at construction."""

    def rescale(self, job: str, spec: JobSpec, nodes: Sequence[str], grace_s: float) -> None:
        """Make the job run on exactly these nodes. Returns at once; supersedes an earlier call under way."""

    def stop_job(self, job: str, grace_s: float, save: bool) -> None:
        """End the job; report JobStopped when every worker is gone."""

    def stop(self) -> None:
        """End whatever still runs. Blocks, at most seconds."""
