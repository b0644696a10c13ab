"""One frozen Config. Where a value comes from, weakest first: built-in, file, environment, the pool's own memory, flag.

File: `config.toml` in the user's configuration folder (or the file named by SUNFLECK_CONFIG), with the field names
below as keys. Environment: SUNFLECK_ and the upper-case field name. The pool's memory: how it was last started.
"""

from __future__ import annotations

import hashlib
import math
import os
import stat
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import platformdirs
from msgspec import Struct

from sunfleck.core.errors import InvalidRequest


def usable_cpus() -> int:
    """CPUs this process may run on (not those the machine has)."""
    return len(os.sched_getaffinity(0))


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that can be set. Times in seconds."""

    pool: str = "default"
    """Name of the pool; pools of different names never meet."""
    home: str = ""
    """Folder for pools; empty: the user's state folder."""
    nodes: int = 0
    """Virtual nodes of a local pool; 0: one per usable CPU."""
    node_cpus: float = 0.0
    """CPUs of each virtual node; 0: an equal share of the usable ones, at most 1."""
    port: int = 0
    """TCP port that agents connect to; 0: any free one."""
    trace: str = ""
    """Idle trace that decides when nodes join and leave; empty: they stay. `demo`: the one shipped with sunfleck."""
    trace_start_s: float = 0.0
    """Where in the trace to begin, on its own clock; 0: at its beginning."""
    trace_length_s: float = 0.0
    """How much of the trace to use, on its own clock; 0: all the rest."""
    trace_s: float = 0.0
    """Compress what is used to this length; 0: as long as it is."""
    grace_s: float = 5.0
    """Notice that a trace gives before it takes a node."""
    policy: str = "optimum"
    """Who gets which nodes; a name of policy.registry."""
    t_fwd_s: float = 0.0
    """Horizon over which a change of size must pay for itself; 0: forecast anew for every plan."""
    objective: str = "normalised"
    """normalised: throughput relative to one node; raw: samples/s."""
    profile_scales: int = 4
    """Sizes 1..K of a job are measured before its curve is trusted (K of the published advisor)."""
    heartbeat_s: float = 1.0
    """Agents and controller say that they are alive this often."""
    patience_s: float = 120.0
    """How long agents keep training without a controller."""
    leave_grace_s: float = 10.0
    """How long a worker may take to leave when nothing presses."""
    warm: tuple[str, ...] = ("torch",)
    """Modules that workers find imported already."""

    @property
    def n_nodes(self) -> int:
        return self.nodes or usable_cpus()

    @property
    def cpus_per_node(self) -> float:
        return self.node_cpus or min(1.0, usable_cpus() / self.n_nodes)

    @property
    def home_dir(self) -> Path:
        return Path(self.home).expanduser() if self.home else platformdirs.user_state_path("sunfleck")

    @property
    def pool_dir(self) -> Path:
        """Keys, endpoint, journal, checkpoints and logs of the pool; for its user alone."""
        return self.home_dir / "pools" / self.pool

    @property
    def run_dir(self) -> Path:
        """Sockets of the pool on this host. Short, because a Unix socket's path may have only 107 bytes, and the same
        after a restart, because agents and zygotes outlive their controller."""
        key = hashlib.sha256(str(self.pool_dir.absolute()).encode()).hexdigest()[:10]
        base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
        name = f"sunfleck-{os.getuid()}-{key}"
        if len(base) > 60:
            base = "/tmp"
        return Path(base) / name


def _check(config: Config) -> Config:
    def refuse(what: str) -> None:
        raise InvalidRequest(what)

    for field in msgspec.structs.fields(Config):
        value = getattr(config, field.name)
        if isinstance(value, float) and not math.isfinite(value):
            refuse(f"{field.name} must be a finite number, not {value}")

    if not config.pool or "/" in config.pool or config.pool.startswith("."):
        refuse(f"{config.pool!r} cannot name a pool: use letters, digits, '-' and '_'")
    if config.nodes < 0:
        refuse(f"--nodes must be at least 1, not {config.nodes}")
    if config.node_cpus < 0:
        refuse(f"--node-cpus must be above 0, not {config.node_cpus}")
    if not 0 <= config.port <= 65535:
        refuse(f"--port must be between 0 and 65535, not {config.port}")
    if config.t_fwd_s < 0:
        refuse(f"t_fwd_s must not be negative, but is {config.t_fwd_s}")
    for name in ("heartbeat_s", "patience_s", "leave_grace_s"):
        if getattr(config, name) <= 0:
            refuse(f"{name} must be above 0, not {getattr(config, name)}")
    return config


def config_file() -> Path:
    named = os.environ.get("SUNFLECK_CONFIG")
    return Path(named) if named else platformdirs.user_config_path("sunfleck") / "config.toml"


def load(flags: Mapping[str, Any] | None = None, remembered: Mapping[str, Any] | None = None) -> Config:
    """Merge all sources. `flags` with value None are not set. Raises InvalidRequest naming the source and the field."""
    fields = {field.name for field in msgspec.structs.fields(Config)}
    given: dict[str, Any] = {}

    def take(source: str, values: Mapping[str, Any]) -> None:
        unknown = sorted(set(values) - fields)
        if unknown:
            raise InvalidRequest(f"{source}: unknown setting {unknown[0]!r}; known are {', '.join(sorted(fields))}")
        try:
            # Values of the environment are text: strict=False turns "8" into 8.
            msgspec.convert({**given, **values}, Config, strict=False)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"{source}: {error}") from None
        given.update(values)

    path = config_file()
    try:
        take(str(path), tomllib.loads(path.read_text()))
    except FileNotFoundError:
        if os.environ.get("SUNFLECK_CONFIG"):
            raise InvalidRequest(f"SUNFLECK_CONFIG names {path}, which does not exist") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} is not valid TOML: {error}") from None
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}") from None
    environment: dict[str, Any] = {}
    for name in fields:
        value = os.environ.get(f"SUNFLECK_{name.upper()}")
        if value is not None:
            environment[name] = tuple(filter(None, value.split(","))) if name == "warm" else value
    take("environment (SUNFLECK_...)", environment)
    if remembered:
        take(
            "the settings that the pool remembers (--fresh begins without them)",
            {k: v for k, v in remembered.items() if k in fields},
        )
    take("command line", {k: v for k, v in (flags or {}).items() if v is not None})
    return _check(msgspec.convert(given, Config, strict=False))


def private_dir(path: Path) -> Path:
    """Make (or check) a folder that only its owner may enter. Raises InvalidRequest when it is somebody else's."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.lstat()
    except OSError as error:
        raise InvalidRequest(f"cannot make the folder {path}: {error.strerror}; choose another with --home") from None
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        raise InvalidRequest(f"{path} exists and is not a folder of yours; choose another with --home")
    if info.st_mode & 0o077:
        path.chmod(0o700)
    return path
