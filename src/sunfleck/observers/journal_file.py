"""The journal's file: its lock, its tables, how it is opened, and its errors in words a user can act on."""

from __future__ import annotations

import errno
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
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    os.close(fd)
                    raise JournalUnusable(
                        f"cannot lock {lock_file} ({error.strerror}): choose a folder on a local disk"
                    ) from error
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


def identity(file: Path) -> tuple[int, int] | None:
    """Tells whether a path still names the same file; None when there is none."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def rewrite(db: sqlite3.Connection, file: Path) -> sqlite3.Connection:
    """Write a file that was deleted under an open connection anew from that connection, which still has everything;
    SQLite itself would go on writing where nobody can ever read. Returns the new connection, with `db` closed.

    Raises sqlite3.Error or OSError where there is no room for the new file; `db` goes on as it was then.
    """
    draft = file.with_name(file.name + ".draft")
    draft.unlink(missing_ok=True)
    touch_private(draft)
    db.execute("VACUUM INTO ?", (str(draft),))
    for suffix in ("-wal", "-shm"):  # a log of the old file would be taken for one of the new
        file.with_name(file.name + suffix).unlink(missing_ok=True)
    draft.replace(file)
    db.close()  # before the new one is opened: closing removes the log by its name
    db = connect(file, read_only=False)
    db.execute("PRAGMA journal_mode=WAL")
    return db


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


def touch_private(file: Path) -> None:
    """Make the file, for its owner only, if there is none: job descriptions hold environment variables, and those
    may hold secrets. SQLite gives its log the mode of the database."""
    os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))


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


def explain_os(error: OSError, file: Path) -> str:
    """The same for what the operating system refuses before SQLite is asked."""
    return (
        f"cannot write a journal in {file.parent}: {error.strerror}; free space there, make the folder writable, or"
        " choose another one"
    )
