"""The journal: what is committed survives, what cannot be written waits, and every misuse is said in one line."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sunfleck.core.errors import JournalUnavailable, SunfleckError
from sunfleck.core.events import (
    AnyEvent,
    JobSubmitted,
    NodesJoined,
    NodesReclaimed,
    NodesReleased,
    PlanReady,
    PoolStarted,
    Progress,
    RoundFormed,
    SamplesCommitted,
    TimeReached,
)
from sunfleck.core.model import JobSpec, NodeSpec, Plan, PlannedJob, Profiling, Program
from sunfleck.observers.journal import Journal, JournalReader, decode_body, encode_body
from sunfleck.observers.journal_file import JournalUnusable

SRC = Path(__file__).resolve().parents[2] / "src"


def progress(step: int, pad: int = 0) -> Progress:
    return Progress(
        job="j1", round=1, n_nodes=2, step=step, epoch=0, samples=step * 32, dt_s=0.5, metrics={"loss" + "x" * pad: 1.0}
    )


def reclaim(i: int) -> NodesReclaimed:
    return NodesReclaimed(nodes=(f"n{i}",), grace_s=0.5)


def open_journal(path: Path, **more: int) -> Journal:
    return Journal.open(path, pool="p", now_s=1.0, version="0.1", **more)


def events_of(path: Path) -> list[AnyEvent]:
    with JournalReader.open(path) as reader:
        return [entry.event for entry in reader.iterate()]


def test_what_was_committed_is_read_back_in_order_with_its_times(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "journal.db"
    written: list[AnyEvent] = [
        PoolStarted(pool="p", version="0.1"),
        NodesJoined(nodes=(NodeSpec(name="n1", cpus=0.25), NodeSpec(name="n2")), holding={"n1": "j1"}),
        JobSubmitted(job="j1", spec=JobSpec(name="a", max_nodes=4, program=Program(script="t.py", args=("-x",)))),
        PlanReady(
            generation=3,
            plan=Plan(
                jobs=(PlannedJob(job="j1", nodes=("n1",), reason="alone"),),
                profiling=Profiling(job="j1", n_nodes=2, since_s=1.5, remaining=(1,)),
                review_after_s=2.0,
            ),
            solve_s=0.001,
        ),
        SamplesCommitted(
            job="j1",
            round=0,
            epoch=0,
            step_from=0,
            step_to=1,
            cursor_from=0,
            cursor_to=8,
            n_samples=8,
            index_hash=2**63 - 1,
        ),
        progress(1),
    ]
    with open_journal(path) as journal:
        seqs = [journal.append(10.0 + i / 8, event) for i, event in enumerate(written)]
        journal.commit()
        assert seqs == [1, 2, 3, 4, 5, 6] == [entry.seq for entry in journal.iterate()]
        assert journal.last_seq == 6
    with JournalReader.open(path) as reader:
        assert reader.meta.pool == "p"
        assert reader.meta.created_s == 1.0
        entries = list(reader.iterate())
        assert [entry.event for entry in entries] == written
        assert [entry.time_s for entry in entries] == [10.0 + i / 8 for i in range(6)]
        assert [entry.seq for entry in reader.iterate(5)] == [5, 6]


def test_only_its_owner_can_read_it(tmp_path: Path) -> None:
    """Job descriptions hold environment variables."""
    path = tmp_path / "j.db"
    before = os.umask(0)
    try:
        with open_journal(path) as journal:
            journal.append(1.0, reclaim(1))
            journal.commit()
            modes = {p.name: oct(p.stat().st_mode & 0o777) for p in tmp_path.iterdir()}
            assert modes == dict.fromkeys(["j.db", "j.db-wal", "j.db-shm", "j.db.lock"], "0o600")
            path.unlink()
            journal.append(2.0, reclaim(2))
            journal.commit()
            assert oct(path.stat().st_mode & 0o777) == "0o600"
    finally:
        os.umask(before)
    assert events_of(path) == [reclaim(1), reclaim(2)]


def test_reopened_journal_goes_on_counting(tmp_path: Path) -> None:
    path = tmp_path / "j.db"
    with open_journal(path) as journal:
        journal.append(1.0, reclaim(1))
    with open_journal(path) as journal:
        assert journal.append(2.0, reclaim(2)) == 2
        assert journal.meta.created_s == 1.0
    assert events_of(path) == [reclaim(1), reclaim(2)]


def test_columns_serve_plain_sqlite(tmp_path: Path) -> None:
    path = tmp_path / "j.db"
    with open_journal(path) as journal:
        journal.append(1.0, NodesJoined(nodes=(NodeSpec(name="n1"), NodeSpec(name="n2"))))
        journal.append(2.0, RoundFormed(job="j1", round=0, nodes=("n1", "n2"), step=0, took_s=0.5))
        journal.append(3.0, TimeReached())
    db = sqlite3.connect(path)
    assert db.execute("SELECT seq, time_s, kind, job, nodes FROM events").fetchall() == [
        (1, 1.0, "NodesJoined", None, "n1 n2"),
        (2, 2.0, "RoundFormed", "j1", "n1 n2"),
        (3, 3.0, "TimeReached", None, None),
    ]
    assert db.execute("SELECT json_extract(body, '$.took_s') FROM events WHERE job = 'j1'").fetchone() == (0.5,)
    db.close()


@given(
    st.dictionaries(st.text(max_size=8), st.floats(), max_size=4),
    st.one_of(st.none(), st.floats()),
    st.integers(0, 2**62),
)
@settings(max_examples=200, deadline=None)
def test_every_float_survives_the_codec(metrics: dict[str, float], rate: float | None, samples: int) -> None:
    event = Progress(
        job="j", round=0, n_nodes=1, step=1, epoch=0, samples=samples, dt_s=0.1, samples_per_s=rate, metrics=metrics
    )
    again = decode_body(encode_body(event))
    assert repr(again) == repr(event)  # repr: NaN is not equal to itself


@pytest.mark.parametrize("kind", get_args(AnyEvent), ids=lambda kind: kind.__name__)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_every_kind_of_event_survives_the_codec(kind: type, data: st.DataObject) -> None:
    event = data.draw(anything(kind))
    assert repr(decode_body(encode_body(event))) == repr(event)


def anything(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type as msgspec describes it, so that a field added tomorrow is tested tomorrow."""
    match msgspec.inspect.type_info(kind) if not isinstance(kind, msgspec.inspect.Type) else kind:
        case msgspec.inspect.StructType(cls=cls, fields=fields):
            return st.builds(cls, **{field.name: anything(field.type) for field in fields})
        case msgspec.inspect.UnionType(types=types):
            return st.one_of([anything(each) for each in types])
        case msgspec.inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(anything(key), anything(value), max_size=2)
        case msgspec.inspect.VarTupleType(item_type=item):
            return st.lists(anything(item), max_size=2).map(tuple)
        case msgspec.inspect.TupleType(item_types=items):
            return st.tuples(*[anything(item) for item in items])
        case msgspec.inspect.IntType():
            return st.integers(-(2**63), 2**63 - 1)
        case msgspec.inspect.FloatType():
            return st.floats()
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.StrType():
            return st.text(st.characters(exclude_categories=["Cs"]), max_size=9)
        case msgspec.inspect.EnumType(cls=cls):
            return st.sampled_from(list(cls))
        case msgspec.inspect.NoneType():
            return st.none()
        case other:
            raise NotImplementedError(f"teach this test about {other}")


