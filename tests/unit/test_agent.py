"""One agent with a real controller's fabric, real workers, and every way in which one of them can go away."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from sunfleck.executor.launch import wire
from sunfleck.executor.launch.agent import tail
from sunfleck.executor.launch.wire import WorkerId
from sunfleck.executor.launch.zygote import sweep
from tests.fakes.pool import Pool, alive, real_pool, wait_for, zygote_pids

TALKER = """
import os, socket, sys, time
sys.path[:0] = {path!r}
from sunfleck.executor.launch import wire
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.connect(os.environ["SUNFLECK_AGENT_SOCKET"])
s.send(os.environ["SUNFLECK_WORKER"].encode())
def say(n):
    s.send(wire.encode(wire.Done(step=n)))
"""
TALKER = TALKER.format(path=[entry for entry in sys.path if entry])


@pytest.fixture
def pool() -> Iterator[Pool]:
    with real_pool() as found:
        yield found


def started(pool: Pool, worker: WorkerId) -> wire.WorkerStarted:
    return wait_for(
        lambda: next((m for m in pool.listener.of(wire.WorkerStarted) if m.worker == worker), None), "start"
    )


def steps(pool: Pool) -> list[int]:
    return [payload.step for payload in pool.listener.said()]


def test_hello_says_who_it_is_and_it_is_small(pool: Pool) -> None:
    agent = pool.agent()
    hello = pool.listener.hellos[0]
    assert (hello.node.name, hello.agent_pid, hello.workers) == ("node0", agent.pid, ())
    assert psutil.Process(agent.pid).memory_info().rss < 40e6  # bytes; typically 27e6, 15e6 of them shared files


def test_a_worker_runs_says_and_hears(pool: Pool) -> None:
    pool.agent()
    worker = pool.start_worker(
        TALKER
        + """
say(0)
print("args", sys.argv[1:], os.environ["SUNFLECK_NODE"], os.environ["FROM_PROGRAM"])
for _ in range(3):
    say(wire.decode_to_worker(s.recv(1 << 20)).round + 1)
