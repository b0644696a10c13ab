"""Where a pool's controller can be reached: one small JSON file in the pool's directory.

It holds no secret (the keys are files of their own). It is replaced as a whole, so a reader sees the old or the new
one, and its server key tells the reader whether the one who answers there is really this pool.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import msgspec
from msgspec import Struct

from sunfleck.core.errors import PoolUnavailable


class Endpoint(Struct, frozen=True, kw_only=True):
    host: str
    agent_port: int
    client_port: int
    server_public: str
    """z85 encoded."""
    pid: int
    """Of the controller."""
    version: str
    started_s: float
    """Unix time."""


def write_endpoint(path: Path, endpoint: Endpoint) -> None:
    """Replace the file at `path`."""
    descriptor, temporary = tempfile.mkstemp(prefix=".endpoint-", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(endpoint)) + b"\n")
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def read_endpoint(path: Path) -> Endpoint:
    """Raises PoolUnavailable when there is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Endpoint)
    except FileNotFoundError:
        raise PoolUnavailable(f"no pool at {path.parent}: start one with `sunfleck up`") from None
    except PermissionError:
        raise PoolUnavailable(f"the pool at {path.parent} belongs to somebody else") from None
    except msgspec.DecodeError as error:
        raise PoolUnavailable(f"{path} is damaged ({error}): run `sunfleck up` again") from None
