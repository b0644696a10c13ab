"""A process on its way to being a worker: what lies between fork (or exec) and the first line of user code, and what
an interpreter does after the last. Stdlib only, any CPython >= 3.8; lies beside `zygote`, which imports it as a file.

A warm worker must not differ from `python script.py` in anything a program can see, but for the modules it finds
imported already. Differences that cannot be undone after start-up (hash seed, interpreter flags, library paths) make
the agent choose another zygote: see `zygotes.START_UP`.
"""

from __future__ import annotations

import atexit
import ctypes
import io
import json
import os
import pkgutil
import random
import runpy
import signal
import sys
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

PR_SET_PDEATHSIG = 1
libc = ctypes.CDLL(None, use_errno=True)


def settle(parent: int, cgroups: Sequence[str], affinity: Sequence[int] | None, umask: int | None) -> None:
    """What a worker must be before any code of its user runs. Called in the new process."""
    if os.getpid() != os.getsid(0):
        os.setsid()
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(137)
    for path in cgroups:
        try:
            with open(path, "w") as file:
                file.write("0")
        except OSError as error:
            sys.stderr.write(f"sunfleck: runs without its CPU limit: {path}: {error.strerror}\n")
    if affinity:
        try:
            os.sched_setaffinity(0, affinity)
        except OSError as error:
            sys.stderr.write(f"sunfleck: runs on all CPUs: {error.strerror}\n")
    if umask is not None:
        os.umask(umask)


def become_exec(text: str) -> None:
    """`exec` command: settle, then replace this small interpreter by the real program."""
    spec = json.loads(text)
    settle(spec["parent"], spec["cgroups"], spec["affinity"], spec["umask"])
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a zygote ignores it, and that would be inherited
    argv = spec["argv"]
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.stderr.write(f"sunfleck: cannot run {argv[0]}: {error.strerror}\n")
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def become_warm(
    request: dict[str, Any],
    output: int,
    parent: int,
    base_path: list[str],
    setters: list[Callable[[int], Any]],
) -> None:
    """In the forked child: turn into what `python script.py` would be, run it, and exit as it would."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(null)
    if output > 2:
        os.close(output)
    python: Any = sys  # whose original streams are final to a type checker
    for descriptor, mode in enumerate("rww"):
        name = ("stdin", "stdout", "stderr")[descriptor]
        like = getattr(sys, name)  # the zygote's, made under the same PYTHONIOENCODING, locale and so on
        stream = open(descriptor, mode, 1, encoding=like.encoding, errors=like.errors, closefd=False)  # noqa: SIM115
        setattr(python, name, stream)
        setattr(python, f"__{name}__", stream)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    settle(parent, request["cgroups"], request["affinity"], request["umask"])
    os.environ.clear()
    os.environ.update(request["env"])
    code = 1
    try:
        os.chdir(request["cwd"])
        reseed()
        n_threads = thread_count(os.environ)
        for set_threads in setters if n_threads > 1 else ():
            set_threads(n_threads)
        code = run_main(request, base_path)
    except OSError as error:
        sys.stderr.write(f"sunfleck: {error}\n")
    finally:
        finish(code)


def reseed() -> None:
    """No two workers share random state that separate processes would not. (`random` reseeds itself at fork; torch
    has a fixed seed in every new process, and has it here too.)"""
    random.seed()
    numpy_random = sys.modules.get("numpy.random")  # numpy loads it when it is first used
    if numpy_random is not None:
        numpy_random.seed()


def thread_count(env: Mapping[str, str]) -> int:
    """Threads a new interpreter's libraries would start with: OMP_NUM_THREADS, else the CPUs we may use."""
    try:
        return max(1, int(env["OMP_NUM_THREADS"].split(",")[0]))
    except (KeyError, ValueError):
        return len(os.sched_getaffinity(0))


def run_main(request: dict[str, Any], base_path: list[str]) -> int:
    """Run the program as `__main__`; returns the exit code."""
    module = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=__builtins__, __spec__=None, __annotations__={})
    sys.modules["__main__"] = module
    main = vars(runpy)["_run_module_as_main"]  # what `python -m` calls
    safe = bool(os.environ.get("PYTHONSAFEPATH")) and sys.version_info >= (3, 11)
    try:
        if request.get("module"):
            sys.argv = [request["module"], *request["args"]]
            sys.path[:] = ([] if safe else [os.getcwd()]) + base_path
            main(request["module"])
        else:
            script = request["script"]
            sys.argv = [script, *request["args"]]
            if pkgutil.get_importer(script) is not None:  # a directory or zip file with a __main__.py
                sys.path[:] = [script, *base_path]
                main("__main__", False)
            else:
                sys.path[:] = ([] if safe else [os.path.dirname(os.path.realpath(script))]) + base_path
                with io.open_code(script) as file:
                    code = compile(file.read(), script, "exec")
                module.__file__ = os.path.abspath(script) if sys.version_info >= (3, 9) else script
                exec(code, module.__dict__)
        return 0
    except SystemExit as error:
        if error.code is None:
            return 0
        if isinstance(error.code, int):
            return error.code & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        error.__traceback__ = trace
        sys.excepthook(type(error), error, trace)
        if isinstance(error, KeyboardInterrupt):
            flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        return 1


def flush() -> bool:
    ok = True
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            ok = False
    return ok


def finish(code: int) -> None:
    """What an interpreter does at its end, as far as anybody can see. Tearing down a large heap, which nobody sees,
    takes half a second."""
    try:
        vars(threading)["_shutdown"]()
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code if flush() else code or 120)


def keep_finalizers() -> None:
    """What was made before a fork is the zygote's: its workers must neither delete it (a temporary directory, say)
    nor spend time on it (torch registers hundreds of finalizers, 35 ms of every exit)."""
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        finalizer.atexit = False


def thread_setters() -> list[Callable[[int], Any]]:
    """Functions that set the thread count of the maths libraries loaded by now. They took theirs (1) at import."""
    found, names = [], ("openblas_set_num_threads", "scipy_openblas_set_num_threads", "MKL_Set_Num_Threads")
    with open("/proc/self/maps") as file:
        paths = {line.split(None, 5)[5].strip() for line in file if ".so" in line}
    for path in paths:
        base = os.path.basename(path).lower()
        if "openblas" in base or "mkl_rt" in base:
            library = ctypes.CDLL(path)
            for name in names:
                for symbol in (name, name + "64_"):
                    if hasattr(library, symbol):
                        found.append(getattr(library, symbol))
    if "torch" in sys.modules:
        found.append(sys.modules["torch"].set_num_threads)
    return found


if __name__ == "__main__":
    become_exec(sys.argv[1])
