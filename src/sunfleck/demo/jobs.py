"""The demo's queue: four jobs, when they arrive, and what each is to reach."""

from __future__ import annotations

from dataclasses import dataclass

from sunfleck.core.model import JobSpec, Program


@dataclass(frozen=True)
class DemoJob:
    """A job of the demo. It ends by itself when `metric` (as it reports it) has passed `target`."""

    spec: JobSpec
    arrives_s: float
    """After the start of the demo."""
    metric: str
    target: float
    higher_is_better: bool
    work_core_s: float
    """Seconds of one whole core that it needs to its target alone, in one process (measured; +-20 % by seed)."""

    def reached(self, value: float) -> bool:
        return value >= self.target if self.higher_is_better else value <= self.target


def demo_jobs(seed: int = 0) -> tuple[DemoJob, ...]:
    """The four jobs in order of arrival. The amount of work is set here, by the targets: how far each is trained.

    The two that scale well may have every node; the two that do not are kept to half of them."""
    return (
        _job("transformer", 0.0, 8, "test_loss", 1.8, False, 23.0, seed),
        _job("mlp", 3.0, 4, "accuracy", 0.95, True, 19.0, seed),
        _job("cnn", 6.0, 8, "accuracy", 0.96, True, 20.0, seed),
        _job("gru", 10.0, 4, "test_error", 0.05, False, 18.0, seed),
    )


def _job(
    name: str,
    arrives_s: float,
    max_nodes: int,
    metric: str,
    target: float,
    higher_is_better: bool,
    work_core_s: float,
    seed: int,
) -> DemoJob:
    program = Program(
        module=f"sunfleck.demo.train_{name}",
        args=("--target", str(target), "--seed", str(seed)),
        warm=("torch", "sunfleck.elastic", "sunfleck.demo.data", "pydoc_data.topics"),
    )
    spec = JobSpec(name=name, min_nodes=1, max_nodes=max_nodes, program=program)
    return DemoJob(
        spec=spec,
        arrives_s=arrives_s,
        metric=metric,
        target=target,
        higher_is_better=higher_is_better,
        work_core_s=work_core_s,
    )
