"""The demo's queue: four jobs, when they arrive, and what each is to reach."""

from __future__ import annotations

from dataclasses import dataclass

from sunfleck.core.model import JobSpec, Program, Target

WARM = ("torch", "sunfleck.elastic", "sunfleck.demo.loaded")
"""What the scripts import; a zygote that has it starts their workers in milliseconds."""


@dataclass(frozen=True)
class DemoJob:
    """A job of the demo. It ends by itself when it has met `spec.target`."""

    spec: JobSpec
    arrives_s: float
    """After the start of the demo."""
    work_core_s: float
    """Seconds of one whole core that it needs to its target alone, in one process (measured; +-20 % by seed)."""


def demo_jobs(seed: int = 0) -> tuple[DemoJob, ...]:
    """The four jobs in order of arrival. The amount of work is set here, by the targets: how far each is trained.

    The one that scales best may have every node; the others are kept to half of them."""
    return (
        _job("transformer", 0.0, 4, Target(metric="test_loss", value=1.8, at_least=False), 18.0, seed),
        _job("mlp", 3.0, 4, Target(metric="accuracy", value=0.965), 16.0, seed),
        _job("cnn", 6.0, 8, Target(metric="accuracy", value=0.98), 27.0, seed),
        _job("gru", 10.0, 4, Target(metric="test_error", value=0.03, at_least=False), 19.0, seed),
    )


def _job(name: str, arrives_s: float, max_nodes: int, target: Target, work_core_s: float, seed: int) -> DemoJob:
    program = Program(
        module=f"sunfleck.demo.train_{name}",
        args=("--target", str(target.value), "--seed", str(seed)),
        warm=WARM,
    )
    spec = JobSpec(name=name, max_nodes=max_nodes, target=target, program=program)
    return DemoJob(spec=spec, arrives_s=arrives_s, work_core_s=work_core_s)
