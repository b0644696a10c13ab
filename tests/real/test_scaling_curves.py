"""Fitted curves against measured ones: Pollux (OSDI 2021) on a cloud, the seven networks of Summit, MLPerf.

A size is extrapolated from all smaller ones, up to twice the largest known. The Pollux measurements are single runs on
a shared cloud and scatter by 20 to 40 %; the synchronisation time at each size is therefore the median over all batch
sizes (it hardly depends on them), and the computing time one line over the local batch.
"""

from __future__ import annotations

import csv
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sunfleck.core.model import ScaleStats
from sunfleck.policy.scaling import fit, relative_error

DATA = Path(os.environ.get("SUNFLECK_DATA", Path(__file__).parents[3] / "shared" / "data")) / "scaling"

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not DATA.is_dir(), reason=f"no measured scaling data in {DATA} (set SUNFLECK_DATA)"),
]

Points = dict[int, float]


def pollux() -> Iterator[Points]:
    """Samples/s by number of nodes, at several global batch sizes, with 1, 2 and 4 GPUs per node."""
    for folder in sorted((DATA / "pollux-osdi21").iterdir()):
        seen: dict[tuple[int, int], list[tuple[float, float, float]]] = defaultdict(list)
        for name in ("placements", "scalability"):
            for row in csv.DictReader((folder / f"{name}.csv").open()):
                if name == "placements":
                    place = row["placement"]
                    if len(set(place)) > 1:
                        continue
                    per_node, n = int(place[0]), len(place)
                else:
                    n, replicas = int(row["num_nodes"]), int(row["num_replicas"])
                    if replicas % n:
                        continue
                    per_node = replicas // n
                values = tuple(float(row[key]) for key in ("local_bsz", "step_time", "sync_time"))
                seen[per_node, n].append(values)  # type: ignore[arg-type]
        cells = np.array([(b, step - sync) for rows in seen.values() for b, step, sync in rows])
        weight = 1.0 / cells[:, 1]
        lines = np.stack((np.ones(len(cells)), cells[:, 0]), axis=1) * weight[:, None]
        base, slope = np.linalg.lstsq(lines, np.ones(len(cells)), rcond=None)[0]
        for per_node in (1, 2, 4):
            sync_s = {n: float(np.median([s for _, _, s in rows])) for (g, n), rows in seen.items() if g == per_node}
            low, high = 4 * per_node * cells[:, 0].min(), 2 * per_node * cells[:, 0].max()
            for batch in np.geomspace(low, high, 5):
                yield {
                    n: batch / (base + slope * batch / (per_node * n) + sync)
                    for n, sync in sorted(sync_s.items())
                    if batch / (per_node * n) >= 1.0
                }


def summit() -> Iterator[Points]:
    curves: dict[str, Points] = defaultdict(dict)
    for row in csv.DictReader((DATA / "bftrainer" / "summit_7models_images_per_s.csv").open()):
        if int(row["nodes"]):
            curves[row["model"]][int(row["nodes"])] = float(row["images_per_s"])
    yield from curves.values()


def mlperf() -> Iterator[Points]:
    curves: dict[tuple[str, ...], Points] = defaultdict(dict)
    for row in csv.DictReader((DATA / "mlperf" / "time_to_train_by_nodes.csv").open()):
        if row["median_logged_throughput"] and row["benchmark"] in ("resnet", "maskrcnn", "rnnt", "gpt3"):
            key = tuple(row[k] for k in ("round", "org", "benchmark", "accelerator"))
            curves[key].setdefault(int(row["accelerators"]), float(row["median_logged_throughput"]))
    for points in curves.values():
        smallest = min(points)
        if len(points) >= 3 and all(n % smallest == 0 for n in points):
            yield {n // smallest: v for n, v in points.items()}


def measured(points: Points) -> tuple[ScaleStats, ...]:
    return tuple(
        ScaleStats(n_nodes=n, n_reports=30, mean_per_s=v, m2=29 * (0.03 * v) ** 2, trained_s=60.0)
        for n, v in sorted(points.items())
    )


def errors(curves: Iterator[Points]) -> tuple[np.ndarray, np.ndarray]:
    """Relative errors of the fit, and of a straight line through the largest known size, up to twice that size."""
    ours, linear = [], []
    for points in curves:
        sizes = sorted(points)
        for i in range(2, len(sizes)):
            largest = sizes[i - 1]
            curve = fit(measured({n: points[n] for n in sizes[:i]}))
            for n in sizes[i:]:
                if n <= 2 * largest:
                    ours.append(abs(curve.at(n) / points[n] - 1.0))
                    linear.append(abs(points[largest] * n / largest / points[n] - 1.0))
    return np.array(ours), np.array(linear)


def test_extrapolation_to_twice_the_known_range_pollux() -> None:
    ours, linear = errors(pollux())
    assert len(ours) > 500
    assert ours.mean() < 0.15
    assert np.median(ours) < 0.10
    assert ours.mean() < 0.4 * linear.mean()


def test_extrapolation_to_twice_the_known_range_summit() -> None:
    ours, _ = errors(summit())
    assert ours.mean() < 0.10
    assert np.median(ours) < 0.07


def test_extrapolation_to_twice_the_known_range_mlperf() -> None:
    """Submissions to MLPerf change their batch sizes with the number of nodes: the typical error is what counts."""
    ours, _ = errors(mlperf())
    assert len(ours) >= 15
    assert np.median(ours) < 0.15


def test_measured_scales_with_real_noise_are_right_when_the_profile_ends() -> None:
    """Reports scatter as single Pollux runs do (20 %); the advisor stops at a relative standard error of 5 %."""
    rng = np.random.default_rng(3)
    found, n_reports = [], []
    for points in [*pollux(), *summit()]:
        for n, true in points.items():
            stats = ScaleStats(n_nodes=n)
            while relative_error(stats) > 0.05:
                stats = stats.add(true * max(0.1, rng.normal(1.0, 0.2)), 1.0)
            found.append(abs(fit((stats,)).at(n) / true - 1.0))
            n_reports.append(stats.n_reports)
    assert np.mean(found) < 0.05
    assert np.median(n_reports) < 20
