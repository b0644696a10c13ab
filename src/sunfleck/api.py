"""The Python API: what the command line does, as calls. `sunfleck.connect()` is where to begin.

    import sunfleck
    pool = sunfleck.connect()
    job = pool.submit("train.py", nodes=(1, 8), args=["--lr", "0.1"])
    job.wait()
    print(job.status().metrics)

Every call may raise `sunfleck.SunfleckError`: PoolUnavailable when no controller answers (start one with
`sunfleck up`), InvalidRequest when the request can never work; the message names the fix.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from sunfleck.config import Config, load, private_dir
from sunfleck.core.errors import InvalidRequest, PoolUnavailable, SunfleckError
from sunfleck.core.model import JobSpec, Program, Target
from sunfleck.executor.launch.client import Client
from sunfleck.observers.live import ExplainView, JobRow, StatusView

ENDPOINT = "endpoint.json"
REMEMBERED = "pool.json"
CONTROLLER_LOG = "controller.log"
T = TypeVar("T")


class Job:
    """A job of a pool, by its id."""

    def __init__(self, pool: Pool, job: str) -> None:
        self.pool = pool
        self.id = job

    def __repr__(self) -> str:
        return f"Job({self.id!r} in pool {self.pool.name!r})"

    def status(self) -> JobRow:
        """Its row as of now: phase, nodes, step, samples, samples/s, latest metrics."""
        for row in self.pool.status().jobs:
            if row.job == self.id:
                return row
        raise InvalidRequest(f"pool {self.pool.name!r} has no job {self.id!r}")

    def wait(self, timeout_s: float | None = None, poll_s: float = 0.5) -> JobRow:
        """Block until it has ended, whatever the way. Raises TimeoutError after `timeout_s`. Survives a controller
        that is restarted meanwhile."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            row = self.status()
            if row.phase.final:
                return row
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"job {self.id} is still {row.phase} after {timeout_s:g} s")
            time.sleep(poll_s)

    def cancel(self) -> None:
        """End it; what it has learned stays in its checkpoint."""
        self.pool.call("cancel", job=self.id)

    def explain(self) -> ExplainView:
        """Why it has the nodes it has, or none; its measured curve and costs."""
        return self.pool.explain(self.id)

    def log_files(self) -> list[Path]:
        """Output of its workers so far, one file per node that it ever ran on."""
        return sorted((self.pool.jobs_dir / self.id / "logs").glob("*.log"))


class Pool:
    """A running pool. Get one from `connect()` or `up()`."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.name = config.pool
        self._client = Client(config.pool_dir / ENDPOINT)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop the connection. The pool goes on."""
        self._client.close()

    @property
    def directory(self) -> Path:
        """Journal, checkpoints and logs."""
        return self.config.pool_dir

    @property
    def jobs_dir(self) -> Path:
        return self.config.pool_dir / "jobs"

    @property
    def journal(self) -> Path:
        return self.config.pool_dir / "journal.db"

    def call(self, method: str, timeout_s: float = 10.0, **params: Any) -> Any:
        """One request to the controller; waits up to timeout_s for one that is being restarted."""
        return self._client.call(method, timeout_s, **params)

    def status(self, timeout_s: float = 10.0) -> StatusView:
        return _as(StatusView, self.call("status", timeout_s))

    def jobs(self) -> list[Job]:
        """All jobs it ever had, in order of arrival."""
        return [Job(self, row.job) for row in self.status().jobs]

    def job(self, key: str) -> Job:
        """By id, or by name where only one job has it."""
        return Job(self, self.explain(key).row.job)

    def explain(self, job: str) -> ExplainView:
        return _as(ExplainView, self.call("explain", job=job))

    def submit(
        self,
        script: str | os.PathLike[str],
        *,
        nodes: int | tuple[int, int] | tuple[int, int, int] = (1, 1),
        args: Sequence[str] = (),
        name: str | None = None,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        weight: float = 1.0,
        target: Target | str | None = None,
        priority: int = 0,
        total_samples: float | None = None,
        deadline_s: float | None = None,
        architecture: str = "",
        max_restarts: int = 3,
        warm: Sequence[str] | None = None,
    ) -> Job:
        """Queue a training script.

        nodes: (min, max), (min, max, multiple), or one number for exactly that many. target: what it is to reach, as a
        Target or as text such as "accuracy>=0.97"; shown beside its progress, and in no way a condition to stop.
        priority: jobs of a higher one are served first. deadline_s: seconds from now by which total_samples samples
        should be trained. architecture: jobs of one key share what is learned about their scaling.
        """
        if isinstance(nodes, int):
            nodes = (nodes, nodes)
        if isinstance(target, str):
            target = parse_target(target)
        path = Path(script).absolute()
        if not path.is_file():
            raise InvalidRequest(f"there is no script {script}; give the path of a Python file")
        where = Path(cwd or os.getcwd()).absolute()
        if not where.is_dir():
            raise InvalidRequest(f"there is no folder {where} to run {path.name} in")
        spec = JobSpec(
            name=name or path.stem,
            min_nodes=nodes[0],
            max_nodes=nodes[1],
            multiple=nodes[2] if len(nodes) == 3 else 1,
            weight=weight,
            target=target,
            priority=priority,
            total_samples=total_samples,
            deadline_s=deadline_s,
            architecture=architecture,
            max_restarts=max_restarts,
            program=Program(
                script=str(path),
                args=tuple(str(a) for a in args),
                cwd=str(where),
                env={**_passed_on(), **(env or {})},
                warm=tuple(self.config.warm if warm is None else warm),
            ),
        )
        return self.submit_spec(spec)

    def submit_spec(self, spec: JobSpec) -> Job:
        """Queue a job described in full."""
        answer = self.call("submit", spec=msgspec.to_builtins(spec))
        return Job(self, answer["job"])

    def down(self, timeout_s: float = 40.0) -> None:
        """Save every job, hand back every node, end the pool. Blocks until it is gone."""
        pid = _endpoint_pid(self.config)
        self.call("down")
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if not _alive(pid):
                return
            time.sleep(0.05)
        raise SunfleckError(
            f"pool {self.name!r} (pid {pid}) has not ended within {timeout_s:g} s; "
            f"see {self.config.pool_dir / CONTROLLER_LOG}"
        )


