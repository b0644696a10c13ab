"""CPU groups: arithmetic and discovery on made-up machines, limits and cleaning up on this one."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sunfleck.cluster import cgroup
from sunfleck.cluster.cgroup import CpuGroups, open_cpu_groups, quota_us, writable_root
from sunfleck.cluster.shares import Shares


@pytest.mark.parametrize(
    ("cpus", "quota", "period"),
    [(0.25, 2500, 10_000), (1.0, 10_000, 10_000), (4, 40_000, 10_000), (0.1, 1000, 10_000), (0.01, 1000, 100_000)],
)
def test_quota(cpus: float, quota: int, period: int) -> None:
    assert quota_us(cpus) == (quota, period)


@pytest.mark.parametrize("cpus", [n / 1000 for n in range(1, 4000, 37)])
def test_every_share_is_within_one_percent_and_what_the_kernel_takes(cpus: float) -> None:
    quota, period = quota_us(cpus)
    assert quota >= 1000
    assert 1000 <= period <= 1_000_000
    assert abs(quota / period - cpus) <= max(0.01 * cpus, 5e-5)


def test_no_share_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        quota_us(0)


def machine(tmp_path: Path, mounts: str, own: str) -> tuple[Path, Path]:
    (tmp_path / "mounts").write_text(mounts.replace("/sys/fs/cgroup", str(tmp_path)))
    (tmp_path / "own").write_text(own)
    return tmp_path / "mounts", tmp_path / "own"


def test_v1_own_group_is_preferred(tmp_path: Path) -> None:
    found = machine(
        tmp_path,
        "cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0\nproc /proc proc rw 0 0\n",
        "4:memory:/m\n1:cpu,cpuacct:/batch/job7\n0::/\n",
    )
    (tmp_path / "cpu,cpuacct/batch/job7").mkdir(parents=True)
    assert writable_root(*found) == (tmp_path / "cpu,cpuacct/batch/job7", 1)
    (tmp_path / "cpu,cpuacct/batch/job7").rmdir()
    assert writable_root(*found) == (tmp_path / "cpu,cpuacct", 1)


def test_v2_needs_the_controller(tmp_path: Path) -> None:
    found = machine(tmp_path, "cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n", "0::/user.slice/session.scope\n")
    parent = tmp_path / "unified/user.slice"
    (parent / "session.scope").mkdir(parents=True)
    for place in (tmp_path / "unified", parent, parent / "session.scope"):
        (place / "cgroup.controllers").write_text("memory pids")
        (place / "cgroup.subtree_control").write_text("memory")
    assert writable_root(*found) is None
    (parent / "cgroup.controllers").write_text("cpu memory pids")
    assert writable_root(*found) == (parent, 2)
    assert (parent / "cgroup.subtree_control").read_text() == "+cpu"


def test_v2_group_files(tmp_path: Path) -> None:
    groups = CpuGroups(tmp_path, 2, "sunfleck-x", -1)
    (tmp_path / "sunfleck-x").mkdir()
    assert groups.create("node0", 0.25) == tmp_path / "sunfleck-x/node0/cgroup.procs"
    assert (tmp_path / "sunfleck-x/node0/cpu.max").read_text() == "2500 10000"
    assert (tmp_path / "sunfleck-x/cgroup.subtree_control").read_text() == "+cpu"


def test_without_groups_nodes_are_bound_and_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sunfleck.cluster.shares.open_cpu_groups", lambda pool, run_dir: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 5})
    shares = Shares("p", tmp_path, 8, 0.25)
    shares.open()
    assert not shares.limited
    assert "no CPU quota" in shares.note
    assert "oversubscribed: 8 nodes of 0.25 CPUs share 3" in shares.note
    assert [shares.cpus_of(n) for n in range(4)] == [[2], [3], [5], [2]]
    assert shares.procs_file("node0") == []
    two = Shares("p", tmp_path, 2, 2)
    assert [two.cpus_of(n) for n in range(2)] == [[2, 3], [2, 5]]
    assert Shares("p", tmp_path, 12, None).node_cpus == 0.25


# -- on this machine ---------------------------------------------------------------------------------------------


@pytest.fixture
def groups(tmp_path: Path) -> Iterator[CpuGroups]:
    found = open_cpu_groups("test", tmp_path)
    if found is None:
        pytest.skip("no writable cgroup with a CPU controller here")
    yield found
    assert found.close()
    assert not found.base.exists()


BURN = """
import sys, time
open(sys.argv[1], "w").write("0")
until = time.monotonic() + 1.0
while time.monotonic() < until:
    pass
print(time.process_time())
"""


def test_a_quarter_is_a_quarter(groups: CpuGroups) -> None:
    procs = groups.create("node0", 0.25)
    burn = [sys.executable, "-c", BURN, str(procs)]
    used_s = float(subprocess.run(burn, capture_output=True, text=True, check=True).stdout)
    assert used_s < 0.45  # of 1 s, start-up included; unlimited it would be 1
    assert groups.remove("node0")
    assert not (groups.base / "node0").exists()


def test_kill_gets_everything_in_the_group(groups: CpuGroups) -> None:
    procs = groups.create("node0", 1.0)
    text = (
        "import os, sys, time\nopen(sys.argv[1], 'w').write('0')\n"
        "for _ in range(3):\n    if os.fork() == 0:\n        os.setsid()\nos.write(1, b'up\\n')\ntime.sleep(1000)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", text, str(procs)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert [child.stdout.readline() for _ in range(8)] == ["up\n"] * 8
    assert len(procs.read_text().split()) == 8
    started = time.monotonic()
    groups.kill("node0", 0.0)
    child.wait()
    assert groups.kill("node0")
    assert time.monotonic() - started < 2.0
    child.stdout.close()


def test_a_restarted_controller_finds_the_same_group(groups: CpuGroups, tmp_path: Path) -> None:
    groups.create("node0", 0.5)
    again = open_cpu_groups("test", tmp_path)
    assert again is not None
    assert again.base == groups.base
    assert again.create("node0", 0.25).exists()
    os.close(again.lock)


def test_groups_of_dead_pools_are_removed_and_of_living_ones_kept(groups: CpuGroups, tmp_path: Path) -> None:
    dead = open_cpu_groups("dead", tmp_path / "dead")
    living = open_cpu_groups("living", tmp_path / "living")
    assert dead is not None
    assert living is not None
    for found in (dead, living):
        found.create("node0", 0.5)
    inherited = os.dup(living.lock)  # as an agent does
    os.close(living.lock)
    os.close(dead.lock)
    assert cgroup.remove_stale(groups.root, keep=groups.base.name) == [dead.base.name]
    assert not dead.base.exists()
    assert living.base.exists()
    os.close(inherited)
    assert cgroup.remove_stale(groups.root, keep=groups.base.name) == [living.base.name]
    assert not living.base.exists()
    with cgroup.lock_path(groups.base.name).open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
