"""Measure how busy this machine is: a deadline may have passed because the machine stalled."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def busy() -> str:
    """Return the load; the shares of the last 10, 60 and 300 s in which a task waited for a core, the disk or memory;
    and the share since the boot in which a hypervisor gave the cores to others (proc(5): /proc/pressure, /proc/stat).
    """
    pressures = [f"{file.name}: {file.read_text().splitlines()[0]}" for file in _pressures()]
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return "\n".join([f"load: {os.getloadavg()}", *pressures, f"stolen: {ticks[7] / sum(ticks):.1%}"])


def _pressures() -> list[Path]:
    """Return the files that this kernel has, possibly none."""
    return [file for name in ("cpu", "io", "memory") if (file := Path("/proc/pressure", name)).exists()]


def slowness() -> float:
    """Return the factor by which work that needs a core takes longer now than on an idle machine; at least 1."""
    began, used = time.perf_counter(), time.thread_time()
    while (took_s := time.thread_time() - used) < 0.05:
        pass
    return max((time.perf_counter() - began) / took_s, 1.0)


@contextmanager
def standstill_s() -> Iterator[list[float]]:
    """Yield a list whose one element becomes the longest time [s] for which this process stalled in the block: a
    thread that wakes up every 10 ms did not run. The machine may have stalled, or other processes had all cores.
    """
    over, longest = threading.Event(), [0.0]

    def look() -> None:
        before = time.monotonic()
        while not over.wait(0.01):
            longest[0], before = max(longest[0], time.monotonic() - before), time.monotonic()
        longest[0] = max(longest[0], time.monotonic() - before)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield longest
    finally:
        over.set()
        looking.join()


def smallest(measure: Callable[[], float], limit: float) -> float:
    """Return the smallest of ten measurements, or the first below the limit: a shared machine stalls now and
    then, but not each time.
    """
    found = math.inf
    for _ in range(10):
        found = min(found, measure())
        if found < limit:
            break
    return found


def resident_bytes() -> int:
    """Return the resident memory of this process (proc(5))."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
