"""Replay of the published trace of Summit's idle nodes with the deployed controller, engine and policies.

    python bench/replay.py                      # the published figures: U of the optimum and of equal share
    python bench/replay.py --full               # all 4,734 nodes and 14.9 days, 30 running, for the time it takes
    python bench/replay.py --beyond             # what policies without a limit on running jobs make of the trace

Prints one JSON line per simulation. Needs the trace (SUNFLECK_DATA, or ../shared/data beside the checkout).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from sunfleck.policy.curves import by_key
from sunfleck.policy.registry import make
from sunfleck.sim.readers import read_trace
from sunfleck.sim.report import figures
from sunfleck.sim.run import run_published
from sunfleck.sim.trace import IdleTrace
from sunfleck.sim.workload import TrueCosts, hpo, nas, true_curves

DATA = Path(os.environ.get("SUNFLECK_DATA") or Path(__file__).parents[2] / "shared" / "data")
START_S = 72_743.0
"""Where the published replay begins: after the first 1,000 rows of the trace."""
PUBLISHED = TrueCosts(start_s=0.0, rescale_up_s=18.0, rescale_down_s=12.0, preempt_s=12.0)
NEVER = TrueCosts(0.0, 0.0, 0.0, 0.0)
OURS = TrueCosts(start_s=2.0, rescale_up_s=0.5, rescale_down_s=0.2, preempt_s=0.5)


def published(
    trace: IdleTrace, jobs: list[Any], name: str, cap: int | None, costs: TrueCosts, **options: Any
) -> dict[str, Any]:
    """One simulation with the published semantics."""
    jobs = [job.with_costs(costs) for job in jobs]
    if cap is not None or name != "rigid":
        options["max_running"] = cap
    measured = options.pop("measured", False)
    if not measured and name not in ("equal-share", "rigid"):
        options["curves"] = by_key(true_curves(jobs))
    outcome = run_published(trace, jobs, make(name, **options), measured=measured)
    row = figures(trace, jobs, outcome, cap).as_dict()
    return {
        **row,
        "max_running": cap,
        "rescale_up_s": costs.rescale_up_s,
        "n_plans": outcome.n_plans,
        "wall_s": round(outcome.wall_s, 2),
        "faults": outcome.faults,
    }


def say(what: str, row: dict[str, Any]) -> None:
    print(json.dumps({"bench": "replay", "what": what, **row}), flush=True)


OPTIMUM: dict[str, Any] = {"t_fwd_s": 120.0, "n_scales": 0, "forecast": False, "free_start": True}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the whole trace, 30 running")
    parser.add_argument("--beyond", action="store_true", help="no limit on running jobs; measured curves; our costs")
    parser.add_argument(
        "--mixed", action="store_true", help="seven networks, 28 running: normalised against raw objective"
    )
    parser.add_argument("--days", type=float, default=7.0)
    args = parser.parse_args()
    folder = DATA / "traces" / "summit-bftrainer"
    if not folder.is_dir():
        print(f"replay: no trace at {folder}; set SUNFLECK_DATA", file=sys.stderr)
        return 0
    began = time.perf_counter()
    whole = read_trace(folder)
    read_s = time.perf_counter() - began
    if args.full:
        row = published(whole, hpo(5000), "optimum", 30, PUBLISHED, **OPTIMUM)
        say("whole trace", {"read_s": round(read_s, 2), "nodes": len(whole.names), **row})
        return 0
    trace = whole.first_nodes(1024).window(START_S, args.days * 86_400)
    if args.beyond:
        own: dict[str, Any] = {"measured": True}
        say("ours, no curves, 10 running", published(trace, hpo(1000), "optimum", 10, OURS, **own))
        say("ours, no curves, 30 running", published(trace, hpo(1000), "optimum", 30, OURS, **own))
        say("oracle, 30 running", published(trace, hpo(1000), "oracle", 30, NEVER))
        say("ours, no curves, no limit", published(trace, hpo(5000), "optimum", None, OURS, **own))
        return 0
    if args.mixed:
        for objective in ("normalised", "raw"):
            row = published(trace, nas(1001), "optimum", 28, PUBLISHED, **OPTIMUM, objective=objective)
            say(f"mixed, 28 running, {objective}", row)
        return 0
    for cap in (10, 30):
        say(f"published costs, {cap} running", published(trace, hpo(1000), "optimum", cap, PUBLISHED, **OPTIMUM))
        say(f"equal share, {cap} running", published(trace, hpo(1000), "equal-share", cap, PUBLISHED))
    tenth = TrueCosts(0.0, 1.8, 1.2, 1.2)
    say("a tenth of the costs, 10 running", published(trace, hpo(1000), "optimum", 10, tenth, **OPTIMUM))
    fiftieth = TrueCosts(0.0, 0.36, 0.24, 0.24)
    say("a fiftieth of the costs, 30 running", published(trace, hpo(1000), "optimum", 30, fiftieth, **OPTIMUM))
    return 0


if __name__ == "__main__":
    sys.exit(main())
