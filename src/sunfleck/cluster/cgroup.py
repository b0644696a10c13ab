"""CPU shares of virtual nodes: a cgroup with a quota for each, v2 or v1, whichever this machine lets us write.

The period is short (10 ms instead of the kernel's 100), so that a worker at a quarter of a CPU is paused for 7 ms at a
time and not for 75: gradients are exchanged many times a second, and every pause of one node delays all others. The
kernel accepts no quota below 1 ms, hence no share below a tenth of a CPU at that period; smaller shares get a longer
period.

Each pool has a group of its own, named after the pool and its run directory, with one child per node. A lock file,
held by the controller and by every agent (they inherit it), says that the pool is alive; groups whose lock is free
are leftovers of pools that were killed, and the next pool to start removes them.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

PERIOD_US = 10_000
MIN_QUOTA_US = 1_000
PREFIX = "sunfleck-"


def quota_us(cpus: float, period_us: int = PERIOD_US) -> tuple[int, int]:
    """(quota, period) in microseconds for a share of `cpus` CPUs."""
    if cpus <= 0:
        raise ValueError(f"a node needs a share of a CPU above 0, not {cpus}")
    if cpus * period_us < MIN_QUOTA_US:
        period_us = min(1_000_000, -int(-MIN_QUOTA_US // cpus))
    return max(MIN_QUOTA_US, round(cpus * period_us)), period_us


class CpuGroups:
    """The groups of one pool. Made by `open_cpu_groups`."""

    def __init__(self, root: Path, version: int, name: str, lock: int) -> None:
        self.root, self.version, self.base, self.lock = root, version, root / name, lock

    def create(self, node: str, cpus: float) -> Path:
        """The node's group (made, or found from before), limited to `cpus`; returns the file that workers write
        their pid to. Raises OSError."""
        group = self.base / node
        self._make(self.base)
        group.mkdir(exist_ok=True)
        quota, period = quota_us(cpus)
        if self.version == 2:
            (group / "cpu.max").write_text(f"{quota} {period}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(period))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        return group / "cgroup.procs"

    def _make(self, group: Path) -> None:
        group.mkdir(exist_ok=True)
        if self.version == 2:
            (group / "cgroup.subtree_control").write_text("+cpu")

    def kill(self, node: str, timeout_s: float = 2.0) -> bool:
        """Kill every process of the node's group; True when none is left."""
        return kill_group(self.base / node, timeout_s)

    def remove(self, node: str, timeout_s: float = 2.0) -> bool:
        """Kill what is left in the node's group and remove it."""
        return remove_group(self.base / node, timeout_s)

    def close(self, timeout_s: float = 2.0) -> bool:
        """Remove every group of this pool and let go of its lock."""
        done = remove_tree(self.base, timeout_s)
        if self.lock >= 0:
            lock_path(self.base.name).unlink(missing_ok=True)
            os.close(self.lock)
            self.lock = -1
        return done


# -- finding a place ---------------------------------------------------------------------------------------------


def open_cpu_groups(pool: str, run_dir: Path) -> CpuGroups | None:
    """Where this process may make CPU groups, or None when there is no such place. Also cleans up after dead pools."""
    found = writable_root()
    if found is None:
        return None
    root, version = found
    name = group_name(pool, run_dir)
    try:
        lock = _take(lock_path(name), shared=True)
    except OSError:
        return None
    groups = CpuGroups(root, version, name, lock)
    try:
        groups.create("probe", 1.0)
        remove_group(groups.base / "probe", 0.5)
    except OSError:
        groups.close()
        return None
    remove_stale(root, keep=name)
    return groups


def group_name(pool: str, run_dir: Path) -> str:
    """Unique to the pool's run directory, and the same again for a restarted controller."""
    plain = "".join(c if c.isalnum() or c in "-_" else "_" for c in pool)[:40]
    return f"{PREFIX}{plain}-{hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()[:10]}"