""",
        args=("x", "y"),
        env={"FROM_PROGRAM": "yes"},
    )
    for n in range(3):  # the first ones are sent before it can have connected
        form = wire.FormRound(round=n, members=(str(worker),))
        pool.send("node0", wire.ToWorker(worker=worker, payload=form))
    found = pool.exit_of(worker)
    assert (found.code, found.last_lines) == (0, "")
    assert steps(pool) == [0, 1, 2, 3]
    assert pool.log(worker) == "args ['x', 'y'] node0 yes\n"
    assert started(pool, worker).warm


def test_what_a_worker_says_last_comes_before_its_exit(pool: Pool) -> None:
    pool.agent()
    worker = pool.start_worker(TALKER + "for n in range(100): say(n)\n")
    assert pool.exit_of(worker).code == 0
    assert steps(pool) == list(range(100))
    assert isinstance(pool.listener.messages[-1][1], wire.WorkerExited)


def test_a_failure_comes_with_its_last_lines(pool: Pool) -> None:
    pool.agent()
    worker = pool.start_worker("print('x' * 100_000)\nraise ValueError('that is why')")
    found = pool.exit_of(worker)
    assert found.code == 1
    assert "ValueError: that is why" in found.last_lines
    assert len(found.last_lines) < 10_000


def test_tail_of_a_missing_log_says_so() -> None:
    assert "cannot be read" in tail("/no/such/log")


def test_a_log_that_cannot_be_written_is_an_exit_with_a_reason(pool: Pool) -> None:
    pool.agent()
    worker = WorkerId(job="job", node="node0", restart=0)
    program = wire.Program(script="x.py", warm=())
    pool.send("node0", wire.StartWorker(worker=worker, program=program, env={}, log_path="/no/such/folder/log"))
    found = pool.exit_of(worker)
    assert found.code == 127
    assert "/no/such/folder/log" in found.last_lines


def test_nonsense_from_a_worker_is_dropped(pool: Pool) -> None:
    pool.agent()
    worker = pool.start_worker(TALKER + "say(1)\ns.send(b'nonsense')\nsay(2)\n")
    pool.exit_of(worker)
    assert steps(pool) == [1, 2]


def test_stop_is_term_and_then_kill(pool: Pool) -> None:
    pool.agent()
    polite = pool.start_worker(
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\nprint(1)\ntime.sleep(1000)"
    )
    stubborn = pool.start_worker(
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint(1)\ntime.sleep(1000)", restart=1
    )
    for worker in (polite, stubborn):
        wait_for(lambda worker=worker: pool.log(worker) == "1\n")
        pool.send("node0", wire.StopWorker(worker=worker, grace_s=0.5))
    assert pool.exit_of(polite).code == 7
    assert pool.exit_of(stubborn).code == -9
    at_once = pool.start_worker("import time; time.sleep(1000)", restart=2)
    pool.send("node0", wire.StopWorker(worker=at_once, grace_s=0))  # perhaps before it even exists
    assert pool.exit_of(at_once).code == -9


def test_leave_ends_everything_and_says_goodbye(pool: Pool) -> None:
    agent = pool.agent()
    workers = [pool.start_worker("import time; print(1); time.sleep(1000)", restart=n) for n in range(3)]
    pids = [started(pool, worker).pid for worker in workers]
    pool.send("node0", wire.LeaveNode(grace_s=1.0))
    wait_for(lambda: pool.listener.lost == [("node0", "goodbye")])
    assert agent.wait(10) == 0
    assert not [pid for pid in pids if alive(pid)]
    assert {message.worker for message in pool.listener.of(wire.WorkerExited)} == set(workers)
    assert not list(pool.run_dir.glob("a-*"))


def test_sigterm_is_a_planned_leave(pool: Pool) -> None:
    agent = pool.agent()
    worker = pool.start_worker("import time; time.sleep(1000)")
    pid = started(pool, worker).pid
    agent.terminate()
    assert pool.exit_of(worker).code == -15
    wait_for(lambda: pool.listener.lost == [("node0", "goodbye")])
    assert agent.wait(10) == 0
    assert not alive(pid)


def test_a_node_is_not_held_for_an_import(pool: Pool) -> None:
    """The zygote is still importing what the worker wants when the node must go."""
    agent = pool.agent()
    (pool.pool_dir / "slow_module.py").write_text("import time; time.sleep(6)")
    env = {"PYTHONPATH": os.pathsep.join([str(pool.pool_dir), *filter(None, sys.path)])}
    worker = pool.start_worker("print('I live')", warm=("slow_module",), env=env)
    wait_for(lambda: zygote_pids(pool.run_dir))
    started_s = time.monotonic()
    pool.send("node0", wire.LeaveNode(grace_s=0.1))
    assert pool.exit_of(worker).code == -9
    assert agent.wait(10) == 0
    assert time.monotonic() - started_s < 4.0
    pool.agent("node1")  # the zygote is alive, and has forgotten that worker
    other = pool.start_worker("print('other')", "node1", warm=("slow_module",), env=env, restart=1)
    assert pool.exit_of(other).code == 0
    assert started(pool, other).warm
    assert pool.log(worker) == ""
    assert len(zygote_pids(pool.run_dir)) == 1


def test_a_directory_that_others_can_read_is_refused(pool: Pool, capfd: pytest.CaptureFixture[str]) -> None:
    pool.run_dir.chmod(0o755)
    assert pool.start_agent().wait(20) == 1
    assert "chmod 700" in capfd.readouterr().err
    pool.run_dir.chmod(0o700)


FAMILY = """
import os, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(1000)"]
a = subprocess.Popen(sleep)
b = subprocess.Popen(sleep, start_new_session=True)
print(os.getpid(), a.pid, b.pid, flush=True)
time.sleep(1000)
"""


def family(pool: Pool, worker: WorkerId) -> list[int]:
    text = wait_for(lambda: pool.log(worker) if pool.log(worker).endswith("\n") else "", "three pids")
    return [int(word) for word in text.split()]


@pytest.mark.parametrize("cold", [False, True], ids=["warm", "cold"])
@pytest.mark.parametrize("victims", ["agent", "zygote", "worker", "agent and zygote"])
def test_kill_9_leaves_no_orphans(pool: Pool, victims: str, cold: bool) -> None:
    agent = pool.agent()
    worker = pool.start_worker(FAMILY, warm=("no_such_module",) if cold else ())
    pids = family(pool, worker)
    assert started(pool, worker).warm is not cold
    doomed = {"agent": [agent.pid], "zygote": zygote_pids(pool.run_dir), "worker": pids[:1]}
    for victim in victims.split(" and "):
        for pid in doomed[victim]:
            os.kill(pid, signal.SIGKILL)
    if victims == "agent and zygote":
        # nobody is left to kill what left its group; the kernel ends the worker, the cluster sweeps the rest
        wait_for(lambda: not alive(pids[0]))
        sweep(f"SUNFLECK_AGENT_SOCKET={pool.run_dir / 'a-node0'}")
    wait_for(lambda: not [pid for pid in pids if alive(pid)], "end of the family")
    if "agent" in victims:
        wait_for(lambda: pool.listener.lost)
    else:
        assert pool.exit_of(worker).code == -9
        again = pool.start_worker("print('again')", restart=1)
        assert pool.exit_of(again).code == 0
        assert pool.log(again) == "again\n"


def test_a_leaving_agent_ends_what_left_its_group(pool: Pool) -> None:
    agent = pool.agent()
    pids = family(pool, pool.start_worker(FAMILY))
    agent.terminate()
    agent.wait(10)
    assert not [pid for pid in pids if alive(pid)]


def test_a_restarted_controller_finds_its_agent_and_hears_what_it_missed(pool: Pool) -> None:
    pool.agent()
    worker = pool.start_worker(
        TALKER
        + """
