"""What a worker prints goes to a file on the pool's disk. When that is full, lines are lost; training is not."""

from __future__ import annotations

import errno
import io
import sys
from typing import Any

FULL = (errno.ENOSPC, errno.EDQUOT)


class _Outlet(io.FileIO):
    """A descriptor whose writes on a full disk are dropped, so that neither `print` nor the flush at exit fails."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in FULL:
                raise
            return memoryview(data).nbytes


def outlive_full_disk() -> None:
    """Give this process a stdout and stderr that bear a full disk. Streams that are no plain files stay."""
    streams: Any = sys  # whose original streams are final to a type checker
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper) or stream is not getattr(sys, f"__{name}__"):
            continue
        try:
            stream.flush()
        except OSError as error:
            if error.errno not in FULL:
                continue
        made = io.TextIOWrapper(
            io.BufferedWriter(_Outlet(stream.fileno(), "wb", closefd=False)),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=True,
            write_through=stream.write_through,
        )
        setattr(streams, name, made)
        setattr(streams, f"__{name}__", made)