def writable_root(
    mounts: Path = Path("/proc/self/mounts"), own: Path = Path("/proc/self/cgroup")
) -> tuple[Path, int] | None:
    """(directory, cgroup version) in which groups with a CPU quota can be made."""
    own_v1, own_v2 = _own_groups(own.read_text())
    candidates: list[tuple[Path, int]] = []
    for line in mounts.read_text().splitlines():
        _, where, kind, options = line.split()[:4]
        at = Path(where.replace("\\040", " "))
        if kind == "cgroup2":
            # a group that holds processes cannot have children with controllers, so our own group is no place for
            # ours; the top is, for root, and below it whatever has been delegated to us
            candidates += [(place, 2) for place in (at, (at / own_v2.lstrip("/")).parent, at / own_v2.lstrip("/"))]
        elif kind == "cgroup" and "cpu" in options.split(","):
            candidates += [(at / own_v1.lstrip("/"), 1), (at, 1)]
    for place, version in candidates:
        if version == 2:
            try:
                enabled = "cpu" in (place / "cgroup.subtree_control").read_text().split()
                available = "cpu" in (place / "cgroup.controllers").read_text().split()
            except OSError:
                continue
            if not enabled and (not available or not _enable_cpu(place)):
                continue
        if os.access(place, os.W_OK | os.X_OK):
            return place, version
    return None


def _enable_cpu(place: Path) -> bool:
    try:
        (place / "cgroup.subtree_control").write_text("+cpu")
    except OSError:
        return False
    return True


def _own_groups(text: str) -> tuple[str, str]:
    """Paths of our own group in the v1 cpu hierarchy and in v2."""
    v1 = v2 = "/"
    for line in text.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            v2 = path
        elif "cpu" in controllers.split(","):
            v1 = path
    return v1, v2


# -- removing ----------------------------------------------------------------------------------------------------


def _until(done: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.002)
    return True


def kill_group(group: Path, timeout_s: float) -> bool:
    """Kill until no process is left: one may fork while we look, and a dying one takes a moment."""

    def none_left() -> bool:
        try:
            pids = [int(pid) for pid in (group / "cgroup.procs").read_text().split()]
        except OSError:
            return True
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        return not pids

    return _until(none_left, timeout_s)


def remove_group(group: Path, timeout_s: float) -> bool:
    def gone() -> bool:
        try:
            group.rmdir()
        except FileNotFoundError:
            return True
        except OSError:  # EBUSY: zombies count until they are waited for
            kill_group(group, 0.0)
            return False
        return True

    return _until(gone, timeout_s)


def remove_tree(base: Path, timeout_s: float) -> bool:
    children = [child for child in base.iterdir() if child.is_dir()] if base.is_dir() else []
    done = [remove_tree(child, timeout_s) for child in children]
    return all(done) and remove_group(base, timeout_s)


# -- who is alive ------------------------------------------------------------------------------------------------


def lock_path(name: str) -> Path:
    """The lock file of the pool with this group, in a private directory of this user."""
    directory = Path(tempfile.gettempdir()) / f"sunfleck-locks-{os.geteuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    if directory.lstat().st_uid != os.geteuid():
        raise PermissionError(f"{directory} belongs to somebody else")
    return directory / name


def _take(path: Path, *, shared: bool) -> int:
    """A descriptor that holds the lock, or -1 when it is held against us."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return -1
    return descriptor


def remove_stale(root: Path, keep: str) -> list[str]:
    """Remove the groups of pools whose lock nobody holds any more; returns their names. A group without a lock file
    is not ours to judge (another TMPDIR), and stays."""
    removed = []
    for group in root.glob(PREFIX + "*"):
        path = lock_path(group.name)
        if group.name == keep or not path.exists():
            continue
        lock = _take(path, shared=False)
        if lock >= 0:
            if remove_tree(group, 1.0):
                path.unlink(missing_ok=True)
                removed.append(group.name)
            os.close(lock)
    return removed
