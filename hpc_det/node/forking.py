"""Forking processes from one that has already imported their modules.

The parent imports and constructs nothing: a thread, a parallel region of OpenMP, an autograd pass or a query for
devices would leave locks and pools behind that do not work in its children (pthread_atfork(3); PyTorch, "Poison fork in
multiprocessing"). `why_not_to_fork` checks that.
"""

from __future__ import annotations

import ctypes
import gc
import io
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from hpc_det.node.frame_modules import modules_from_frames
from hpc_det.node.import_bundle import import_from_bundle
from hpc_det.node.process import ends_with_parent

_WAIT_S = 0.005
"""Seconds between two looks at whether a process has exited."""
_BLAS_THREADS = "OPENBLAS_NUM_THREADS"
_BLAS_SETTERS = (
    "scipy_openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)
"""Names under which builds of OpenBLAS export openblas_set_num_threads."""


def import_all(modules: Iterable[str]) -> None:
    """Import these modules for the children that will be forked, which have the CPU affinity that this process has now.

    Raises OSError if none of its present CPUs is available after the imports.
    """
    cpus = os.sched_getaffinity(0)
    # numpy's OpenBLAS starts its threads at import. `prepare_to_compute` sets the number in children.
    limited = _BLAS_THREADS not in os.environ
    if limited:
        os.environ[_BLAS_THREADS] = "1"
    # Imports make no garbage, so the collector is off meanwhile. gc.freeze exempts their objects from collections, in
    # which each child would traverse them, and so copy the memory pages that it shares with its parent.
    gc.disable()
    import_from_bundle(os.environ)
    try:
        with modules_from_frames():
            for module in modules:
                import_module(module)
    finally:
        gc.freeze()
        gc.enable()
        if limited:
            del os.environ[_BLAS_THREADS]
        # With OMP_PROC_BIND or OMP_PLACES, libgomp binds the thread that loads it, here for all ranks to the same CPU.
        os.sched_setaffinity(0, cpus)


def why_not_to_fork() -> str | None:
    """Return what makes it unsafe to fork ranks from this process; None if it is safe."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"the imported modules have started {threads - 1} threads"
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    # The flag is set only in a child, by a handler of pthread_atfork(3) that the first query for devices registers.
    if cuda and wait_for_code(forked(lambda: int(cuda._is_in_bad_fork()))):
        return "the imported modules have queried the GPUs"
    return None


def forked(run: Callable[[], int], shown_as: Sequence[str] = ()) -> int:
    """Fork a process that calls `run` and exits with the code that it returns; return the process id.

    The child is in a new session and ends with the thread that called this. If it computes, it has to call
    `prepare_to_compute`. `shown_as`: the command line that ps(1) shows for it; none: that of this process.
    """
    flush_output()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _run_child(run, parent, shown_as)
    return pid


def _run_child(run: Callable[[], int], parent: int, shown_as: Sequence[str]) -> NoReturn:
    def begin() -> int:
        ends_with_parent()
        if os.getppid() != parent:  # it had ended before
            return 1
        os.setsid()
        if shown_as:
            show_as(shown_as)
        return run()

    leave_with(begin)


def show_as(words: Sequence[str]) -> None:
    """Have /proc/self/cmdline, and so ps(1), show this command line; what exceeds the length of the present one is cut.

    The kernel reads it from the memory of the process (proc(5), arg_start and arg_end of /proc/PID/stat).
    """
    fields = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    if start:  # 0: the process may not see its own addresses
        line = b"\0".join(map(os.fsencode, words))[: end - start - 1]
        ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)


def prepare_to_compute() -> None:
    """Seed numpy's global generator of random numbers in this child, and give OpenBLAS its threads."""
    _set_blas()
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()  # Python's own generator does so itself


def wait_for_code(pid: int) -> int:
    """Wait for the end of a child; return its exit code, or -N after signal N."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def leave_with(run: Callable[[], int]) -> NoReturn:
    """Call `run` and exit with the code that it returns; after an error, print its traceback and exit with 1."""
    code = 1
    try:
        code = run()
    except BaseException:
        traceback.print_exc()
    finally:
        leave(code)


def leave(code: int) -> NoReturn:
    """Flush the output and exit with `code`, without shutting down the interpreter."""
    # During interpreter shutdown gloo's threads abort in 5 of 24 runs after a successful training (measured).
    flush_output()
    os._exit(code)


def flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


def close_files_of_parent() -> None:
    """Close all files of this child but its output, and give it an empty stdin."""
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2:
            with suppress(OSError):  # that of the listing itself
                os.close(number)
    _empty_stdin()


def _empty_stdin() -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def write_through_to(descriptor: int) -> None:
    """Send all output to `descriptor`, unbuffered as with PYTHONUNBUFFERED, and give this process an empty stdin."""
    _empty_stdin()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    for name, number in (("stdout", 1), ("stderr", 2)):
        former = getattr(sys, name)
        raw = io.FileIO(number, "w", closefd=False)
        stream = io.TextIOWrapper(raw, former.encoding, former.errors, write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.FileIO(0, closefd=False))  # type: ignore[misc]


class Forked:
    """A forked process, with the part of subprocess.Popen's interface that launchers use."""

    def __init__(self, run: Callable[[], int], shown_as: Sequence[str] = ()) -> None:
        """Fork the process: see `forked`."""
        self.pid = forked(run, shown_as)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, -N after signal N; None while the process runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # another part of this process has killed and reaped it
                self.returncode = -signal.SIGKILL
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout_s: float) -> None:
        """Wait until the process has exited, for at most this many seconds."""
        end = time.monotonic() + timeout_s
        while self.poll() is None and time.monotonic() < end:
            time.sleep(_WAIT_S)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def end_like_a_script() -> None:
    """Do what Python does after the last line of a script: wait for threads, and call the functions of `atexit`."""
    import atexit

    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def _set_blas() -> None:
    """Give numpy's OpenBLAS the number of threads that it would have chosen at its import (OpenBLAS, README)."""
    wanted = next(filter(None, map(os.environ.get, (_BLAS_THREADS, "GOTO_NUM_THREADS", "OMP_NUM_THREADS"))), "")
    cpus = len(os.sched_getaffinity(0))
    number = min(int(wanted), cpus) if wanted.isdecimal() and int(wanted) else cpus
    if number > 1 and (library := _loaded_blas()):  # one thread was set for the imports
        for name in _BLAS_SETTERS:
            if hasattr(library, name):
                getattr(library, name)(number)


def _loaded_blas() -> ctypes.CDLL | None:
    """Return the OpenBLAS that this process has loaded, or None."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    path = next((line.split(maxsplit=5)[5] for line in lines if "openblas" in line), None)
    return ctypes.CDLL(path) if path else None
