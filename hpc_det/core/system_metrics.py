"""Load of a node while it trains: a sample every second, taken by a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_det.node.json_files import append_lines

EVERY_S = 1.0
"""Seconds between samples. A sample takes about a millisecond of a core. The GPU use that the driver reports is a mean
over up to a second.
"""


class SystemMetrics:
    """Samples the node of this rank while it is open."""

    def __init__(self, lines: BufferedLines, facts: Mapping[str, Any]) -> None:
        """`facts`: fields of each line."""
        import psutil

        self._psutil = psutil
        self._lines = lines
        self._facts = facts
        self._end = threading.Event()
        self._before = self._counters()
        self._gpus = Gpus()
        self._thread = threading.Thread(target=self._run, name="hpc-det system metrics", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Add a line about the time since the last sample."""
        now = self._counters()
        self._lines.add(
            {
                "time": time.time(),
                **self._facts,
                "cpu_util": self._psutil.cpu_percent(),
                "memory_free": self._psutil.virtual_memory().available,
                **{name: round(rate, 3) for name, rate in now.rates(self._before).items()},
                "gpus": self._gpus.look(),
            }
        )
        self._before = now

    def close(self) -> None:
        """Stop after a last sample."""
        self._end.set()
        self._thread.join()
        self._gpus.close()

    def _run(self) -> None:
        """Sample until closed. If the file cannot be written, training continues without samples."""
        try:
            self._psutil.cpu_percent()  # starts the interval of the next value
            while not self._end.wait(EVERY_S):
                self.look()
            self.look()
            self._lines.write()
        except OSError as error:
            print(f"hpc-det: system metrics are disabled: {error}", flush=True)

    def _counters(self) -> Counters:
        """Return the counters. A node without disks, or without statistics of them, has zeros."""
        disk, net = _counted(self._psutil.disk_io_counters), _counted(self._psutil.net_io_counters)
        return Counters(
            time=time.monotonic(),
            disk_operations=disk.read_count + disk.write_count if disk else 0,
            disk_read=disk.read_bytes if disk else 0,
            disk_write=disk.write_bytes if disk else 0,
            net_sent=net.bytes_sent if net else 0,
            net_received=net.bytes_recv if net else 0,
        )


@dataclass(frozen=True)
class Counters:
    """Counters of all disks and networks of the node since its start: operations, and bytes read, written and sent."""

    time: float
    """Monotonic time of the sample, in seconds."""
    disk_operations: int
    disk_read: int
    disk_write: int
    net_sent: int
    net_received: int

    def rates(self, before: Counters) -> dict[str, float]:
        """Return the rates per second between two samples."""
        seconds = max(self.time - before.time, 1e-9)
        return {
            "disk_iops": (self.disk_operations - before.disk_operations) / seconds,
            "disk_read": (self.disk_read - before.disk_read) / seconds,
            "disk_write": (self.disk_write - before.disk_write) / seconds,
            "net_sent": (self.net_sent - before.net_sent) / seconds,
            "net_received": (self.net_received - before.net_received) / seconds,
        }


def _counted(count: Callable[[], Any]) -> Any:
    """Return the counters, or None without the files in /proc that psutil reads (NotImplementedError, OSError)."""
    try:
        return count()
    except (NotImplementedError, OSError):
        return None


class Gpus:
    """GPUs visible in the job's cgroup or container; none without GPUs or without the driver."""

    def __init__(self) -> None:
        self._nvml, self._handles = _started()

    def look(self) -> dict[str, dict[str, float]]:
        """Return {UUID: {"util": percent of the time with a running kernel, "memory_free": bytes}}.

        A GPU that is divided into MIG devices does not report its use, and is left out.
        """
        return dict(self._answers())

    def _answers(self) -> Iterator[tuple[str, dict[str, float]]]:
        nvml = self._nvml
        for uuid, handle in self._handles.items():
            try:
                util, memory = nvml.nvmlDeviceGetUtilizationRates(handle), nvml.nvmlDeviceGetMemoryInfo(handle)
            except nvml.NVMLError:
                continue
            yield uuid, {"util": float(util.gpu), "memory_free": int(memory.free)}

    def close(self) -> None:
        if self._handles:
            self._nvml.nvmlShutdown()


def _started() -> tuple[Any, dict[str, Any]]:
    """Return the library, and a handle for each GPU by its UUID."""
    try:
        import pynvml
    except ImportError:
        return None, {}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return pynvml, {}
    return pynvml, dict(_handles(pynvml))


def _handles(nvml: Any) -> Iterator[tuple[str, Any]]:
    """Yield the GPUs that answer: one that has fallen off the bus does not, and may belong to another job."""
    for index in range(nvml.nvmlDeviceGetCount()):
        with suppress(nvml.NVMLError):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            yield nvml.nvmlDeviceGetUUID(handle), handle


WRITTEN_S = 10.0
"""Seconds between two writes, as in Determined's profiler."""


class BufferedLines:
    """Lines for a file with one writer, written in groups, since each write costs as much as many lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: list[dict[str, Any]] = []
        self._written = time.monotonic()

    def add(self, record: dict[str, Any]) -> None:
        self._waiting.append(record)
        if time.monotonic() - self._written >= WRITTEN_S:
            self.write()

    def write(self) -> None:
        """Write all waiting lines."""
        if self._waiting:
            append_lines(self._path, self._waiting, durable=False)
            self._waiting = []
        self._written = time.monotonic()
