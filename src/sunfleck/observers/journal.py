"""The journal: every event of a pool, once and in order, in one SQLite file. See docs/journal.md.

`Journal` is the controller's side: one writer, held by a lock. `JournalReader` is everybody else's: it may read while
the controller writes. Both are to be used by one thread at a time.

What makes it safe: write-ahead logging with synchronous=NORMAL, so that a committed turn survives the death of the
process (kill -9); after a power cut the last turns may be missing, but the file stays sound. A disk that fills up
in the middle of a run costs nothing but memory: see `commit`.
"""

from __future__ import annotations

import contextlib
import math
import os
import sqlite3
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec

from sunfleck.core.errors import JournalUnavailable
from sunfleck.core.events import AnyEvent, Progress, TimeReached

from .journal_file import (
    SCHEMA,
    JournalUnusable,
    Lock,
    Meta,
    close_file,
    connect,
    create,
    explain,
    explain_os,
    identity,
    read_meta,
    rewrite,
    touch_private,
)

DEFAULT_BUFFER_BYTES = 64 * 1024 * 1024
"""What may wait in memory while the disk refuses. A busy pool writes about 1 MB a minute."""

_CHUNK_ROWS = 2000
_PAGE_ROWS = 1000
_INSERT = "INSERT INTO events (seq, time_s, kind, job, nodes, body) VALUES (?,?,?,?,?,?) ON CONFLICT (seq) DO NOTHING"
_THINNABLE = frozenset({Progress.__name__, TimeReached.__name__})

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent, strict=False)


class Entry(NamedTuple):
    """One event with its place and time."""

    seq: int
    time_s: float
    event: AnyEvent


Row: TypeAlias = tuple[int, float, str, str | None, str | None, str]


def encode_body(event: AnyEvent) -> str:
    """JSON text of an event. JSON has no NaN or infinity (a diverged loss), so those are stored as strings."""
    body = _encoder.encode(event)
    if b"null" in body:  # how msgspec writes them, and None as well: look closer
        body = _encoder.encode(_spell_out(msgspec.to_builtins(event)))
    return body.decode()


def decode_body(body: str) -> AnyEvent:
    """Inverse of encode_body. Raises msgspec.DecodeError (or ValidationError)."""
    return _decoder.decode(body)