def test_turn_is_seen_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "j.db"
    with open_journal(path) as journal, JournalReader.open(path) as reader:
        journal.append(1.0, reclaim(1))
        journal.append(1.0, reclaim(2))
        assert list(reader.iterate()) == []
        journal.commit()
        assert [entry.event for entry in reader.iterate()] == [reclaim(1), reclaim(2)]
        journal.append(2.0, reclaim(3))
        journal.commit()
        assert [entry.event for entry in reader.iterate(3)] == [reclaim(3)]


def test_reader_sees_more_than_one_page_while_writer_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "j.db"
    with open_journal(path) as journal, JournalReader.open(path) as reader:
        for i in range(2500):
            journal.append(float(i), TimeReached())
        journal.commit()
        seen = 0
        for entry in reader.iterate():
            seen += 1
            if entry.seq == 100:
                journal.append(9999.0, TimeReached())
                journal.commit()
        assert seen == 2501


WRITER = """
    import sys
    from sunfleck.core.events import NodesReclaimed
    from sunfleck.observers.journal import Journal
    journal = Journal.open(sys.argv[1], pool="p", now_s=0.0)
    turn = 0
    while True:
        for part in range(3):
            journal.append(float(turn), NodesReclaimed(nodes=(f"n{turn}-{part}",), grace_s=1.0))
        journal.commit()
        print(turn, flush=True)
        turn += 1
"""


