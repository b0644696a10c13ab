"""The main job's figures: how much of the offered node time trained, how fast nodes went back, what rescales cost.

One JSON line. Runs `sunfleck demo` and, in the same call, the same queue on the same trace with the policy `rigid`
(jobs of a fixed size, requeued when they lose a node), and gives the medians of both. Nothing else heavy should run.

    python bench/demo.py [--runs 1]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version


def run_once(policy: str) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="sf-") as folder:
        where = ["--home", folder, "--report", f"{folder}/r.html"]
        done = subprocess.run(
            [sys.executable, "-m", "sunfleck", "demo", "--json", "--policy", policy, "--limit-s", "420", *where],
            stdout=subprocess.PIPE,
            check=False,
            text=True,
        )
        result: dict[str, object] = json.loads(done.stdout)
        result["exit_code"] = done.returncode
        return result


def median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 4) if known else None


def figures(runs: list[dict[str, object]]) -> dict[str, object]:
    jobs = [job for run in runs for job in run["jobs"]]
    return {
        "used_of_offered": median([r["node_seconds_used"] / r["node_seconds_offered"] for r in runs]),
        "elapsed_s": median([r["elapsed_s"] for r in runs]),
        "handback_s_p50": median([r["handback_s_p50"] for r in runs]),
        "handback_s_p99": median([r["handback_s_p99"] for r in runs]),
        "stall_s_p50": median([j["stall_s_p50"] for j in jobs]),
        "rescales": sum(j["rescales"] for j in jobs) / len(runs),
        "reclaims": median([r["reclaims"] for r in runs]),
        "all_reached": all(j["reached"] for j in jobs),
        "samples_lost": sum(j["samples_lost"] for j in jobs),
        "samples_repeated": sum(j["samples_repeated"] for j in jobs),
        "exit_codes": [r["exit_code"] for r in runs],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1, help="of each policy")
    args = parser.parse_args()
    ours, rigid = (figures([run_once(policy) for _ in range(args.runs)]) for policy in ("optimum", "rigid"))
    print(
        json.dumps(
            {
                "bench": "demo",
                "cores": len(os.sched_getaffinity(0)),
                "python": platform.python_version(),
                "torch": version("torch"),
                "sunfleck": version("sunfleck"),
                "runs": args.runs,
                "optimum": ours,
                "rigid": rigid,
                "speedup": round(rigid["elapsed_s"] / ours["elapsed_s"], 3),
            }
        )
    )


if __name__ == "__main__":
    main()
