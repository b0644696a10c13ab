"""Zygotes with real children: what a worker finds, how it ends, and that nothing outlives its time."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sunfleck.core.errors import SunfleckError
from sunfleck.executor.launch.zygotes import StartRequest, ZygoteLink, Zygotes, socket_path
from tests.fakes.pool import alive, end_zygotes, no_leaks, wait_for, zygote_pids


class Nursery:
    def __init__(self, run_dir: Path, linger_s: float = 60.0, python: str = sys.executable) -> None:
        self.run_dir = run_dir
        self.zygotes = Zygotes(run_dir, linger_s, python=python)
        self.n = 0

    def start(
        self, text: str = "", warm: tuple[str, ...] = (), env: dict[str, str] | None = None, **more: Any
    ) -> tuple[ZygoteLink, str, Path]:
        self.n += 1
        log = self.run_dir / f"log{self.n}"
        fields: dict[str, Any] = {"cwd": str(self.run_dir), "env": {**os.environ, **(env or {})}, **more}
        if text:
            script = self.run_dir / f"program{self.n}.py"
            script.write_text(textwrap.dedent(text))
            fields["script"] = str(script)
        link = self.zygotes.link(warm, fields["env"], fields["cwd"])
        with log.open("ab") as output:
            link.start(StartRequest(id=f"w{self.n}", **fields), output.fileno())
        return link, f"w{self.n}", log

    def message(self, link: ZygoteLink) -> dict[str, Any]:
        assert select.select([link.socket], [], [], 30)[0], "the zygote says nothing"
        found = link.receive()
        assert found is not None
        return found

    def closes(self, link: ZygoteLink) -> bool:
        """Whether the zygote goes away, after at most a few last words."""
        try:
            for _ in range(3):
                self.message(link)
        except EOFError:
            return True
        return False

    def run(self, text: str = "", **more: Any) -> tuple[dict[str, Any], int, str]:
        """(started message, exit code, output)"""
        link, name, log = self.start(text, **more)
        started = self.message(link)
        ended = started if started["op"] == "exited" else self.message(link)
        assert (ended["op"], ended["id"]) == ("exited", name)
        return started, ended["code"], log.read_text()


@contextlib.contextmanager
def nursery_in(linger_s: float = 60.0) -> Iterator[Nursery]:
    run_dir = Path(tempfile.mkdtemp(prefix="sf-z-"))
    with no_leaks():
        found = Nursery(run_dir, linger_s)
        try:
            yield found
        finally:
            found.zygotes.close()
            end_zygotes(run_dir)
            shutil.rmtree(run_dir)


@pytest.fixture(scope="module")
def shared() -> Iterator[Nursery]:
    with nursery_in() as found:
        yield found


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    with nursery_in() as found:
        yield found


WAYS = pytest.mark.parametrize("cold", ["", "asked for"], ids=["warm", "cold"])

SURVEY = """
import json, os, resource, signal, sys
print(json.dumps({
    "name": __name__, "file": __file__, "argv": sys.argv, "path0": sys.path[0], "extra": "/extra/place" in sys.path,
    "cwd": os.getcwd(), "env": os.environ["ONLY_HERE"], "sid": os.getsid(0) == os.getpid() == os.getpgrp(),
    "affinity": sorted(os.sched_getaffinity(0)), "fds": sorted(int(n) for n in os.listdir("/proc/self/fd"))[:-1],
    "term": str(signal.getsignal(signal.SIGTERM)), "int": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "pipe": str(signal.getsignal(signal.SIGPIPE)), "chld": str(signal.getsignal(signal.SIGCHLD)),
    "blocked": [int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    "stdin": sys.stdin.read(), "umask": os.umask(0), "main": sys.modules["__main__"].__dict__ is globals(),
    "modules": sorted(m for m in sys.modules if "newborn" in m or "zygote" in m), "spec": str(__spec__),
    "omp": os.environ.get("OMP_NUM_THREADS"), "tunables": os.environ.get("GLIBC_TUNABLES"),
    "subreaper_or_threads": len(os.listdir("/proc/self/task")), "enc": sys.stdout.encoding,
    "same_file": os.path.samestat(os.fstat(1), os.fstat(2)),
}))
"""


def test_a_warm_worker_is_what_python_script_is(shared: Nursery) -> None:
    """Field by field the same as under a new interpreter, and as under plain `python script.py`."""
    env = {"ONLY_HERE": "yes", "PYTHONPATH": os.pathsep.join(["/extra/place", *filter(None, sys.path)])}
    more: dict[str, Any] = {"args": ["a", "b c"], "env": env, "affinity": [0], "umask": 0o027}
    found = {}
    for cold in ("", "asked for"):
        started, code, output = shared.run(SURVEY, cold=cold, **more)
        assert (started["warm"], started["detail"], code) == (not cold, cold, 0), output
        found[cold] = json.loads(output)
    for survey in found.values():
        survey["file"] = survey["argv"][0] = "program"
    assert found[""] == found["asked for"]
    assert found[""]["name"] == "__main__"
    assert found[""]["affinity"] == [0]
    assert found[""]["umask"] == 0o027
    assert found[""]["fds"] == [0, 1, 2]
    assert found[""]["sid"]
    assert found[""]["extra"]
    assert found[""]["modules"] == []
    assert found[""]["path0"] == str(shared.run_dir.resolve())


@WAYS
def test_exit_codes(shared: Nursery, cold: str) -> None:
    for text, code, words in [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit('no luck')", 1, "no luck\n"),
        ("raise SystemExit(-1)", 255, ""),
        ("import os; os._exit(9)", 9, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15, ""),
        ("raise KeyboardInterrupt", -2, "KeyboardInterrupt"),
        ("def f():\n    1 / 0\nf()", 1, "ZeroDivisionError: division by zero"),
        ("this is no Python", 1, "SyntaxError"),
    ]:
        _, found, output = shared.run(text, cold=cold)
        assert found == code, (text, output)
        assert words in output
        assert "newborn" not in output, output


@WAYS
def test_the_end_of_a_program(shared: Nursery, cold: str) -> None:
    """Threads are waited for, exit handlers run, buffers reach the log."""
    _, code, output = shared.run(
        """
        import atexit, sys, threading, time
        atexit.register(lambda: print("at exit"))
        threading.Thread(target=lambda: (time.sleep(0.1), print("thread done"))).start()
        sys.stdout.write("no newline ")
        sys.exit(4)
        """,
        cold=cold,
    )
    assert (code, output) == (4, "no newline thread done\nat exit\n")


@WAYS
def test_output_is_seen_line_by_line(shared: Nursery, cold: str) -> None:
    link, _, log = shared.start("import time\nprint('first')\ntime.sleep(60)", cold=cold)
    started = shared.message(link)
    wait_for(lambda: log.read_text() == "first\n")
    os.killpg(started["pid"], signal.SIGKILL)
    assert shared.message(link)["code"] == -9


@WAYS
def test_modules_folders_and_archives(shared: Nursery, cold: str) -> None:
    (shared.run_dir / "some_module.py").write_text("import sys\nprint(__name__, __spec__.name, sys.argv[1:])")
    assert shared.run(module="some_module", args=["x"], cold=cold)[1:] == (0, "__main__ some_module ['x']\n")
    folder = shared.run_dir / "folder"
    folder.mkdir(exist_ok=True)
    (folder / "__main__.py").write_text("import sys, helper_of_folder\nprint(__name__, sys.path[0])")
    (folder / "helper_of_folder.py").write_text("")
    assert shared.run(script=str(folder), cold=cold)[1:] == (0, f"__main__ {folder}\n")
    _, code, output = shared.run(module="no_such_module", cold=cold)
    assert code == 1
    assert "No module named no_such_module" in output


@WAYS
def test_what_cannot_start_says_why(shared: Nursery, cold: str) -> None:
    _, code, output = shared.run("print(1)", cwd="/no/such/folder", cold=cold)
    assert code != 0
    assert "/no/such/folder" in output
    _, code, output = shared.run(script="/no/such/script.py", cold=cold)
    assert code != 0
    assert "/no/such/script.py" in output


def test_any_program_at_all(shared: Nursery) -> None:
    started, code, output = shared.run(argv=["/bin/sh", "-c", "echo $ONLY_HERE; exit 5"], env={"ONLY_HERE": "sh"})
    assert (started["warm"], started["detail"], code, output) == (False, "not a Python program", 5, "sh\n")
    _, code, output = shared.run(argv=["no-such-program-anywhere"])
    assert code == 127
    assert "no-such-program-anywhere" in output


def test_an_environment_larger_than_a_packet(shared: Nursery) -> None:
    env = {f"LARGE_{n}": "x" * 10_000 for n in range(30)} | {"ODD": os.fsdecode(b"\xff\xfe")}
    _, code, output = shared.run("import os; print(len(os.environ['LARGE_29']), os.environb[b'ODD'])", env=env)
    assert (code, output) == (0, "10000 b'\\xff\\xfe'\n")


def test_random_state_is_not_shared(shared: Nursery) -> None:
    pytest.importorskip("numpy")
    text = "import random, numpy; print(random.random(), numpy.random.rand(), hash('x') is None)"
    outputs = {shared.run(text, warm=("random", "numpy.random"))[2] for _ in range(3)}
    assert len({o.split()[0] for o in outputs}) == 3
    assert len({o.split()[1] for o in outputs}) == 3


def test_a_module_that_cannot_be_imported_means_a_cold_start(nursery: Nursery) -> None:
    started, code, output = nursery.run("print('runs')", warm=("no_such_module",))
    assert not started["warm"]
    assert "cannot import no_such_module: ModuleNotFoundError" in started["detail"]
    assert (code, output) == (0, "runs\n")


def test_a_module_that_starts_threads_means_a_cold_start(nursery: Nursery) -> None:
    (nursery.run_dir / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
    )
    env = {"PYTHONPATH": str(nursery.run_dir)}
    text = "import os; print(len(os.listdir('/proc/self/task')))"
    started, code, output = nursery.run(text, warm=("threaded",), env=env)
    assert not started["warm"]
    assert "started threads" in started["detail"]
    assert (code, output) == (0, "1\n")


def test_finalizers_of_the_zygote_do_not_run_in_its_workers(nursery: Nursery) -> None:
    (nursery.run_dir / "makes.py").write_text("import tempfile\nfolder = tempfile.TemporaryDirectory()\n")
    env = {"PYTHONPATH": str(nursery.run_dir)}
    text = """
        import makes, os, tempfile, weakref
        class Mine: pass
        mine = Mine()
        weakref.finalize(mine, print, "mine ran")
        print(os.path.isdir(makes.folder.name))
    """
    for _ in range(2):
        assert nursery.run(text, warm=("makes",), env=env)[1:] == (0, "True\nmine ran\n")


def test_torch_is_there_and_has_its_threads(nursery: Nursery) -> None:
    pytest.importorskip("torch")
    text = """
        import sys, time
        assert "torch" in sys.modules
        t = time.time(); import torch; assert time.time() - t < 0.5
        print(torch.get_num_threads(), float((torch.ones(300, 300) @ torch.ones(300, 300)).sum()))
    """
    for n in ("1", "2"):
        started, code, output = nursery.run(text, warm=("torch",), env={"OMP_NUM_THREADS": n})
        assert started["warm"], started
        assert (code, output) == (0, f"{n} 27000000.0\n")


def test_one_zygote_for_all_and_another_for_other_start_up(nursery: Nursery) -> None:
    other = Zygotes(nursery.run_dir, 60.0)
    for zygotes in (nursery.zygotes, other):
        zygotes.link((), os.environ)
    assert len(zygote_pids(nursery.run_dir)) == 1
    _, _, first = nursery.run("print(hash('x'))", env={"PYTHONHASHSEED": "1"})
    _, _, again = nursery.run("print(hash('x'))", env={"PYTHONHASHSEED": "1"}, cold="compare")
    assert first == again
    assert len(zygote_pids(nursery.run_dir)) == 2
    other.close()


# -- nothing outlives its time -----------------------------------------------------------------------------------

FAMILY = """
import os, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(1000)"]
a = subprocess.Popen(sleep)                                  # in the group
b = subprocess.Popen(sleep, start_new_session=True)          # has left it
print(os.getpid(), a.pid, b.pid, flush=True)
if os.environ.get("STAY"):
    time.sleep(1000)
"""


def family(log: Path) -> list[int]:
    text = wait_for(lambda: log.read_text() if log.read_text().endswith("\n") else "", "their pids")
    return [int(word) for word in text.split()]


def gone(pids: list[int]) -> bool:
    return not any(alive(pid) for pid in pids)


@WAYS
def test_what_a_worker_leaves_behind_ends_with_it(shared: Nursery, cold: str) -> None:
    link, _, log = shared.start(FAMILY, cold=cold)
    shared.message(link)
    members = family(log)
    assert shared.message(link)["code"] == 0
    wait_for(lambda: gone(members), "end of the family")


@WAYS
def test_killing_a_worker_ends_its_family(shared: Nursery, cold: str) -> None:
    link, _, log = shared.start(FAMILY, cold=cold, env={"STAY": "1"})
    pid = shared.message(link)["pid"]
    members = family(log)
    assert len(members) == 3
    os.kill(pid, signal.SIGKILL)
    assert shared.message(link)["code"] == -9
    wait_for(lambda: gone(members), "end of the family")


@WAYS
def test_a_daemon_of_a_living_worker_is_left_alone(shared: Nursery, cold: str) -> None:
    text = """
        import os, subprocess, sys, time
        if os.fork() == 0:
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
            print(child.pid, flush=True)
            os._exit(0)
        time.sleep(1000)
    """
    link, name, log = shared.start(text, cold=cold)
    pid = shared.message(link)["pid"]
    daemon = family(log)
    shared.run("pass")
    assert not gone(daemon)
    os.killpg(pid, signal.SIGKILL)
    assert shared.message(link)["id"] == name
    wait_for(lambda: gone(daemon), "end of the daemon")


@WAYS
def test_an_agent_that_vanishes_takes_its_workers_along(nursery: Nursery, cold: str) -> None:
    other = Nursery(nursery.run_dir)
    other.n = 100
    link, _, log = nursery.start(FAMILY, cold=cold, env={"STAY": "1"})
    nursery.message(link)
    members = family(log)
    kept, _, kept_log = other.start(FAMILY, cold=cold, env={"STAY": "1"})
    other.message(kept)
    others = family(kept_log)
    nursery.zygotes.close()
    wait_for(lambda: gone(members), "end of the family")
    assert len(others) == 3
    assert all(alive(pid) for pid in others)
    other.zygotes.close()
    wait_for(lambda: gone(others), "end of the other family")


@WAYS
def test_workers_die_with_their_zygote(nursery: Nursery, cold: str) -> None:
    link, _, _ = nursery.start("import time; time.sleep(1000)", cold=cold)
    worker = nursery.message(link)["pid"]
    os.kill(zygote_pids(nursery.run_dir)[0], signal.SIGKILL)
    wait_for(lambda: gone([worker]), "death of the worker")
    assert nursery.closes(link)
    nursery.zygotes.drop(link)
    assert nursery.run("print('again')", cold=cold)[1:] == (0, "again\n")


def test_it_lingers_and_then_goes() -> None:
    with nursery_in(linger_s=1.0) as nursery:
        nursery.zygotes.link((), os.environ, str(nursery.run_dir))
        zygote = zygote_pids(nursery.run_dir)[0]
        time.sleep(1.5)
        assert alive(zygote), "it stays as long as an agent is connected"
        nursery.zygotes.close()
        assert nursery.run("print(1)")[1:] == (0, "1\n")
        assert zygote_pids(nursery.run_dir) == [zygote]
        nursery.zygotes.close()
        wait_for(lambda: gone([zygote]), "the end of lingering")
        assert not [p for p in nursery.run_dir.iterdir() if p.name.startswith("z-") and p.suffix in ("", ".pid")]
        assert nursery.run("print(2)")[1:] == (0, "2\n")


def test_many_starters_make_one_zygote(nursery: Nursery) -> None:
    argv = [sys.executable, "-m", "sunfleck.executor.launch.zygotes", str(nursery.run_dir), "json"]
    starters = [subprocess.Popen(argv) for _ in range(4)]
    assert [starter.wait(30) for starter in starters] == [0] * 4
    link = nursery.zygotes.link(("json",), os.environ, os.getcwd())
    assert len(zygote_pids(nursery.run_dir)) == 1
    assert link.pids == {}


def test_hundred_workers_at_once(nursery: Nursery) -> None:
    text = "import os, sys; sys.exit(int(os.environ['N']) % 7)"
    started = [nursery.start(text, env={"N": str(n)}) for n in range(100)]
    link = started[0][0]
    codes: dict[str, int] = {}
    while len(codes) < 100:
        message = nursery.message(link)
        if message["op"] == "exited":
            codes[message["id"]] = message["code"]
    assert codes == {f"w{n + 1}": n % 7 for n in range(100)}
    assert link.pids == {}


def test_an_agent_that_does_not_read_holds_up_nobody(nursery: Nursery) -> None:
    stuck = Nursery(nursery.run_dir)
    stuck.n = 1000
    link = stuck.zygotes.link((), os.environ, str(nursery.run_dir))
    link.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    names = [stuck.start("pass")[1] for _ in range(150)]
    assert nursery.run("print('through')")[1:] == (0, "through\n")
    ended = []
    while len(ended) < 150:  # and it hears everything once it reads again
        message = stuck.message(link)
        if message["op"] == "exited":
            ended.append(message["id"])
    assert sorted(ended) == sorted(names)
    stuck.zygotes.close()


def other_pythons() -> list[str]:
    """Interpreters of other versions on this machine, from 3.8 on, that need nothing of ours."""
    found = []
    for minor in range(8, 16):
        if minor != sys.version_info.minor:
            near = Path(os.path.realpath(sys.executable)).parents[2].glob(f"3.{minor}.*/bin/python3.{minor}")
            path = next(map(str, near), None) or shutil.which(f"python3.{minor}")
            if path and subprocess.run([path, "-c", "import json, ssl"], capture_output=True).returncode == 0:
                found.append(path)
    return found


def test_any_python_from_3_8_on(nursery: Nursery) -> None:
    pythons = other_pythons()
    if not pythons:
        pytest.skip("no Python of another version here")
    env = {"PYTHONPATH": ""}
    for python in pythons:
        other = Nursery(nursery.run_dir, python=python)
        other.n = 10 * pythons.index(python)
        text = "import atexit, json, sys; atexit.register(print, 'bye'); print(sys.version_info[:2]); sys.exit(3)"
        outputs = set()
        for cold in ("", "compare"):
            started, code, output = other.run(text, warm=("json",), env=env, cold=cold)
            assert (started["warm"], code) == (not cold, 3), (python, started, output)
            outputs.add(output)
        assert len(outputs) == 1, outputs
        assert "bye" in outputs.pop()
        _, code, output = other.run("def f():\n  1/0\nf()", warm=("json",), env=env)
        assert (code, output.count("Traceback"), output.count("File")) == (1, 1, 2), output
        other.zygotes.close()


def test_a_path_too_long_for_a_socket_says_so(tmp_path: Path) -> None:
    with pytest.raises(SunfleckError, match="TMPDIR or XDG_RUNTIME_DIR"):
        socket_path(tmp_path / ("x" * 120))