def _spell_out(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _spell_out(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spell_out(item) for item in value]
    return value


def _row(seq: int, time_s: float, event: AnyEvent) -> Row:
    named = getattr(event, "nodes", None)
    nodes = None if named is None else " ".join(n if isinstance(n, str) else n.name for n in named)
    return seq, time_s, type(event).__name__, getattr(event, "job", None), nodes, encode_body(event)


def _size(row: Row) -> int:
    return len(row[5]) + 200  # 200: the row's other columns and its objects


class Journal:
    """The writer. `append` the events of one engine turn, then `commit` them as one transaction."""

    def __init__(self, path: Path, db: sqlite3.Connection, lock: Lock, meta: Meta, buffer_bytes: int) -> None:
        self.path = path
        self.meta = meta
        self.fault: str | None = None
        """What keeps events from being written now, and what to do about it; None when all is well."""
        self.n_dropped = 0
        """Events given up because the memory buffer was full too; their seq is missing from the file."""
        self._db = db
        self._identity = identity(path)
        self._lock = lock
        self._buffer_bytes = buffer_bytes
        self._pending: deque[Row] = deque()
        self._pending_bytes = 0
        (last,) = db.execute("SELECT coalesce(max(seq), 0) FROM events").fetchone()
        self._last_seq = int(last)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        pool: str,
        now_s: float,
        version: str = "",
        buffer_bytes: int = DEFAULT_BUFFER_BYTES,
    ) -> Journal:
        """Open the journal of `pool`, or make it (and its folder). Raises JournalUnusable with the fix in words."""
        file = Path(path).absolute()
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            lock = Lock.take(file)
        except OSError as error:
            raise JournalUnusable(explain_os(error, file)) from error
        db: sqlite3.Connection | None = None
        try:
            touch_private(file)
            db = connect(file, read_only=False)
            meta = read_meta(db, file)
            if meta is None:
                meta = Meta(schema=SCHEMA, pool=pool, created_s=now_s, version=version)
                create(db, meta)
            if meta.pool != pool:
                raise JournalUnusable(
                    f"{file} is the journal of pool {meta.pool!r}, not of {pool!r}; use that name or another file"
                )
            return cls(file, db, lock, meta, buffer_bytes)
        except (sqlite3.Error, OSError) as error:
            close_file(db, lock)
            said = explain_os(error, file) if isinstance(error, OSError) else explain(error, file)
            raise JournalUnusable(said) from error
        except BaseException:
            close_file(db, lock)
            raise

    @property
    def last_seq(self) -> int:
        """Of the newest event appended, written or not; 0 for an empty journal."""
        return self._last_seq

    @property
    def n_pending(self) -> int:
        """Events appended and not yet written."""
        return len(self._pending)

    def append(self, time_s: float, event: AnyEvent) -> int:
        """Take an event into the current turn and return its seq. Touches no disk and never fails for want of it."""
        self._last_seq += 1
        row = _row(self._last_seq, time_s, event)
        self._pending.append(row)
        self._pending_bytes += _size(row)
        if self._pending_bytes > self._buffer_bytes:
            self._thin()
        return self._last_seq

    def commit(self) -> None:
        """Write everything appended so far, oldest first, and return when it is in the file.

        Raises JournalUnavailable when it cannot; `fault` then says why. Nothing is lost: what was not written stays
        in memory and is tried again by the next commit, so call it every turn, faulty or not. A long backlog is
        written in chunks, so that a turn of a full disk costs one failed insert and not thousands.
        """
        if self._pending:
            self._stay_in_place()
        while self._pending:
            chunk = [self._pending[i] for i in range(min(_CHUNK_ROWS, len(self._pending)))]
            try:
                self._write(chunk)
            except sqlite3.Error as error:
                raise self._unavailable(explain(error, self.path)) from error
            for row in chunk:
                self._pending.popleft()
                self._pending_bytes -= _size(row)
        self.fault = None

    def on_event(self, time_s: float, event: AnyEvent) -> None:
        """As an observer of the engine: append."""
        self.append(time_s, event)

    def on_turn_end(self) -> None:
        """As an observer of the engine: commit. A failure is left in `fault` and tried again next turn: that the
        record waits is no reason to stop training."""
        with contextlib.suppress(JournalUnavailable):
            self.commit()

    def iterate(self, from_seq: int = 1) -> Iterator[Entry]:
        """Written events with seq >= from_seq, in order. Raises JournalUnusable at the first damaged one."""
        return _iterate(self._db, self.path, from_seq)

    def close(self) -> None:
        """Write what is pending, close the file and give up the lock. Raises JournalUnavailable if events are lost."""
        if self._lock.released:
            return
        try:
            self.commit()
        finally:
            close_file(self._db, self._lock)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, chunk: list[Row]) -> None:
        """One transaction. At the first sign of a full disk, the write-ahead log is emptied into the tables and
        begun anew: that often makes room without any more disk."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany(_INSERT, chunk)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            if self._db.in_transaction:  # a full disk has often rolled back by itself
                with contextlib.suppress(sqlite3.Error):  # the next BEGIN would say so
                    self._db.execute("ROLLBACK")
            if self.fault is not None or error.sqlite_errorname != "SQLITE_FULL":
                raise
            self.fault = str(error)
            self._db.execute("PRAGMA wal_checkpoint(PASSIVE)")
            self._write(chunk)

    def _stay_in_place(self) -> None:
        """Notice a file that was deleted or replaced: SQLite would not, and what it writes then is lost."""
        found = identity(self.path)
        if found == self._identity:
            return
        if found is not None:
            raise self._unavailable(f"{self.path} was replaced by another file: put the pool's own file back")
        try:
            self._db = rewrite(self._db, self.path)
        except (sqlite3.Error, OSError) as error:
            raise self._unavailable(f"{self.path} is gone and cannot be written anew ({error}): make room") from error
        self._identity = identity(self.path)

    def _unavailable(self, what: str) -> JournalUnavailable:
        dropped = f", {self.n_dropped} were dropped" if self.n_dropped else ""
        self.fault = f"{what} ({len(self._pending)} events wait in memory{dropped})"
        return JournalUnavailable(self.fault)

    def _thin(self) -> None:
        """Make room: first of measurements (nothing is folded wrongly without them), then of the oldest events.
        Down to half, so that a full buffer is not searched again at every append."""
        kept: deque[Row] = deque()
        excess = self._pending_bytes - self._buffer_bytes // 2
        for thin_all in (False, True):
            kept = deque()
            for row in self._pending:
                if excess > 0 and (thin_all or row[2] in _THINNABLE):
                    excess -= _size(row)
                    self._pending_bytes -= _size(row)
                    self.n_dropped += 1
                else:
                    kept.append(row)
            self._pending = kept
            if self._pending_bytes <= self._buffer_bytes:
                return


class JournalReader:
    """Reads a journal, also while a controller writes it. Sees whole turns only."""

    def __init__(self, path: Path, db: sqlite3.Connection, meta: Meta) -> None:
        self.path = path
        self.meta = meta
        self._db = db

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> JournalReader:
        """Raises JournalUnusable when there is no readable journal there."""
        file = Path(path).absolute()
        if not file.exists():
            raise JournalUnusable(f"there is no journal at {file}; check the path, or start a pool first")
        db: sqlite3.Connection | None = None
        try:
            db = connect(file, read_only=True)
            meta = read_meta(db, file)
            if meta is None:
                raise JournalUnusable(f"{file} is empty: no pool has written to it; check the path")
            return cls(file, db, meta)
        except sqlite3.Error as error:
            close_file(db, None)
            raise JournalUnusable(explain(error, file)) from error
        except BaseException:
            close_file(db, None)
            raise

    def iterate(self, from_seq: int = 1) -> Iterator[Entry]:
        """Events with seq >= from_seq, in order, including those written while iterating. To follow a journal, call
        it again from the last seq + 1. Raises JournalUnusable at the first damaged event."""
        return _iterate(self._db, self.path, from_seq)

    def close(self) -> None:
        close_file(self._db, None)

    def __enter__(self) -> JournalReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _iterate(db: sqlite3.Connection, file: Path, from_seq: int) -> Iterator[Entry]:
    # Page by page: a read transaction held open for long would keep the write-ahead log from being recycled.
    while True:
        try:
            rows = db.execute(
                "SELECT seq, time_s, body FROM events WHERE seq >= ? ORDER BY seq LIMIT ?", (from_seq, _PAGE_ROWS)
            ).fetchall()
        except sqlite3.Error as error:
            raise JournalUnusable(explain(error, file)) from error
        for seq, time_s, body in rows:
            try:
                event = decode_body(body)
            except (msgspec.DecodeError, TypeError, ValueError) as error:
                raise JournalUnusable(
                    f"event {seq} of {file} cannot be read ({error}); if a newer sunfleck wrote it, upgrade with"
                    " `pip install -U sunfleck`; otherwise move the file away and start anew"
                ) from error
            yield Entry(seq, time_s, event)
        if len(rows) < _PAGE_ROWS:
            return
        from_seq = int(rows[-1][0]) + 1
