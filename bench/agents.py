"""How fast a node comes, starts work, and is handed back. Prints one JSON line; all figures in milliseconds.

    python bench/agents.py [--n 5]

agent_hello_ms: from starting an agent's process to its Hello at the controller. first_line_warm_ms and
first_line_cold_ms: from sending StartWorker to the first line of user code having imported torch, forked from a zygote
and in a new interpreter. handback_idle_ms and handback_busy_ms: from the reclaim (NodesReclaimed) of a node to
NodesReleased, with a controller that releases it at once; busy: its worker, and two children of that, ignore TERM
and spin, so that all of them have to be killed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.fakes.pool import Pool, end_zygotes, real_pool, wait_for

from sunfleck.cluster.local import LocalCluster, Offer
from sunfleck.core.events import NodesJoined, NodesReclaimed, NodesReleased

TORCH = "import time, torch; print(repr(time.time()), flush=True)"
BUSY = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
text = "import signal; signal.signal(15, signal.SIG_IGN)\\nwhile True: pass"
subprocess.Popen([sys.executable, "-c", text])
subprocess.Popen([sys.executable, "-c", text], start_new_session=True)
print("up", flush=True)
while True:
    pass
"""


def agent_hello_ms(pool: Pool) -> float:
    n, started = len(pool.listener.hellos), time.perf_counter()
    agent = pool.start_agent(f"node{n}")
    wait_for(lambda: len(pool.listener.hellos) > n)
    took = time.perf_counter() - started
    agent.terminate()
    agent.wait()
    return 1000 * took


def first_line_ms(pool: Pool, restart: int, warm: tuple[str, ...]) -> float:
    started = time.time()
    worker = pool.start_worker(TORCH, "worker-node", restart=restart, warm=warm)
    assert pool.exit_of(worker).code == 0
    return 1000 * (float(pool.log(worker)) - started)


def handback_ms(n: int, busy: bool) -> list[float]:
    """One node that comes and goes n times."""
    with real_pool() as pool:
        events: list[Any] = []
        up_s, pause_s = 4.0, 1.0
        offers = [
            Offer(start_s=i * (up_s + pause_s), end_s=i * (up_s + pause_s) + up_s, node=0, grace_s=5.0)
            for i in range(n)
        ]

        def emit(event: Any) -> None:
            events.append(event)
            if isinstance(event, NodesReclaimed):
                cluster.release(event.nodes)

        cluster = LocalCluster(
            emit,
            pool.fabric,
            run_dir=pool.run_dir,
            endpoint_path=pool.endpoint_path,
            n_nodes=1,
            node_cpus=0.25,
            offers=offers,
            warm=(),
        )
        cluster.start()
        for i in range(n):
            wait_for(lambda i=i: sum(isinstance(e, NodesJoined) for e in events) > i)
            if busy:
                worker = pool.start_worker(BUSY, restart=i)
                wait_for(lambda worker=worker: "up" in pool.log(worker))
            wait_for(lambda i=i: sum(isinstance(e, NodesReleased) for e in events) > i)
        cluster.stop()
        return [1000 * (e.handback_s or 0.0) for e in events if isinstance(e, NodesReleased)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=5, help="repetitions; medians are reported")
    n = parser.parse_args().n
    with real_pool() as pool:
        found = {"agent_hello_ms": [agent_hello_ms(pool) for _ in range(n)]}
        pool.agent("worker-node")
        first_line_ms(pool, 0, ("torch",))  # starts the zygote
        found["first_line_warm_ms"] = [first_line_ms(pool, 1 + i, ("torch",)) for i in range(n)]
        found["first_line_cold_ms"] = [first_line_ms(pool, 100 + i, ("not_a_module",)) for i in range(n)]
        end_zygotes(pool.run_dir)
    found["handback_idle_ms"] = handback_ms(n, busy=False)
    found["handback_busy_ms"] = handback_ms(n, busy=True)
    figures: dict[str, Any] = {name: round(statistics.median(values), 1) for name, values in found.items()}
    figures |= {name.replace("_ms", "_max_ms"): round(max(values), 1) for name, values in found.items()}
    print(json.dumps({**figures, "n": n, "cpus": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
