"""Text files of any age: plain or gzip, any encoding, and an account of the lines that made no sense."""

from __future__ import annotations

import gzip
from dataclasses import dataclass, field
from pathlib import Path

from sunfleck.core.errors import InvalidRequest

_GZIP_MAGIC = b"\x1f\x8b"


def read_text(path: Path) -> str:
    """The whole file as text. Compression is told from the content, not the name; bytes that are not UTF-8 are
    kept as replacement characters. Raises InvalidRequest when the file cannot be read."""
    try:
        data = path.read_bytes()
        if data.startswith(_GZIP_MAGIC):
            data = gzip.decompress(data)
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidRequest(f"cannot read {path}: {reason}") from error
    return data.decode("utf-8", errors="replace")


@dataclass
class Rejects:
    """Counts lines that could not be used and keeps the first few, with the reason, to show them."""

    what: str
    n: int = 0
    shown: list[str] = field(default_factory=list)

    def add(self, number: int, line: str, reason: str) -> None:
        self.n += 1
        if len(self.shown) < 3:
            self.shown.append(f"line {number} ({reason}): {line.strip()[:60]!r}")

    def notes(self) -> list[str]:
        if not self.n:
            return []
        return [f"{self.n} {self.what} could not be used and were left out, such as " + "; ".join(self.shown)]