def spawn(code: str, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SRC)},
    )


def test_kill_9_loses_no_committed_turn_and_frees_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "j.db"
    writer = spawn(WRITER, str(path))
    assert writer.stdout is not None
    told = 0
    for line in writer.stdout:
        told = int(line)
        if told == 200:
            with JournalReader.open(path) as reader:  # another process reads while this one writes
                assert sum(1 for _ in reader.iterate()) >= 603
        if told >= 400:
            break
    with pytest.raises(JournalUnusable, match=rf"in use by process {writer.pid}: .* `sunfleck down`"):
        open_journal(path)
    writer.send_signal(signal.SIGKILL)
    rest = writer.stdout.read().split()
    writer.wait()
    writer.communicate()
    told = max([told, *map(int, rest)])
    with open_journal(path) as journal:
        entries = list(journal.iterate())
        assert len(entries) >= 3 * (told + 1)
        assert len(entries) % 3 == 0
        assert [entry.seq for entry in entries] == list(range(1, len(entries) + 1))


def test_forked_child_that_outlives_the_controller_does_not_keep_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "j.db"
    code = """
        import os, sys
        from sunfleck.observers.journal import Journal
        journal = Journal.open(sys.argv[1], pool="p", now_s=0.0)
        if os.fork() == 0:
            sys.stdin.read()
            os._exit(0)
        os._exit(0)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(path)],
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(SRC)},
    )
    parent.wait()
    try:
        open_journal(path).close()
    finally:
        assert parent.stdin is not None
        parent.stdin.close()  # ends the child


def test_open_twice_in_one_process_is_refused_until_closed(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "j.db")
    with pytest.raises(JournalUnusable, match="already open"):
        open_journal(tmp_path / "j.db")
    journal.close()
    journal.close()
    open_journal(tmp_path / "j.db").close()


# -- refusals: one line that names the fix -----------------------------------------------------------------------


def refusal(path: Path, *, read: bool = False, pool: str = "p") -> str:
    with pytest.raises(SunfleckError) as caught:
        JournalReader.open(path) if read else Journal.open(path, pool=pool, now_s=0.0)
    text = str(caught.value)
    assert "\n" not in text
    assert caught.value.exit_code != 0
    return text


@pytest.mark.parametrize("read", [False, True])
def test_file_that_is_no_database(tmp_path: Path, read: bool) -> None:
    path = tmp_path / "j.db"
    path.write_bytes(b"hello world, this is no database\n" * 100)
    assert "move it away" in refusal(path, read=read)
    assert path.read_bytes().startswith(b"hello")


def test_database_of_another_program_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "j.db"
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE t (x)")
    db.commit()
    db.close()
    before = path.read_bytes()
    assert "another program" in refusal(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("read", [False, True])
def test_newer_schema(tmp_path: Path, read: bool) -> None:
    path = tmp_path / "j.db"
    open_journal(path).close()
    db = sqlite3.connect(path)
    db.execute("UPDATE meta SET value = '99' WHERE key = 'schema'")
    db.execute("UPDATE meta SET value = '7.0' WHERE key = 'version'")
    db.commit()
    db.close()
    text = refusal(path, read=read)
    assert "sunfleck 7.0" in text
    assert "pip install -U sunfleck" in text


def test_other_pool(tmp_path: Path) -> None:
    open_journal(tmp_path / "j.db").close()
    assert "journal of pool 'p', not of 'q'" in refusal(tmp_path / "j.db", pool="q")
    open_journal(tmp_path / "j.db").close()  # the refusal kept no lock


def test_missing_and_empty_files(tmp_path: Path) -> None:
    assert "no journal at" in refusal(tmp_path / "none.db", read=True)
    (tmp_path / "empty.db").touch()
    assert "is empty" in refusal(tmp_path / "empty.db", read=True)
    open_journal(tmp_path / "empty.db").close()  # a controller killed before its first write left such a file


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "choose another" in refusal(tmp_path / "file" / "j.db")


@pytest.mark.skipif(not os.path.isdir("/proc/1"), reason="needs a folder that even root cannot write to")
def test_folder_that_cannot_be_written() -> None:
    assert "choose another" in refusal(Path("/proc/1/j.db"))


def test_damaged_page_is_found_by_reading(tmp_path: Path) -> None:
    path = tmp_path / "j.db"
    with open_journal(path) as journal:
        for i in range(2000):
            journal.append(float(i), reclaim(i))
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 2 // 4096 * 4096)
        file.write(b"\xff" * 4096)
    with JournalReader.open(path) as reader, pytest.raises(JournalUnusable, match="salvage"):
        list(reader.iterate())


def test_event_of_a_newer_sunfleck_is_named(tmp_path: Path) -> None:
    path = tmp_path / "j.db"
    with open_journal(path) as journal:
        journal.append(1.0, reclaim(1))
    db = sqlite3.connect(path)
    db.execute("""INSERT INTO events VALUES (2, 2.0, 'NodeDreamt', NULL, NULL, '{"event":"NodeDreamt"}')""")
    db.commit()
    db.close()
    with JournalReader.open(path) as reader, pytest.raises(JournalUnusable, match=r"event 2 of .*NodeDreamt.*upgrade"):
        list(reader.iterate())


# -- disks that fill up ------------------------------------------------------------------------------------------


def page_limit(journal: Journal, n_pages: int) -> None:
    """What SQLite itself offers to play a full disk: no page may be added beyond this many."""
    journal._db.execute(f"PRAGMA max_page_count={n_pages}")


def test_full_disk_keeps_events_and_writes_them_when_there_is_room(tmp_path: Path) -> None:
    path = tmp_path / "j.db"
    with open_journal(path) as journal:
        journal.append(0.0, reclaim(0))
        journal.commit()
        page_limit(journal, 8)
        n = 1
        with contextlib.suppress(JournalUnavailable):
            while True:
                journal.append(float(n), reclaim(n))
                n += 1
                journal.commit()
        with pytest.raises(JournalUnavailable, match=r"no space left .*free space.*events wait in memory"):
            journal.commit()
        assert journal.fault is not None
        n_written = sum(1 for _ in journal.iterate())
        assert n_written + journal.n_pending == n
        for _ in range(100):  # the pool goes on
            journal.append(float(n), reclaim(n))
            n += 1
            with pytest.raises(JournalUnavailable):
                journal.commit()
        assert sum(1 for _ in journal.iterate()) == n_written
        page_limit(journal, 100_000)
        journal.commit()
        assert (journal.fault, journal.n_pending, journal.n_dropped) == (None, 0, 0)
    assert events_of(path) == [reclaim(i) for i in range(n)]


def test_engine_turns_go_on_while_the_disk_is_full(tmp_path: Path) -> None:
    with open_journal(tmp_path / "j.db") as journal:
        page_limit(journal, 5)
        for i in range(200):
            journal.on_event(float(i), reclaim(i))
            journal.on_turn_end()
        assert journal.fault is not None
        assert journal.fault.startswith("no space left")
        page_limit(journal, 100_000)
        journal.on_turn_end()
        assert journal.fault is None
        assert sum(1 for _ in journal.iterate()) == 200


def test_long_backlog_is_written_when_there_is_room(tmp_path: Path) -> None:
    path = tmp_path / "j.db"
    with open_journal(path) as journal:
        page_limit(journal, 6)
        for i in range(5000):
            journal.append(float(i), reclaim(i))
        with pytest.raises(JournalUnavailable):
            journal.commit()
        page_limit(journal, 100_000)
        journal.append(5000.0, reclaim(5000))
        journal.commit()
    assert events_of(path) == [reclaim(i) for i in range(5001)]


def test_full_buffer_gives_up_measurements_first_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "j.db"
    with open_journal(path, buffer_bytes=20_000) as journal:
        page_limit(journal, 5)
        for i in range(30):
            journal.append(float(i), reclaim(i))
            journal.append(float(i), progress(i, pad=400))
        with pytest.raises(JournalUnavailable, match=r"\d+ were dropped"):
            journal.commit()
        n_dropped = journal.n_dropped
        assert 0 < n_dropped < 30
        page_limit(journal, 100_000)
        journal.commit()
        seqs = [entry.seq for entry in journal.iterate()]
        assert len(seqs) == 60 - n_dropped  # a gap in seq tells a reader what is missing
    events = events_of(path)
    assert [e for e in events if isinstance(e, NodesReclaimed)] == [reclaim(i) for i in range(30)]
    assert events[-1] == progress(29, pad=400)


def test_full_buffer_without_measurements_keeps_the_newest(tmp_path: Path) -> None:
    with open_journal(tmp_path / "j.db", buffer_bytes=20_000) as journal:
        page_limit(journal, 5)
        for i in range(1000):
            journal.append(float(i), reclaim(i))
            assert journal._pending_bytes <= 20_000
        page_limit(journal, 100_000)
        journal.commit()
        entries = list(journal.iterate())
        assert entries[-1].event == reclaim(999)
        assert len(entries) == 1000 - journal.n_dropped < 200


def test_foreign_writer_is_waited_out(tmp_path: Path) -> None:
    path = tmp_path / "j.db"
    with open_journal(path) as journal:
        journal.append(1.0, reclaim(1))
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(JournalUnavailable, match="locked by another program"):
            journal.commit()
        other.execute("ROLLBACK")
        other.close()
        journal.commit()
    assert events_of(path) == [reclaim(1)]


@pytest.mark.parametrize("how", ["deleted", "moved away", "deleted with its log"])
def test_deleted_journal_is_written_anew(tmp_path: Path, how: str) -> None:
    path = tmp_path / "j.db"
    with open_journal(path) as journal:
        for i in range(100):
            journal.append(float(i), reclaim(i))
            journal.commit()
        path.rename(tmp_path / "old.db") if how == "moved away" else path.unlink()
        if how == "deleted with its log":
            (tmp_path / "j.db-wal").unlink()
            (tmp_path / "j.db-shm").unlink()
        for i in range(100, 200):
            journal.append(float(i), reclaim(i))
            journal.commit()
        assert journal.fault is None
        assert events_of(path) == [reclaim(i) for i in range(200)]
    with open_journal(path) as journal:
        assert [entry.event for entry in journal.iterate()] == [reclaim(i) for i in range(200)]
        assert journal.meta.created_s == 1.0
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "old.db") == ["j.db", "j.db.lock"]


def test_journal_whose_folder_is_gone_waits_for_it(tmp_path: Path) -> None:
    folder = tmp_path / "pool"
    with open_journal(folder / "j.db") as journal:
        journal.append(1.0, reclaim(1))
        journal.commit()
        folder.rename(tmp_path / "aside")
        journal.append(2.0, reclaim(2))
        with pytest.raises(JournalUnavailable, match=r"is gone .*1 events wait"):
            journal.commit()
        (tmp_path / "aside").rename(folder)
        journal.commit()
    assert events_of(folder / "j.db") == [reclaim(1), reclaim(2)]


def test_replaced_journal_is_not_written_to(tmp_path: Path) -> None:
    path = tmp_path / "j.db"
    with open_journal(path) as journal:
        journal.append(1.0, reclaim(1))
        journal.commit()
        path.rename(tmp_path / "own.db")
        path.write_text("somebody else's")
        journal.append(2.0, reclaim(2))
        with pytest.raises(JournalUnavailable, match="put the pool's own file back"):
            journal.commit()
        assert path.read_text() == "somebody else's"
        (tmp_path / "own.db").rename(path)
        journal.commit()
    assert events_of(path) == [reclaim(1), reclaim(2)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 2 MiB."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small tmpfs needs root; the page-limit tests play the full disk instead")
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.skip(f"this machine does not let us mount a tmpfs: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path) -> Path:
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 1024)
        except OSError:
            return ballast


def test_really_full_disk_in_the_middle_of_a_run(small_disk: Path) -> None:
    path = small_disk / "j.db"
    with open_journal(path) as journal:
        for i in range(50):
            journal.append(float(i), reclaim(i))
            journal.commit()
        ballast = fill(small_disk)
        n, failures = 50, 0
        while failures < 20:
            journal.append(float(n), reclaim(n))
            n += 1
            try:
                journal.commit()
            except JournalUnavailable:
                failures += 1
            assert n < 5000
        assert "free space" in (journal.fault or "")
        with JournalReader.open(path) as reader:  # what is there stays readable
            assert sum(1 for _ in reader.iterate()) == n - journal.n_pending
        ballast.unlink()
        journal.append(float(n), reclaim(n))
        journal.commit()
        assert journal.fault is None
        assert [entry.event for entry in journal.iterate()] == [reclaim(i) for i in range(n + 1)]


def test_really_full_disk_at_the_start(small_disk: Path) -> None:
    fill(small_disk)
    assert "free space" in refusal(small_disk / "j.db")


def test_archive_on_a_read_only_medium_is_readable(small_disk: Path) -> None:
    path = small_disk / "j.db"
    with open_journal(path) as journal:
        journal.append(1.0, reclaim(1))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert events_of(path) == [reclaim(1)]
    assert "writable" in refusal(path)


# -- the documentation -------------------------------------------------------------------------------------------

DOC = Path(__file__).resolve().parents[2] / "docs" / "journal.md"


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOC.read_text(), re.S)


def test_documentation_names_every_event() -> None:
    missing = [kind.__name__ for kind in get_args(AnyEvent) if not re.search(rf"\b{kind.__name__}\b", DOC.read_text())]
    assert missing == []


def test_documented_schema_is_the_real_one(tmp_path: Path) -> None:
    with open_journal(tmp_path / "j.db"):
        real = sqlite3.connect(tmp_path / "j.db")
    documented = sqlite3.connect(":memory:")
    documented.executescript(code_blocks("sql")[0])
    for table in ("meta", "events"):
        columns = f"SELECT name, type, \"notnull\", pk FROM pragma_table_info('{table}')"
        assert documented.execute(columns).fetchall() == real.execute(columns).fetchall()
    indexes = "SELECT name FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL"
    assert documented.execute(indexes).fetchall() == real.execute(indexes).fetchall()
    documented.close()
    real.close()


def test_documented_queries_run(tmp_path: Path) -> None:
    with open_journal(tmp_path / "j.db") as journal:
        journal.append(1.0, RoundFormed(job="j1", round=0, nodes=("n1", "n2"), step=0, took_s=0.5, stall_s=0.25))
        journal.append(2.0, NodesReleased(nodes=("n2",), handback_s=0.125))
        journal.append(3.0, Progress(job="j1", round=0, n_nodes=1, step=1, epoch=0, samples=8, dt_s=1.0,
                                     metrics={"loss": 0.5}))  # fmt: skip
    (in_shell,) = re.findall(r'"(SELECT .*)"', code_blocks("sh")[0])
    in_sql = [statement for statement in code_blocks("sql")[1].split(";") if statement.strip()]
    db = sqlite3.connect(tmp_path / "j.db")
    last, sizes, handbacks, losses = (db.execute(statement).fetchall() for statement in [in_shell, *in_sql])
    db.close()
    assert [row[0] for row in last] == [3, 2, 1]
    assert sizes == [(1.0, "j1", 2, "rescale", 0.25)]
    assert handbacks == [(2.0, "n2", 0.125)]
    assert losses == [(3.0, 0.5)]


def test_documented_python_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with open_journal(tmp_path / "journal.db") as journal:
        journal.append(1.0, JobSubmitted(job="j1", spec=JobSpec(name="a")))
    (code,) = code_blocks("python")
    exec(compile(code, str(DOC), "exec"), {})
    assert capsys.readouterr().out == "[(1.0, 0)]\n"