def connect(pool: str | None = None, *, home: str | None = None, timeout_s: float = 5.0) -> Pool:
    """The running pool of that name (default: `default`). Raises PoolUnavailable when there is none."""
    found = Pool(load({"pool": pool, "home": home}))
    try:
        # A pool that is up has an endpoint file; one that is being restarted after a crash still has it.
        there = (found.directory / ENDPOINT).exists()
        found.call("ping", timeout_s if there else 0.0)
    except SunfleckError:
        found.close()
        raise
    return found


def up(flags: Mapping[str, Any] | None = None, *, fresh: bool = False, timeout_s: float = 30.0) -> Pool:
    """Start a pool on this machine in the background and connect to it. `flags`: fields of config.Config.

    A pool that was up before goes on where it was: its journal is replayed, unfinished jobs resume, agents that
    outlived a killed controller are taken over. `fresh=True` moves the old journal aside and begins anew. Returns when
    the pool can start workers at once (the modules of `warm` are imported).
    """
    config = settings(flags, fresh=fresh)
    private_dir(config.pool_dir)
    log = config.pool_dir / CONTROLLER_LOG
    arguments = [sys.executable, "-m", "sunfleck", "up", "--foreground"]
    for name, value in (flags or {}).items():
        if value is not None:
            text = ",".join(value) if isinstance(value, list | tuple) else str(value)
            arguments += [f"--{name.replace('_', '-')}", text]
    if fresh:
        arguments.append("--fresh")
    with log.open("ab") as output:
        start = output.tell()
        process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    pool = Pool(config)
    deadline = time.monotonic() + timeout_s
    while True:
        if process.poll() is not None:
            pool.close()
            raise SunfleckError(_last_words(log, start) or f"the controller ended at once; see {log}")
        try:
            if _endpoint_pid(config) == process.pid and not pool.status(2.0).warming:
                return pool
        except PoolUnavailable:
            pass
        if time.monotonic() >= deadline:
            pool.close()
            raise PoolUnavailable(
                f"the controller (pid {process.pid}) does not answer after {timeout_s:g} s; see {log}"
            )
        time.sleep(0.03)


def settings(flags: Mapping[str, Any] | None, fresh: bool = False) -> Config:
    """Settings for `up`: a pool remembers how it was last started, unless it starts afresh."""
    base = load(flags)
    remembered: dict[str, Any] = {}
    if not fresh:
        try:
            remembered = msgspec.json.decode((base.pool_dir / REMEMBERED).read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            pass
        except (OSError, msgspec.DecodeError) as error:
            raise InvalidRequest(
                f"{base.pool_dir / REMEMBERED} cannot be read ({error}); start with --fresh to begin anew"
            ) from None
        if not isinstance(remembered, dict):
            raise InvalidRequest(f"{base.pool_dir / REMEMBERED} holds no settings; start with --fresh to begin anew")
    remembered.pop("home", None)
    remembered.pop("pool", None)
    return load(flags, remembered)


def parse_target(text: str) -> Target:
    """METRIC>=VALUE or METRIC<=VALUE as a Target. Raises InvalidRequest."""
    match = re.fullmatch(r"\s*([\w.\-/]+)\s*(>=|<=)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*", text)
    if match is None:
        raise InvalidRequest(f"{text!r} is not METRIC>=VALUE or METRIC<=VALUE, for example 'accuracy>=0.97'")
    return Target(metric=match[1], value=float(match[3]), at_least=match[2] == ">=")


def _as(kind: type[T], value: Any) -> T:
    return msgspec.convert(value, kind)


def _passed_on() -> dict[str, str]:
    """The part of the caller's environment that a training script expects to find."""
    keep = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "TMPDIR")
    prefixes = ("CUDA_", "NCCL_", "HF_", "TORCH_", "PYTORCH_", "WANDB_", "MLFLOW_")
    return {k: v for k, v in os.environ.items() if k in keep or k.startswith(prefixes)}


def _endpoint_pid(config: Config) -> int | None:
    try:
        return int(msgspec.json.decode((config.pool_dir / ENDPOINT).read_bytes())["pid"])
    except (OSError, msgspec.DecodeError, KeyError, ValueError):
        return None


def _alive(pid: int | None) -> bool:
    if pid is None:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:  # a zombie child of ours is not alive
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def _last_words(log: Path, start: int) -> str:
    """The error line of a controller that ended while it started."""
    with log.open("rb") as file:
        file.seek(start)
        lines = file.read()[-4000:].decode(errors="replace").strip().splitlines()
    # Others may write to the same log: a second controller that was started at the same moment, say.
    said = [line for line in lines if line.startswith("sunfleck: ")] or lines[-1:]
    return said[-1].removeprefix("sunfleck: ") if said else ""
