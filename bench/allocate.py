"""Planning time of the exact allocator beside HiGHS on the same instances. Prints one JSON line.

    python bench/allocate.py [--repeats 21] [--milp-limit-s 10]

Instances: random Amdahl curves with communication costs, normalised objective, rescale costs, random current sizes.
`ms_median` is the whole solve (reductions, recursion, backtracking) from value tables; `milp` the count-indexed model
in HiGHS, stopped at the limit, with the gap it reports; `equal` compares objectives. `plans` is the whole default
policy from a snapshot, with the published node-indexed model beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from importlib import metadata

import numpy as np

from sunfleck.core.model import JobSpec, JobView, NodeView, ScaleStats, Snapshot
from sunfleck.policy import knapsack
from sunfleck.policy.registry import make

try:
    from sunfleck.policy import milp
except ImportError:
    milp = None  # type: ignore[assignment]


def instance(n_jobs: int, n_nodes: int, max_nodes: int, seed: int) -> list[knapsack.Table]:
    """Tables of jobs with sizes 0..max_nodes, about half of them running now."""
    rng = np.random.default_rng(seed)
    sizes = np.arange(max_nodes + 1)
    safe = np.maximum(sizes, 1)
    tables = []
    share = max(1, 2 * n_nodes // n_jobs)
    for _ in range(n_jobs):
        serial, log = rng.uniform(0.0005, 0.05), rng.uniform(0.0, 0.01)
        speedup = np.where(sizes > 0, 1.0 / (serial + (1 - serial) / safe + log * np.log(safe)), 0.0)
        current = int(rng.integers(0, min(share, max_nodes) + 1)) if rng.random() < 0.5 else 0
        if current:
            cost = speedup[current] * np.where(sizes > current, 0.5, np.where(sizes < current, 0.2, 0.0))
            values = 60.0 * speedup - cost
        else:
            values = 58.0 * speedup
        tables.append(knapsack.Table(sizes, values, current))
    return tables


def snapshot(n_jobs: int, n_nodes: int, seed: int) -> Snapshot:
    """A pool in the middle of its life: most jobs run, five sizes of each are measured, 2 % noise."""
    rng = np.random.default_rng(seed)
    names = [f"n{i:05d}" for i in range(n_nodes)]
    owner: dict[str, str] = {}
    jobs, used = [], 0
    for j in range(n_jobs):
        serial = rng.uniform(0.001, 0.05)
        sizes = sorted({1, 2, 3, 4, int(rng.integers(5, 60))})
        scales = tuple(
            ScaleStats(
                n_nodes=n,
                n_reports=20,
                mean_per_s=100.0 / (serial + (1 - serial) / n) * (1 + 0.02 * float(rng.normal())),
                trained_s=30.0,
            )
            for n in sizes
        )
        held = min(int(rng.integers(0, 2 * n_nodes // n_jobs)), 64, n_nodes - used) if rng.random() < 0.7 else 0
        nodes = tuple(names[used : used + held])
        used += held
        owner.update(dict.fromkeys(nodes, f"j{j}"))
        spec = JobSpec(name=f"j{j}", max_nodes=64)
        jobs.append(JobView(job=f"j{j}", spec=spec, submitted_s=float(j), nodes=nodes, started=True, scales=scales))
    views = tuple(NodeView(name=n, job=owner.get(n), joined_s=5000.0 * i / n_nodes) for i, n in enumerate(names))
    return Snapshot(generation=1, now_s=5000.0, nodes=views, jobs=tuple(jobs))


def whole_plans(repeats: int, milp_limit_s: float) -> dict[str, object]:
    """Milliseconds of a whole plan: tables, recursion, placement, reasons; cold: with every curve fitted anew, which
    happens once, since a curve is fitted again only when its job has reported."""
    rows: dict[str, object] = {}
    for n_jobs, n_nodes, count in ((30, 1024, 10 * repeats), (500, 10000, repeats)):
        policy = make("optimum")
        worlds = [snapshot(n_jobs, n_nodes, seed) for seed in range(count)]
        cold, spent = [], []
        for world in worlds:
            for times in (cold, spent):
                start = time.perf_counter()
                policy.plan(world)
                times.append(1e3 * (time.perf_counter() - start))
        spent.sort()
        row: dict[str, object] = {
            "cold_ms_p50": round(statistics.median(cold), 3),
            "ms_p50": round(spent[len(spent) // 2], 3),
            "ms_p99": round(spent[min(len(spent) - 1, int(0.99 * len(spent)))], 3),
        }
        if n_jobs == 30 and milp_limit_s > 0 and milp is not None:
            start = time.perf_counter()
            plan = make("paper-milp", time_limit_s=milp_limit_s, max_running=None).plan(worlds[0])
            exact = make("optimum", t_fwd_s=120.0, free_start=True, forecast=False, n_scales=0).plan(worlds[0])
            row["paper_milp"] = {
                "ms": round(1e3 * (time.perf_counter() - start), 1),
                "gap": plan.gap,
                "objective_ratio": plan.objective / exact.objective,
            }
        rows[f"{n_jobs}x{n_nodes}"] = row
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--milp-limit-s", type=float, default=10.0)
    args = parser.parse_args()
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    if milp is not None:
        versions["highspy"] = metadata.version("highspy")
    cases: dict[str, object] = {}
    for n_jobs, n_nodes, max_nodes in ((30, 1000, 64), (200, 5000, 64), (200, 5000, 5000), (500, 10000, 64)):
        milliseconds, plain = [], []
        for repeat in range(args.repeats):
            tables = instance(n_jobs, n_nodes, max_nodes, repeat)
            start = time.perf_counter()
            exact = knapsack.solve(tables, n_nodes)
            milliseconds.append(1e3 * (time.perf_counter() - start))
            if max_nodes <= 64 and repeat < 3:
                start = time.perf_counter()
                unreduced = knapsack.solve(tables, n_nodes, reduce=False)
                plain.append(1e3 * (time.perf_counter() - start))
                assert abs(unreduced.objective - exact.objective) <= 1e-9 * abs(exact.objective)
        row: dict[str, object] = {
            "ms_median": round(statistics.median(milliseconds), 3),
            "ms_max": round(max(milliseconds), 3),
        }
        if plain:
            row["ms_median_unreduced"] = round(statistics.median(plain), 3)
        if milp is not None and max_nodes <= 64:
            start = time.perf_counter()
            other = milp.solve(instance(n_jobs, n_nodes, max_nodes, 0), n_nodes, time_limit_s=args.milp_limit_s)
            seconds = time.perf_counter() - start
            mine = knapsack.solve(instance(n_jobs, n_nodes, max_nodes, 0), n_nodes)
            row["milp"] = {
                "ms": round(1e3 * seconds, 1),
                "gap": other.gap,
                "objective_ratio": other.objective / mine.objective,
                "equal": abs(other.objective - mine.objective) <= 1e-6 * abs(mine.objective),
            }
        cases[f"{n_jobs}x{n_nodes}max{max_nodes}"] = row
    plans = whole_plans(args.repeats, args.milp_limit_s)
    machine = {"cores": os.cpu_count(), "load_1min": round(os.getloadavg()[0], 2)}
    print(json.dumps({"bench": "allocate", "cases": cases, "plans": plans, **machine, **versions}))


if __name__ == "__main__":
    sys.exit(main())