say(0)
while not os.path.exists("go"):
    time.sleep(0.01)
for n in range(1, 2000):
    say(n)
s.recv(1 << 20)
"""
    )
    wait_for(lambda: steps(pool) == [0])
    pool.fabric.stop(forget=False)
    (pool.pool_dir / "go").touch()
    time.sleep(1.0)  # the worker talks to an agent that has no controller
    pool.start_fabric()
    hello = wait_for(lambda: pool.listener.hellos, "Hello again")[0]
    assert hello.workers == (worker,)
    wait_for(lambda: len(steps(pool)) >= 1999, "everything it said")
    assert steps(pool) == list(range(1, 2000))
    pool.send("node0", wire.ToWorker(worker=worker, payload=wire.SaveNow()))
    assert pool.exit_of(worker).code == 0
    assert len(pool.listener.hellos) == 1


def test_a_controller_on_other_ports_is_found_by_the_endpoint_file(pool: Pool) -> None:
    pool.agent()
    pool.fabric.stop(forget=True)
    pool.start_fabric()
    wait_for(lambda: pool.listener.hellos, "Hello")


def test_a_worker_that_ends_while_the_controller_is_away_is_reported(pool: Pool) -> None:
    pool.agent()
    worker = pool.start_worker("import os, time\nprint(1)\nwhile not os.path.exists('go'): time.sleep(0.01)")
    pid = started(pool, worker).pid
    pool.fabric.stop(forget=False)
    (pool.pool_dir / "go").touch()
    wait_for(lambda: not alive(pid))
    pool.start_fabric()
    assert pool.exit_of(worker).code == 0


def test_patience_ends() -> None:
    with real_pool(patience_s=1.0) as pool:
        agent = pool.agent()
        pids = family(pool, pool.start_worker(FAMILY))
        pool.fabric.stop()
        assert agent.wait(20) == 0
        assert not [pid for pid in pids if alive(pid)]


def test_an_agent_without_keys_says_so(pool: Pool, capfd: pytest.CaptureFixture[str]) -> None:
    (pool.pool_dir / "keys").rename(pool.pool_dir / "hidden")
    assert pool.start_agent().wait(20) == 1
    assert "no usable key" in capfd.readouterr().err


def test_several_nodes_share_one_zygote(pool: Pool) -> None:
    for node in ("node0", "node1", "node2"):
        pool.agent(node)
        worker = pool.start_worker("print('hello')", node)
        assert pool.exit_of(worker).code == 0
    assert len(zygote_pids(pool.run_dir)) == 1


def test_cpus_and_threads_of_the_node(pool: Pool) -> None:
    pool.agent("node0", "--cpus", "0")
    worker = pool.start_worker("import os; print(os.sched_getaffinity(0), os.environ['OMP_NUM_THREADS'])")
    assert pool.exit_of(worker).code == 0
    assert pool.log(worker) == "{0} 1\n"
