"""What a node does while it trains: a look every second, off the training thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hpc_det.pytorch.profiling.gpus import Gpus
from hpc_det.pytorch.profiling.lines import Lines

EVERY_S = 1.0
"""A look takes about a millisecond of a core, and the driver's own use of a GPU is a mean of up to a second."""


@dataclass(frozen=True)
class Counters:
    """Of all disks and networks of the node, since its start."""

    time: float
    disk_operations: int
    disk_read: int
    disk_write: int
    net_sent: int
    net_received: int

    def rates(self, before: Counters) -> dict[str, float]:
        """A second, between the two."""
        seconds = max(self.time - before.time, 1e-9)
        return {
            "disk_iops": (self.disk_operations - before.disk_operations) / seconds,
            "disk_read": (self.disk_read - before.disk_read) / seconds,
            "disk_write": (self.disk_write - before.disk_write) / seconds,
            "net_sent": (self.net_sent - before.net_sent) / seconds,
            "net_received": (self.net_received - before.net_received) / seconds,
        }


class SystemMetrics:
    """Of the node of this rank, while it is open."""

    def __init__(self, lines: Lines, facts: Mapping[str, Any]) -> None:
        """`facts`: what each line says."""
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
        """A line about what was since the last look."""
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
        """After a last look."""
        self._end.set()
        self._thread.join()
        self._gpus.close()

    def _run(self) -> None:
        """Where the file cannot be written, training goes on without."""
        try:
            self._psutil.cpu_percent()  # the next answer is the mean from here on
            while not self._end.wait(EVERY_S):
                self.look()
            self.look()
            self._lines.write()
        except OSError as error:
            print(f"hpc-det: no more system metrics: {error}", flush=True)

    def _counters(self) -> Counters:
        """A node without disks has no operations, nor one that does not tell of them."""
        disk, net = _told(self._psutil.disk_io_counters), _told(self._psutil.net_io_counters)
        return Counters(
            time=time.monotonic(),
            disk_operations=disk.read_count + disk.write_count if disk else 0,
            disk_read=disk.read_bytes if disk else 0,
            disk_write=disk.write_bytes if disk else 0,
            net_sent=net.bytes_sent if net else 0,
            net_received=net.bytes_recv if net else 0,
        )


def _told(count: Callable[[], Any]) -> Any:
    """None where the node has no such file: psutil says NotImplementedError then."""
    try:
        return count()
    except (NotImplementedError, OSError):
        return None
