"""Processes as Linux shows them in /proc (proc(5)), ending them, and signals as events.

Launchers put ranks into separate sessions and may die before them, so neither a process group nor a launcher's exit
shows that the ranks have ended; this module follows the tree of processes instead. A signal handler here does nothing;
a pipe wakes the main loop, which reads the signals from it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING
from weakref import WeakSet

if TYPE_CHECKING:
    from subprocess import Popen

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
_LIBC = ctypes.CDLL(None, use_errno=True)
_spared: set[int] = set()
"""Process ids that `spare` was called with."""
# Slurm sends TERM (preemption) or the `--signal` of the script (USR2); PBS sends TERM; sites may choose USR1. INT and
# HUP come from a terminal.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""The signals that mean a stop request."""


def spare(pid: int) -> None:
    """Leave this process out of all lists of children and descendants from now on, so that it is not killed with them.

    Its own descendants stay in these lists.
    """
    _spared.add(pid)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies, instead of init, from now on."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def ends_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send a signal to this process when the thread that started it ends. For Popen's `preexec_fn`."""
    _prctl(_PR_SET_PDEATHSIG, number)


def outlives_parent() -> None:
    """Undo `ends_with_parent`: this process decides what to do when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option})")


@cache
def process_namespace() -> str:
    """Return a name of the machine, its boot, and the PID namespace.

    A process id refers to the same process wherever this name is the same.
    """
    # The host name is not enough: machines may share one, and containers have that of their machine.
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")[:8]
    return f"{socket.gethostname()}-{boot}-{os.stat('/proc/self/ns/pid').st_ino}"


def start_ticks(pid: int) -> int:
    """Return when the process started, in clock ticks since boot; also for a zombie. Raises ProcessLookupError."""
    fields = _stat(pid)
    if fields is None:
        raise ProcessLookupError(pid)
    return int(fields[19])


def is_running(pid: int, ticks: int) -> bool:
    """Return whether the process that started at `ticks` is still running."""
    fields = _stat(pid)
    # A zombie has ended. A different start means that another process has the number now.
    return fields is not None and fields[0] != "Z" and int(fields[19]) == ticks


def is_stopped(pid: int) -> bool:
    """Return whether a signal such as SIGSTOP has stopped the process. One held by a debugger (state "t") does not
    count.
    """
    fields = _stat(pid)
    return fields is not None and fields[0] == "T"


def descendants(pid: int) -> list[int]:
    """Return all living processes below `pid`, children before grandchildren."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents():
        children.setdefault(parent, []).append(child)
    found = [pid]
    for process in found:
        found += children.get(process, [])
    return [process for process in found[1:] if process not in _spared]


def children(pid: int) -> list[int]:
    """Return the living children of `pid`, adopted ones included."""
    return [child for child, parent in _parents() if parent == pid and child not in _spared]


def programs(parent: int) -> dict[int, str]:
    """Return the programs of the children of `parent` for messages, keyed by process id; empty if there are none.

    That is a program and its script or module, such as "python3 train.py": other arguments may be secrets.
    """
    with suppress(OSError):
        pids = map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split())
        found = {pid: words for pid in pids if (words := _command_line(pid))}
        own = _command_line(parent) if found else []  # also that of a child which has not executed its program yet
        return {pid: _without_arguments(pid, words) for pid, words in found.items() if words != own}
    return {}


def _command_line(pid: int) -> list[str]:
    """Return the command line of a process; empty if it is exiting or has exited."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0")
        return words.split("\0") if words else []
    return []


def _without_arguments(pid: int, words: list[str]) -> str:
    program = words[0].partition(" ")[0]  # a process that has set its title has all of its arguments here
    for option, word in pairwise(words):
        if option == "-m" and "python" in program:
            return f"{program} -m {word}"
        if os.path.isfile(f"/proc/{pid}/root{word}" if word.startswith("/") else f"/proc/{pid}/cwd/{word}"):
            return f"{program} {word}"
    return program


def kill_tree(process: Popen[bytes]) -> None:
    """Send SIGKILL to a child of this process and to its descendants, and reap it; only reap it if it has ended."""
    for pid in [process.pid, *descendants(process.pid)] if process.poll() is None else []:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def end_descendants(deadline_s: float = 10.0) -> None:
    """Send SIGKILL to every descendant of this process and reap them, for at most `deadline_s`.

    Orphans are found only after `adopt_orphans`.
    """
    _end(lambda: descendants(os.getpid()), deadline_s)


def end_other_sessions(deadline_s: float = 10.0) -> None:
    """Send SIGKILL to the descendants in other sessions than this process's; commands run by its threads survive."""
    _end(lambda: [process for process in descendants(os.getpid()) if _session(process) != os.getsid(0)], deadline_s)


def _end(processes: Callable[[], list[int]], deadline_s: float) -> None:
    """Send SIGKILL to `processes()` until none is left or `deadline_s` is over, then reap them."""
    end = time.monotonic() + deadline_s
    killed: set[int] = set()
    # A process may fork between the listing and the signal, so repeat until none is left.
    while left := processes():
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        killed.update(left)
        if time.monotonic() > end:  # a process in uninterruptible sleep is left to the scheduler's clean-up
            break
        time.sleep(0.005)
    _reap(killed)


