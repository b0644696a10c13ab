"""Planning time of the exact allocator beside HiGHS on the same instances. Prints one JSON line.

    python bench/allocate.py [--repeats 21] [--milp-limit-s 10]

Instances: random Amdahl curves with communication costs, normalised objective, rescale costs, random current sizes.
`ms_median` is the whole solve (reductions, recursion, backtracking) from value tables; `milp` the count-indexed model
in HiGHS, stopped at the limit, with the gap it reports. `equal` compares objectives when HiGHS proved its optimum.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time

import numpy as np

from sunfleck.policy import knapsack


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--milp-limit-s", type=float, default=10.0)
    args = parser.parse_args()
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    try:
        import highspy

        from sunfleck.policy import milp

        quiet = highspy.Highs()
        quiet.setOptionValue("output_flag", False)
        versions["highs"] = quiet.version()
    except ImportError:
        milp = None  # type: ignore[assignment]
    cases = {}
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
    print(json.dumps({"bench": "allocate", "cases": cases, "cores": os.cpu_count(), **versions}))


if __name__ == "__main__":
    sys.exit(main())
