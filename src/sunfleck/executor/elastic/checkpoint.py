"""Checkpoints that are either whole or not there: written beside, flushed, then renamed; hashed, and checked on load.

File: magic (8 bytes), SHA-256 of the payload (32 bytes), length of the payload (8 bytes, little endian), payload (what
torch.save writes). The newest valid file wins; a torn or foreign one is skipped, never deleted in favour of nothing.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .state import dumps, loads

_MAGIC = b"SUNFLK01"
_HEAD_BYTES = 48
_NAME = re.compile(r"step-(\d{12})\.ckpt")
KEEP = 2
"""How many checkpoints stay: the newest, and the one before it should the newest turn out unreadable."""


class CheckpointUnreadable(RuntimeError):
    """The file is torn, was altered, or is no checkpoint."""


def save(folder: Path, step: int, value: Any, keep: int = KEEP) -> Path:
    """Write the state of `step` durably; then remove all but the newest `keep`. Raises OSError (disk full ...)."""
    payload = dumps(value)
    head = _MAGIC + hashlib.sha256(payload).digest() + len(payload).to_bytes(8, "little")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:012d}.ckpt"
    beside = folder / f".{path.name}.{os.getpid()}"
    try:
        with open(beside, "wb") as file:
            file.write(head)
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    _sync_folder(folder)
    for old in list_steps(folder)[keep:]:
        (folder / f"step-{old:012d}.ckpt").unlink(missing_ok=True)
    return path


def list_steps(folder: Path) -> list[int]:
    """Steps for which a file exists, newest first."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted((int(m.group(1)) for m in map(_NAME.fullmatch, names) if m), reverse=True)


def newest_step(folder: Path) -> int | None:
    """Step of the newest file that has the right form and length. Its content is only checked when it is loaded."""
    for step in list_steps(folder):
        path = folder / f"step-{step:012d}.ckpt"
        try:
            with open(path, "rb") as file:
                head = file.read(_HEAD_BYTES)
            if head[:8] == _MAGIC and path.stat().st_size == _HEAD_BYTES + int.from_bytes(head[40:48], "little"):
                return step
        except OSError:
            continue
    return None


def read(path: Path) -> Any:
    """The value saved in this file. Raises CheckpointUnreadable."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointUnreadable(f"{path}: {error}") from error
    head, payload = data[:_HEAD_BYTES], memoryview(data)[_HEAD_BYTES:]
    if head[:8] != _MAGIC:
        raise CheckpointUnreadable(f"{path} is not a sunfleck checkpoint")
    if len(payload) != int.from_bytes(head[40:48], "little") or hashlib.sha256(payload).digest() != head[8:40]:
        raise CheckpointUnreadable(f"{path} is torn or was altered: its content does not fit its hash")
    try:
        return loads(bytes(payload))
    except Exception as error:
        raise CheckpointUnreadable(f"{path} cannot be read: {error}") from error


def load_newest(folder: Path, complain: Callable[[str], None]) -> tuple[int, Any] | None:
    """The newest readable checkpoint as (step, value); every one skipped is told to `complain`."""
    for step in list_steps(folder):
        try:
            return step, read(folder / f"step-{step:012d}.ckpt")
        except CheckpointUnreadable as error:
            complain(f"checkpoint skipped: {error}")
    return None


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Writer:
    """Writes snapshots in a thread, one at a time. The thread ends with each write, so that nothing is left to stop."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._thread: threading.Thread | None = None
        self._done: list[tuple[int, Path | None, str]] = []

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, step: int, value: Any) -> None:
        """Begin to write; the value must not change any more. Not while busy."""
        self._thread = threading.Thread(target=self._write, args=(step, value), name="sunfleck-save", daemon=True)
        self._thread.start()

    def finished(self) -> list[tuple[int, Path | None, str]]:
        """Writes that ended since last asked: (step, path, "") or (step, None, why it failed)."""
        done, self._done = self._done, []
        return done

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _write(self, step: int, value: Any) -> None:
        try:
            self._done.append((step, save(self._folder, step, value), ""))
        except Exception as error:
            self._done.append((step, None, str(error)))
