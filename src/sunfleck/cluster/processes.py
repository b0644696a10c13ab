"""Processes that may or may not be our children: started by us, or by a controller before us."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol


class Timer(Protocol):
    def cancel(self) -> None: ...


class Loop(Protocol):
    """The part of a poll loop that is needed here (executor.launch.fabric has it)."""

    def call_later(self, delay_s: float, action: Callable[[], None]) -> Timer: ...
    def watch(self, descriptor: int, action: Callable[[], None]) -> None: ...
    def unwatch(self, descriptor: int) -> None: ...


POLL_S = 0.02
"""How often a process is looked at where the kernel cannot tell us (before Linux 5.3)."""


class Watched:
    """A process whose end is reported once, in the loop's thread."""

    def __init__(self, loop: Loop, pid: int, child: subprocess.Popen[bytes] | None, on_end: Callable[[str], None]):
        self.pid, self._loop, self._child, self._on_end = pid, loop, child, on_end
        self.ended = False
        self._descriptor = -1
        try:
            self._descriptor = os.pidfd_open(pid)
            loop.watch(self._descriptor, self._check)
        except ProcessLookupError:
            loop.call_later(0.0, self._check)
        except (AttributeError, OSError):
            loop.call_later(POLL_S, self._poll)

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.ended:
            return
        try:
            if self._descriptor >= 0:
                signal.pidfd_send_signal(self._descriptor, number)
            else:
                os.kill(self.pid, number)
        except ProcessLookupError:
            pass

    def _poll(self) -> None:
        self._check()
        if not self.ended:
            self._loop.call_later(POLL_S, self._poll)

    def _check(self) -> None:
        if self.ended:
            return
        how = "gone"
        if self._child is not None:
            code = self._child.poll()
            if code is None:
                return
            how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        elif is_alive(self.pid) and self._descriptor < 0:
            return
        self.ended = True
        if self._descriptor >= 0:
            self._loop.unwatch(self._descriptor)
            os.close(self._descriptor)
        self._on_end(how)


def send_signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def is_alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return False


def command_of(pid: int) -> list[str]:
    """Its argument vector; empty when there is no such process."""
    try:
        return [os.fsdecode(word) for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]
    except OSError:
        return []


def pid_from(path: Path, words: Sequence[str]) -> int | None:
    """The living process that wrote its pid to `path`, if its arguments hold all `words`: pids are reused."""
    try:
        pid = int(path.read_text())
    except (OSError, ValueError):
        return None
    command = command_of(pid)
    return pid if is_alive(pid) and all(word in command for word in words) else None
