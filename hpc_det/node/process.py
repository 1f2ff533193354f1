"""Processes as Linux shows them in /proc (proc(5)): who descends from whom, and the end of all of them.

Launchers put ranks into sessions of their own and may die before them, so neither a process group nor a launcher's exit
says that the ranks are gone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
_LIBC = ctypes.CDLL(None, use_errno=True)
_spared: set[int] = set()


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
def place() -> str:
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


def has_no_memory(pid: int) -> bool:
    """Whether nothing of a process runs any more: it ends, or has ended (proc(5): its command line is empty then)."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return not file.read(1)
    except (FileNotFoundError, ProcessLookupError):
        return True