def _session(pid: int) -> int | None:
    """Return the session of `pid`, or None if the process has ended."""
    with suppress(ProcessLookupError):
        return os.getsid(pid)
    return None


def _reap(processes: Iterable[int]) -> None:
    """Reap these children and no others: a thread that runs a command needs the exit code of that child."""
    for process in processes:
        with suppress(ChildProcessError):
            os.waitpid(process, os.WNOHANG)


def _parents() -> Iterator[tuple[int, int]]:
    """Yield the ids of each living process and of its parent."""
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        if (fields := _stat(int(name))) is not None and fields[0] != "Z":
            yield int(name), int(fields[1])


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat after the command's name: state, parent, ...; None if it cannot be read."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The name may itself contain blanks and parentheses.
            return file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # hidepid hides other users' processes (proc(5))
        return None


def exit_code(returncode: int) -> int:
    """Return subprocess' return code as a shell's: 128 + N after signal N (sh(1))."""
    return returncode if returncode >= 0 else 128 - returncode


def signal_name(number: int) -> str:
    """Return "SIGKILL" for 9; for most real-time signals, which have no name, the number as text (signal(7))."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def has_no_memory(pid: int) -> bool:
    """Return whether the process is exiting or has exited: its command line is empty then (proc(5))."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return not file.read(1)
    except (FileNotFoundError, ProcessLookupError):
        return True


class SignalPipe:
    """Turns signals into bytes that make `fd` readable, even while the main thread is inside a C call (signal(7)).

    A forked child gets the default actions back.
    """

    def __init__(self, signals: Iterable[signal.Signals]) -> None:
        self._signals = frozenset(signals)
        self.fd, self._write = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write, False)
        self._former_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._former = {number: signal.signal(number, _nothing) for number in self._signals}
        _open.add(self)

    def received(self) -> list[signal.Signals]:
        """Return the signals received since the last call."""
        try:
            numbers = os.read(self.fd, 4096)
        except BlockingIOError:
            return []
        # Python writes every handled signal to the wake-up descriptor, also those that a library handles, such as CHLD.
        return [signal.Signals(number) for number in numbers if number in self._signals]

    def close(self) -> None:
        """Restore the handlers and the wake-up descriptor that were set before."""
        _open.discard(self)
        signal.set_wakeup_fd(self._former_fd)
        for number, handler in self._former.items():
            signal.signal(number, handler)
        os.close(self.fd)
        os.close(self._write)

    def _let_go(self) -> None:
        """Restore the default actions, in a forked child."""
        # The pipe is shared with the parent, which would receive the child's signals as its own.
        signal.set_wakeup_fd(-1)
        for number in self._signals:
            signal.signal(number, signal.SIG_DFL)


_open: WeakSet[SignalPipe] = WeakSet()


def _let_go() -> None:
    """Restore the default actions of every open SignalPipe, in a forked child."""
    for pipe in list(_open):
        pipe._let_go()


os.register_at_fork(after_in_child=_let_go)


def _nothing(signum: int, frame: FrameType | None) -> None:
    """Do nothing: the wake-up pipe reports the signal, and this handler only replaces the default action."""


def ignore_stop_signals() -> None:
    """Ignore the stop signals in this process and its future children. Also for Popen's `preexec_fn`.

    The agent handles them, and launchers must not act on them: torchrun dies on USR1 and USR2 and leaves its ranks
    behind, mpirun kills its ranks a second after TERM (measured). A separate session does not protect them: with
    proctrack/linuxproc Slurm signals every descendant.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


_is_uninterrupted = False
"""Whether the main thread is in a block of `uninterrupted`."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay a Ctrl-C until the end of the block, or of the decorated function."""
    global _is_uninterrupted
    # Python runs signal handlers in the main thread only.
    if threading.current_thread() is not threading.main_thread() or _is_uninterrupted:
        yield
        return
    came: list[int] = []
    former = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    _is_uninterrupted = True
    try:
        yield
    finally:
        _is_uninterrupted = False
        signal.signal(signal.SIGINT, former)
        if came:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def uninterrupted_commands() -> Iterator[None]:
    """Delay a Ctrl-C until the end of the block, and keep it from the commands that the block runs.

    A terminal sends it to them too, and a killed command may have had its effect already.
    """
    with uninterrupted():
        former = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # which commands inherit
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)


def block_stop_signals() -> None:
    """Ignore and block the stop signals in this process and its future children.

    For launchers that install their own handlers, such as mpirun and deepspeed: a handler undoes ignoring, but not
    blocking (signal(7)). A rank calls `unblock_stop_signals`. bash passes the mask on to its commands, dash does not.
    srun handles its signals in any case.
    """
    ignore_stop_signals()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def unblock_stop_signals() -> None:
    """Unblock the stop signals in a rank; they stay ignored until the rank installs handlers."""
    ignore_stop_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
