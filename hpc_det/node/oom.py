"""Kills by the kernel's OOM killer, from the counters of the kernel: of this node, and of this process's memory cgroup.

The counters are `oom_kill` of /proc/vmstat (proc(5)), of memory.events (cgroup v2) and of memory.oom_control (cgroup
v1). The kernel log names the killed processes, but ordinary users may read it on few systems.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hpc_det.errors import count

_COUNTER = re.compile(r"(?m)^oom_kill (\d+)$")
_CGROUPS = Path("/sys/fs/cgroup")
_VMSTAT, _OWN, _KERNEL_LOG = Path("/proc/vmstat"), Path("/proc/self/cgroup"), Path("/dev/kmsg")
_LIMITS = ("memory.max", "memory.limit_in_bytes")
_UNLIMITED = 1 << 60
"""cgroup v1 writes a number of this size for no limit."""
_KILLED = re.compile(r"[Kk]illed process (\d+) \(([^)]*)\)")
_JOB = re.compile(r"job[_-]?\d+|\d+(?:\[\d*\])?\.\w")
"""The cgroup of a job of Slurm or PBS; its parents contain other jobs, too."""


class OomWatch:
    """Counts the kills of the OOM killer from its creation on."""

    def __init__(self) -> None:
        self._cgroups = list(_own_cgroups())
        self._node, self._own = self._counts()
        self._began = time.monotonic()

    @property
    def has_killed(self) -> bool:
        """Return whether the OOM killer has ended a process of this job, or any on this node."""
        node, own = self._counts()
        return bool(_more(own, self._own) or _more(node, self._node))

    def killer(self) -> str:
        """Return a phrase for messages that names the sender of a SIGKILL, if the kernel's counters show it."""
        node, own = self._counts()
        if (kills := _more(own, self._own)) is not None and kills > 0:
            return (
                f"the kernel's OOM killer ended {count(kills, 'process')} of this job{self._at_limit()}"
                f"{self._names()}: request more memory (mem_per_node) or use less"
            )
        if (kills := _more(node, self._node)) is None:
            return ""
        if kills > 0:
            return (
                f"the kernel's OOM killer ended {count(kills, 'process')} on this node meanwhile"
                f"{self._names()}: probably memory is short; request more memory (mem_per_node) or use less"
            )
        return "the kernel's OOM killer ended no process on this node, so a user, a program or the scheduler sent it"

    def _counts(self) -> tuple[int | None, int | None]:
        """Return the counters of the node and of the job's cgroups; None for one that cannot be read."""
        own = [kills for folder in self._cgroups if (kills := _count_of_cgroup(folder)) is not None]
        return _count(_VMSTAT), max(own, default=None)

    def _at_limit(self) -> str:
        limits = [limit for folder in self._cgroups if (limit := _limit(folder)) is not None]
        return f", whose memory limit is {min(limits) / 2**30:.1f} GiB" if limits else ""

    def _names(self) -> str:
        """Return the killed processes from the kernel log, or "" if it cannot be read."""
        killed = [f"{name} (process {pid})" for pid, name in _killed_since(self._began)]
        return f", {', '.join(killed[:3])}" if killed else ""


def _more(now: int | None, before: int | None) -> int | None:
    return None if now is None or before is None else now - before


def _own_cgroups() -> Iterator[Path]:
    """Yield the memory cgroup of this process and its parents, up to that of the job; v1 or v2, as it is mounted."""
    with suppress(OSError):
        for line in _OWN.read_text().splitlines():
            _number, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            root = _CGROUPS / controllers if controllers else _CGROUPS
            folder = root / path.lstrip("/")
            folders = [folder, *folder.parents]
            folders = folders[: folders.index(root)]
            job = next((i for i, each in enumerate(folders) if _JOB.match(each.name)), 0)
            yield from (each for each in folders[: job + 1] if each.is_dir())


def _count_of_cgroup(folder: Path) -> int | None:
    counts = [_count(folder / name) for name in ("memory.events", "memory.oom_control")]
    return next((found for found in counts if found is not None), None)


def _count(file: Path) -> int | None:
    with suppress(OSError):
        if found := _COUNTER.search(file.read_text()):
            return int(found[1])
    return None


def _limit(folder: Path) -> int | None:
    """Return the memory limit of a cgroup in bytes, or None."""
    for name in _LIMITS:
        with suppress(OSError, ValueError):
            limit = int((folder / name).read_text())  # "max" without a limit
            return limit if limit < _UNLIMITED else None
    return None


def _killed_since(began: float) -> list[tuple[str, str]]:
    """Return process id and name of each process that the kernel log reports as killed since `began`.

    `began`: seconds on the monotonic clock. Empty if this user may not read the log.
    """
    killed = []
    with suppress(OSError):
        log = os.open(_KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
        try:
            with suppress(BlockingIOError):  # at the end
                while record := os.read(log, 8192):  # "PRIORITY,NUMBER,MICROSECONDS,FLAGS;MESSAGE"
                    head, _, message = record.decode(errors="replace").partition(";")
                    found = _KILLED.search(message)
                    if found and int(head.split(",")[2]) / 1e6 >= began - 1:
                        killed.append((found[1], found[2]))
        finally:
            os.close(log)
    return killed
