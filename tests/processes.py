"""The processes of this machine, with those of its labs' nodes, as Linux shows them (proc(5))."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def pids() -> list[int]:
    return sorted(int(name) for name in os.listdir("/proc") if name.isdecimal())


def words(pid: int, file: str) -> list[str]:
    """Return the words of `cmdline` or `environ`; one empty word if it has ended or is another user's."""
    return _read(pid, file).split("\0")


def modules(pid: int) -> list[str]:
    """Return the word after each -m on the command line of `pid`."""
    return [following for word, following in itertools.pairwise(words(pid, "cmdline")) if word == "-m"]


def running(module: str, folder: Path) -> list[int]:
    """Return the PIDs of Pythons that run `-m module` with that folder as an argument. A shell or srun that starts one
    does not count, nor does a process that was forked from one.
    """
    return [pid for pid in programs(module) if str(folder) in _command(pid)]


def programs(module: str) -> list[int]:
    """Return the PIDs of Pythons that were executed as `-m module`."""
    found = [pid for pid in pids() if _is_python(pid) and module in modules(pid)[:1]]
    return [pid for pid in found if _command(_state_and_parent(pid)[1]) != _command(pid)]


def agents(trial: Path) -> list[int]:
    """Return the PIDs of the node agents of a trial, given the path of its folder."""
    return running("hpc_det.launch.agent", trial)


def ranks(trial: Path, attempt: int | None = None, rank: int | None = None) -> list[int]:
    """Return the PIDs of processes that print into the log of a rank. None: of any attempt, of any rank."""
    numbers = (r"\d+" if number is None else str(number) for number in (attempt, rank))
    log = re.compile(re.escape(str(trial)) + "/logs/attempt-{}/rank-{}.log".format(*numbers))
    return [pid for pid in pids() if log.fullmatch(_stdout(pid))]


def ancestors(pid: int) -> list[int]:
    """Return the PIDs of the ancestors, the parent first."""
    found = list[int]()
    while pid > 1:
        _, pid = _state_and_parent(pid)
        found.append(pid)
    return found


def runs(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    return _state_and_parent(pid)[0] not in "ZX"


def send(processes: Iterable[int], number: int) -> None:
    """Send a signal to those processes that still run."""
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _state_and_parent(pid: int) -> tuple[str, int]:
    state, parent = (_read(pid, "stat").rpartition(")")[2].split() or ["X", "0"])[:2]
    return state, int(parent)


def _command(pid: int) -> list[str]:
    return words(pid, "cmdline")


def _is_python(pid: int) -> bool:
    return Path(_command(pid)[0]).name.startswith("python")


def _read(pid: int, file: str) -> str:
    try:
        return Path(f"/proc/{pid}/{file}").read_text(errors="replace")
    except OSError:
        return ""


def _stdout(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/1")
    except OSError:
        return ""
