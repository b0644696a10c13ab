"""The journal's file: its lock, its tables, how it is opened, and its errors in words a user can act on."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
from pathlib import Path
from urllib.parse import quote

import msgspec

from sunfleck.core.errors import SunfleckError

SCHEMA = 1
"""Raised by one with every change of tables or events that an older sunfleck would misread."""

APPLICATION_ID = 0x53464C4B
"""`SFLK`, in the file's header: tells our files from other SQLite files."""

_BUSY_S = 0.25
"""How long to wait for a foreign writer: an engine turn must not wait longer."""

_TABLES = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE events (seq INTEGER PRIMARY KEY, time_s REAL NOT NULL, kind TEXT NOT NULL, job TEXT, nodes TEXT,"
    " body TEXT NOT NULL)",
    "CREATE INDEX events_job ON events (job, seq) WHERE job IS NOT NULL",
)


class JournalUnusable(SunfleckError):
    """This file cannot be opened or read as a journal (permanent until somebody acts on the message)."""


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """Whose journal it is. `created_s`: on the engine's clock; `version`: the sunfleck that made the file."""

    schema: int
    pool: str
    created_s: float
    version: str


class Lock:
    """Keeps a second controller from the same file.

    A POSIX record lock: it ends with the process however that dies, works on NFS, and is not inherited by forked
    children, so an agent that outlives its controller does not keep it. It says nothing within one process; the
    set does.
    """

    _mine: set[Path] = set()  # noqa: RUF012 - one per process on purpose
    _guard = threading.Lock()

    def __init__(self, file: Path, fd: int) -> None:
        self._file = file
        self._fd = fd
        self.released = False

    @classmethod
    def take(cls, file: Path) -> Lock:
        lock_file = file.with_name(file.name + ".lock")
        with cls._guard:
            if file in cls._mine:
                raise JournalUnusable(f"{file} is already open in this process; close it first")
            fd = os.open(lock_file, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
                os.close(fd)
                who = f" by process {holder}" if holder.isdigit() else ""
                raise JournalUnusable(
                    f"{file} is in use{who}: a pool is running on it; stop it with `sunfleck down`, or use another"
                    " pool name"
                ) from error
            try:
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            except OSError:
                pass  # the number only serves the message above; a full disk must not matter here
            cls._mine.add(file)
            return cls(file, fd)

    def release(self) -> None:
        with self._guard:
            if not self.released:
                self.released = True
                self._mine.discard(self._file)
                os.close(self._fd)


def close_file(db: sqlite3.Connection | None, lock: Lock | None) -> None:
    if db is not None:
        db.close()
    if lock is not None:
        lock.release()


def connect(file: Path, *, read_only: bool) -> sqlite3.Connection:
    """Connection in autocommit mode: transactions are begun and ended in plain sight."""
    uri = f"file:{quote(str(file))}?mode={'ro' if read_only else 'rwc'}"
    db = sqlite3.connect(uri, uri=True, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
    if not read_only:
        db.execute("PRAGMA synchronous=NORMAL")
        return db
    try:
        db.execute("SELECT 1 FROM sqlite_master").fetchone()
    except sqlite3.OperationalError:
        # A closed journal on a read-only medium: SQLite cannot make its shared memory there, and need not.
        if os.access(file.parent, os.W_OK) or file.with_name(file.name + "-wal").exists():
            raise
        db.close()
        db = sqlite3.connect(uri + "&immutable=1", uri=True, isolation_level=None, check_same_thread=False)
    return db


def create(db: sqlite3.Connection, meta: Meta) -> None:
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("BEGIN IMMEDIATE")
    for statement in _TABLES:
        db.execute(statement)
    values = {"schema": str(meta.schema), "pool": meta.pool, "created_s": repr(meta.created_s), "version": meta.version}
    db.executemany("INSERT INTO meta VALUES (?,?)", values.items())
    db.execute(f"PRAGMA application_id={APPLICATION_ID}")
    db.execute(f"PRAGMA user_version={SCHEMA}")
    db.execute("COMMIT")


def read_meta(db: sqlite3.Connection, file: Path) -> Meta | None:
    """None for a file without tables. Refuses what is not ours and what is newer than we are."""
    (n_tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    (application,) = db.execute("PRAGMA application_id").fetchone()
    if n_tables == 0:
        return None
    if application != APPLICATION_ID:
        raise JournalUnusable(f"{file} is a database of another program, not a journal; choose another file")
    values = dict(db.execute("SELECT key, value FROM meta").fetchall())
    schema = int(values["schema"])
    if schema > SCHEMA:
        raise JournalUnusable(
            f"{file} was written by sunfleck {values.get('version') or '(newer)'} (journal schema {schema}; this one"
            f" reads up to {SCHEMA}); upgrade with `pip install -U sunfleck`, or choose another file"
        )
    return Meta(
        schema=schema, pool=values["pool"], created_s=float(values["created_s"]), version=values.get("version", "")
    )


def explain(error: sqlite3.Error, file: Path) -> str:
    """One line: what is wrong with the file and what mends it. Result codes: sqlite.org/rescode.html."""
    name = getattr(error, "sqlite_errorname", None) or ""
    if name.startswith("SQLITE_FULL"):
        return f"no space left to write {file}: free space on that disk"
    if name.startswith("SQLITE_IOERR"):
        return f"cannot write {file} ({error}): free space there, or check quota and health of that disk"
    if name.startswith(("SQLITE_READONLY", "SQLITE_PERM", "SQLITE_AUTH")):
        return f"{file} is read-only, or was moved or deleted: make it writable or put it back"
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return f"{file} is locked by another program: close whatever has it open for writing"
    if name.startswith("SQLITE_CANTOPEN"):
        return f"cannot open {file}: make the folder exist, readable and writable"
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return (
            f"{file} is damaged or no journal ({error}): move it away and start anew, or salvage it with"
            f" `sqlite3 {file.name} .recover`"
        )
    return f"cannot use {file} ({error}): move it away and start anew"
