"""Simulated jobs: what is submitted when, how fast it truly trains, and what changing its size truly costs.

Networks: throughput of seven networks on 1 to 64 nodes of Summit as published with FreeTrain (CCGrid 2023; rounded to
whole samples/s), linear in between, as in the published replay.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from sunfleck.core.errors import InvalidRequest
from sunfleck.core.model import JobSpec
from sunfleck.policy.scaling import Curve, PiecewiseCurve

from .readers.text import read_text

SIZES = (1, 2, 4, 8, 16, 32, 64)
NETWORKS: dict[str, tuple[int, ...]] = {
    "alexnet": (7115, 13072, 21066, 40485, 74003, 130762, 202135),
    "vgg16": (1193, 2389, 4692, 9258, 18349, 36209, 70152),
    "resnet18": (5219, 10583, 20436, 39584, 78024, 144763, 262723),
    "densenet": (990, 1953, 3850, 7608, 14993, 28812, 57774),
    "mnasnet": (3246, 6002, 11489, 23076, 43900, 83474, 160494),
    "shufflenet": (2831, 5259, 9988, 20379, 38895, 74125, 145082),
    "mobilenet": (3040, 5893, 11386, 22025, 42488, 82268, 155214),
}
"""In the order in which the published list of jobs goes through them."""
_ALIASES = {"mnasnet1": "mnasnet"}
SAMPLES = 1.3e8
"""Samples of one published job: about a hundred epochs of ImageNet."""
GAP_S = 36.0
"""Between two submissions of the published lists."""


@dataclass(frozen=True)
class TrueCosts:
    """Seconds without training, as they really are in the simulated world."""

    start_s: float = 2.0
    """From no node to training."""
    rescale_up_s: float = 0.5
    rescale_down_s: float = 0.2
    preempt_s: float = 0.5
    """Of the survivors, when nodes went without a word."""


@dataclass(frozen=True)
class SimJob:
    """One job of a workload. `name` is also its id."""

    name: str
    spec: JobSpec
    submit_s: float
    curve: Curve
    samples: float
    """It is finished after so many."""
    costs: TrueCosts = TrueCosts()
    noise: float = 0.0
    """Relative standard deviation of one report of its throughput."""

    def with_costs(self, costs: TrueCosts) -> SimJob:
        return replace(self, costs=costs)


@cache
def network(name: str) -> PiecewiseCurve:
    """The published curve of a network. Raises InvalidRequest for an unknown one."""
    key = name.lower()
    key = _ALIASES.get(key, key)
    if key not in NETWORKS:
        raise InvalidRequest(f"no scaling curve of `{name}` is known; known are: {', '.join(NETWORKS)}")
    return PiecewiseCurve.through(zip(SIZES, map(float, NETWORKS[key]), strict=True))


def make_job(
    i: int,
    model: str,
    submit_s: float,
    *,
    samples: float = SAMPLES,
    min_nodes: int = 1,
    max_nodes: int = 64,
    multiple: int = 1,
    costs: TrueCosts | None = None,
    curve: Curve | None = None,
    noise: float = 0.0,
    name: str = "",
) -> SimJob:
    """Job number `i`. Jobs of one model share an architecture, and so their profile."""
    name = name or f"j{i:05d}"
    spec = JobSpec(
        name=name,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        multiple=multiple,
        architecture=model,
        total_samples=samples,
    )
    return SimJob(
        name=name,
        spec=spec,
        submit_s=submit_s,
        curve=network(model) if curve is None else curve,
        samples=samples,
        costs=costs or TrueCosts(),
        noise=noise,
    )


def hpo(n: int, *, samples: float = SAMPLES, noise: float = 0.0) -> list[SimJob]:
    """`n` jobs that tune the hyperparameters of ShuffleNet, one every 36 s."""
    return [make_job(i, "shufflenet", i * GAP_S, samples=samples, noise=noise) for i in range(n)]


def nas(n: int, *, samples: float = SAMPLES, noise: float = 0.0) -> list[SimJob]:
    """`n` jobs of seven different networks in turn, one every 36 s."""
    models = list(NETWORKS)
    return [make_job(i, models[i % len(models)], i * GAP_S, samples=samples, noise=noise) for i in range(n)]


def parse_jobs(text: str, curves: dict[str, Curve] | None = None) -> list[SimJob]:
    """Jobs from the published list's CSV: job,model,Tsub_s,Tcup,Tcdw,Jmin,Jmax,Pmax (costs may be missing).

    `model` is one of `curves`, or a network known here. Raises InvalidRequest for a line that is no job."""
    jobs = []
    for i, row in enumerate(csv.DictReader(io.StringIO(text))):
        try:
            model = row["model"].strip()
            if not model or not row["job"].strip():
                raise ValueError("no name or no model")
            costs = TrueCosts()
            if row.get("Tcup"):
                costs = replace(costs, rescale_up_s=float(row["Tcup"]), rescale_down_s=float(row["Tcdw"]))
            jobs.append(
                make_job(
                    i,
                    model,
                    float(row.get("Tsub_s") or 0.0),
                    samples=float(row.get("Pmax") or SAMPLES),
                    min_nodes=int(float(row.get("Jmin") or 1)),
                    max_nodes=int(float(row.get("Jmax") or 64)),
                    costs=costs,
                    curve=(curves or {}).get(model),
                    name=row["job"],
                )
            )
        except (KeyError, ValueError, TypeError) as error:
            raise InvalidRequest(
                f"line {i + 2} of the job list is no job ({error}); "
                f"the columns are job,model,Tsub_s,Tcup,Tcdw,Jmin,Jmax,Pmax"
            ) from error
    return sorted(jobs, key=lambda job: job.submit_s)


def parse_curves(text: str) -> dict[str, Curve]:
    """Scaling curves from CSV: model,nodes,samples_per_s."""
    points: dict[str, dict[int, float]] = {}
    for i, row in enumerate(csv.reader(io.StringIO(text))):
        try:
            model, n, per_s = row[0], int(float(row[1])), float(row[2])
        except (ValueError, IndexError) as error:
            if i == 0:
                continue  # the header
            raise InvalidRequest(f"line {i + 1} of the curves is not model,nodes,samples_per_s") from error
        if n > 0:
            points.setdefault(model, {})[n] = per_s
    return {model: PiecewiseCurve.through(by_size) for model, by_size in points.items()}


def workload(wish: str, *, curves_path: str = "", noise: float = 0.0) -> list[SimJob]:
    """The jobs named by `hpo:N`, `nas:N` or the path of a job list. Raises InvalidRequest."""
    kind, _, count = wish.partition(":")
    if kind in ("hpo", "nas"):
        if not count.isdigit() or int(count) < 1:
            raise InvalidRequest(f"`{wish}` names no workload: say {kind}:N with N jobs, as in {kind}:1000")
        return (hpo if kind == "hpo" else nas)(int(count), noise=noise)
    curves = parse_curves(read_text(Path(curves_path))) if curves_path else None
    jobs = parse_jobs(read_text(Path(wish)), curves)
    if not jobs:
        raise InvalidRequest(f"{wish} lists no job")
    return [replace(job, noise=noise) for job in jobs]


def true_curves(jobs: Iterable[SimJob]) -> dict[str, Curve]:
    """The true curve of every job by its id: what a policy that is told the truth is told."""
    return {job.name: job.curve for job in jobs}


def static_rate(jobs: Sequence[SimJob], n_nodes: float, *, normalised: bool = False) -> float:
    """Samples/s of these jobs placed once and optimally on a fixed number of nodes; linear between whole numbers.
    `normalised`: in first nodes' worth instead, sum of P(n) / P(1).

    Each job may have no node. Exact: f_j(m) = max_k f_{j-1}(m - k) + P_j(k) over all nodes m."""
    m = int(n_nodes) + 1
    best = np.zeros(m + 1)
    for job in jobs:
        table = job.curve.table(m) / (job.curve.at(1) if normalised else 1.0)
        grown = best.copy()
        for k in job.spec.sizes(m):
            np.maximum(grown[k:], best[: m + 1 - k] + table[k], out=grown[k:])
        best = np.maximum.accumulate(grown)
    return float(np.interp(n_nodes, np.arange(m + 1), best))
