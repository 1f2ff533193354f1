"""Processes as Linux shows them in /proc (proc(5)): who descends from whom, and the end of all of them; and signals as
events: the handler sets a flag and does nothing else, and a pipe wakes whoever waits.

Launchers put ranks into sessions of their own and may die before them, so neither a process group nor a launcher's exit
says that the ranks are gone.
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
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING
from weakref import WeakSet

if TYPE_CHECKING:
    from subprocess import Popen

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
_LIBC = ctypes.CDLL(None, use_errno=True)
_spared: set[int] = set()
# Slurm sends TERM (preemption) or the `--signal` of the script (USR2); PBS sends TERM; sites may choose USR1.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def spare(pid: int) -> None:
    """From now on a child is not counted among the children and descendants of any process, so it is not ended."""
    _spared.add(pid)


def adopt_orphans() -> None:
    """From now on, descendants whose parent dies become children of this process instead of init's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def ends_with_parent() -> None:
    """For Popen's `preexec_fn`: the child is KILLed when the thread that started it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def outlives_parent() -> None:
    """From now on this process decides by itself what the end of its parent means."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option})")


@cache
def process_namespace() -> str:
    """A process number means the same process to all who have this: on one machine since its last boot, in one
    namespace of processes. Machines may share a name, and containers that of their machine.
    """
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")[:8]
    return f"{socket.gethostname()}-{boot}-{os.stat('/proc/self/ns/pid').st_ino}"


def start_ticks(pid: int) -> int:
    """When this process or a child of it started, in clock ticks since boot; a zombie still tells."""
    fields = _stat(pid)
    if fields is None:
        raise ProcessLookupError(pid)
    return int(fields[19])


def is_running(pid: int, ticks: int) -> bool:
    """Whether the process that started at `ticks` runs: a zombie has ended, and another may have its number by now."""
    fields = _stat(pid)
    return fields is not None and fields[0] != "Z" and int(fields[19]) == ticks


def is_stopped(pid: int) -> bool:
    """Whether a signal such as SIGSTOP has stopped it; one that a debugger holds is not."""
    fields = _stat(pid)
    return fields is not None and fields[0] == "T"


def descendants(pid: int) -> list[int]:
    """All living processes below `pid`, children before grandchildren."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents():
        children.setdefault(parent, []).append(child)
    found = [pid]
    for process in found:
        found += children.get(process, [])
    return found[1:]


def children(pid: int) -> list[int]:
    """The living children of `pid`, those that it has adopted among them."""
    return [child for child, parent in _parents() if parent == pid]


def kill_tree(process: Popen[bytes]) -> None:
    """KILL a child of this process and all that descends from it, and reap the child. Nothing where it has ended."""
    for pid in [process.pid, *descendants(process.pid)] if process.poll() is None else []:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def end_descendants(deadline_s: float = 10.0) -> None:
    """KILL every descendant of this process and reap it. Needs `adopt_orphans` to miss none."""
    _end(lambda: descendants(os.getpid()), deadline_s)


def end_other_sessions(deadline_s: float = 10.0) -> None:
    """The same, but for what stays in the session of this process: commands that its threads run."""
    _end(lambda: [process for process in descendants(os.getpid()) if _session(process) != os.getsid(0)], deadline_s)


def _end(processes: Callable[[], list[int]], deadline_s: float) -> None:
    end = time.monotonic() + deadline_s
    killed: set[int] = set()
    while left := processes():
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        killed.update(left)
        if time.monotonic() > end:  # a process in uninterruptible sleep: the scheduler's own clean-up takes over
            break
        time.sleep(0.005)
    _reap(killed)


def _session(pid: int) -> int | None:
    with suppress(ProcessLookupError):
        return os.getsid(pid)
    return None


def _reap(processes: Iterable[int]) -> None:
    """Of other children the exit codes are left to whom waits for them, such as a thread that runs a command."""
    for process in processes:
        with suppress(ChildProcessError):
            os.waitpid(process, os.WNOHANG)


def _parents() -> Iterator[tuple[int, int]]:
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) in _spared:
            continue
        if (fields := _stat(int(name))) is not None and fields[0] != "Z":
            yield int(name), int(fields[1])


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the command's name, which may hold blanks and brackets: state, parent, ..."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # hidepid hides other users' processes (proc(5))
        return None


def exit_code(returncode: int) -> int:
    """subprocess' in a shell's words: 128 more than the number of the signal that ended a process (sh(1))."""
    return returncode if returncode >= 0 else 128 - returncode


def signal_name(number: int) -> str:
    """Return "SIGKILL" for 9, and the number of a real-time signal, most of which have no name (signal(7))."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def has_no_memory(pid: int) -> bool:
    """Whether nothing of a process runs any more: it ends, or has ended (proc(5): its command line is empty then)."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return not file.read(1)
    except (FileNotFoundError, ProcessLookupError):
        return True


class SignalPipe:
    """Turns signals into bytes that make `fd` readable, even while the main thread is inside a C call (signal(7)).

    In a forked child they have their default actions again: the pipe is the parent's, and so are the news in it.
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
        """The signals since the last call. CHLD and others come through the pipe too, where a library handles them."""
        try:
            numbers = os.read(self.fd, 4096)
        except BlockingIOError:
            return []
        return [signal.Signals(number) for number in numbers if number in self._signals]

    def close(self) -> None:
        """As before it was made."""
        _open.discard(self)
        signal.set_wakeup_fd(self._former_fd)
        for number, handler in self._former.items():
            signal.signal(number, handler)
        os.close(self.fd)
        os.close(self._write)

    def _let_go(self) -> None:
        signal.set_wakeup_fd(-1)
        for number in self._signals:
            signal.signal(number, signal.SIG_DFL)


_open: WeakSet[SignalPipe] = WeakSet()


def _let_go() -> None:
    for pipe in list(_open):
        pipe._let_go()


os.register_at_fork(after_in_child=_let_go)


def _nothing(signum: int, frame: FrameType | None) -> None:
    """The wake-up pipe carries the news; this only keeps the default action away."""


def ignore_stop_signals() -> None:
    """Ignore them in this process and in all that it starts: the agent answers them. Also for Popen's `preexec_fn`.

    torchrun dies of USR1 and USR2 and leaves its ranks behind; mpirun kills them a second after TERM (measured). With
    proctrack/linuxproc Slurm signals every descendant, so a session of its own is not shelter enough.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """A Ctrl-C is heard at the end of this block, or of what it decorates; in other threads than main there is none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    former = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
        if came:
            signal.raise_signal(signal.SIGINT)


def block_stop_signals() -> None:
    """This process and all that it starts get no stop signal, until one of them calls `unblock_stop_signals`.

    For launchers that set handlers of their own, as mpirun and deepspeed do: what is ignored they would hear again,
    what is blocked they do not (signal(7)). bash hands that on, dash does not. srun takes its signals all the same.
    """
    ignore_stop_signals()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def unblock_stop_signals() -> None:
    """For a rank whose launcher has blocked them: signals are ignored, and arrive where it sets handlers."""
    ignore_stop_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
