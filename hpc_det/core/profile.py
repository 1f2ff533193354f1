"""Where the time of a loop goes: a line for each stretch of batches on each rank, and system metrics of each node.

A loop is measured if `profiling.enabled` is set, from `profiling.begin_on_batch` to `profiling.end_after_batch`. The
time of `batches` to get the next batch counts as dataloader_next, that of the body as train_batch, without the parts of
it that the loop names itself. Without profiling, nothing of this is executed.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from hpc_det.core.progress import Progress
from hpc_det.core.saver import CheckpointSaver
from hpc_det.core.system_metrics import BufferedLines, SystemMetrics
from hpc_det.core.timer import Timer, synchronized
from hpc_det.distributed.collectives import Distributed
from hpc_det.node.files import make_folder
from hpc_det.store.folders import TrialFolder


class Profile:
    """The measurements of a loop on one rank, and of its node on the first rank there."""

    def __init__(
        self,
        profiling: Mapping[str, Any],
        trial: TrialFolder,
        attempt: int,
        distributed: Distributed,
        progress: Progress,
    ) -> None:
        """`profiling`: the section of that name in the configuration. `progress` changes as the loop trains."""
        self.enabled = bool(profiling.get("enabled"))
        """Whether `profiling.enabled` is set."""
        last = profiling.get("end_after_batch")
        self._first: int = profiling.get("begin_on_batch", 0)
        self._end = math.inf if last is None else last + 1
        self._trial = trial
        self._distributed = distributed
        self._progress = progress
        self._facts = {"attempt": attempt, "host": socket.gethostname()}
        device = distributed.device
        self._timer = Timer(synchronized(device)) if profiling.get("sync_timings", True) else Timer()
        self._timings: Timings | None = None
        """Timings of the current stretch of batches."""
        self._system: SystemMetrics | None = None
        self._records = 0
        """Number of records that this rank has trained."""

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """Return a context manager around a part of the body, whose time counts under `name`."""
        return self._timer.timing(name) if self._timings else nullcontext()

    def measure(self, saver: CheckpointSaver) -> None:
        """Let the time of saves count as checkpoint, if profiling is enabled."""
        if self.enabled:
            self._timer.time(saver, "save", "checkpoint")
            self._timer.time(saver, "settle", "checkpoint")

    def over(self, batches: Iterator[Any], records: int) -> Iterator[Any]:
        """Return an iterator of the same batches that measures the loop over them; `batches` itself if not enabled.

        `records`: number of records in a batch; 0 if it is unknown.
        """
        return self._measured(batches, records) if self.enabled else batches

    def close(self) -> None:
        """Write everything that was measured."""
        if self._timings:
            self._timings.end(self._progress, self._records)
        if self._system:
            self._system.close()
        self._timings = self._system = None

    def _measured(self, batches: Iterator[Any], records: int) -> Iterator[Any]:
        for batch in self._timer.timed_batches("dataloader_next", batches):
            if self._first <= self._progress.steps < self._end and not self._timings:
                self._begin()
            with self("train_batch"):
                yield batch
            self._records += records
            if self._timings:
                self._timings.at(self._progress, self._records)
            if self._progress.steps >= self._end:
                self.close()

    def _begin(self) -> None:
        rank, local_size = self._distributed.rank, self._distributed.local_size
        make_folder(self._trial.profile)
        self._timings = Timings(
            self._timer, None, BufferedLines(self._trial.timings(rank)), self._facts, self._distributed.size
        )
        if self._distributed.local_rank == 0:
            self._system = SystemMetrics(BufferedLines(self._trial.system_metrics(rank // local_size)), self._facts)
        self._timings.begin(self._progress, self._records)


class Taken(Protocol):
    """Measures the exchange of gradients."""

    def take(self, batches: int) -> float | None:
        """Return the seconds of it that computing did not hide in the last `batches`; None if they are unknown."""


SHORTEST_S = 1.0
"""Shortest duration of a stretch in seconds, and of an epoch whose end also ends a stretch.

A small model trains thousands of batches a second, too many for a line each.
"""


class Timings:
    """Writes a line for each stretch of batches.

    The time of a stretch includes what is due at its end, such as validations and checkpoints.
    """

    def __init__(
        self, timer: Timer, exchange: Taken | None, lines: BufferedLines, facts: Mapping[str, Any], shares: int
    ) -> None:
        """`facts`: fields of each line. `shares`: number of ranks that train on different records."""
        self._timer = timer
        self._exchange = exchange
        self._lines = lines
        self._facts = facts
        self._shares = shares

    def begin(self, progress: Progress, records: int) -> None:
        """Start the first stretch. `records`: number of records that this rank has trained so far."""
        self._stretch = self._epoch = Mark.now(progress, records)
        self._timer.start()

    def at(self, progress: Progress, records: int) -> None:
        """Note that training has reached a batch; if the stretch was long enough, start the next one."""
        since = self._epoch if progress.epoch_ended else self._stretch
        if time.perf_counter() - since.time >= SHORTEST_S:
            self._end_stretch(progress, records)

    def end(self, progress: Progress, records: int) -> None:
        """End the last stretch, and write all lines to the file."""
        self._timer.stop()
        self._end_stretch(progress, records)
        self._lines.write()

    def _end_stretch(self, progress: Progress, records: int) -> None:
        now, begun = Mark.now(progress, records), self._stretch
        if now.batches == begun.batches:
            return
        self._stretch = now
        if progress.epoch_ended:
            self._epoch = now
        wall_s, count = now.time - begun.time, now.batches - begun.batches
        self._lines.add(
            {
                "time": time.time(),
                **self._facts,
                "epoch": progress.last_epoch,
                "batches": now.batches,
                "count": count,
                "wall_s": round(wall_s, 6),
                "records": now.records - begun.records,
                "samples_per_second": round((now.records - begun.records) * self._shares / wall_s, 3),
                "seconds": {name: round(seconds, 6) for name, seconds in self._timer.take().items()},
                "exposed_communication_s": self._exchange.take(count) if self._exchange else None,
            }
        )


@dataclass(frozen=True)
class Mark:
    """The start of a stretch."""

    time: float
    batches: int
    records: int
    """Records of this rank."""

    @classmethod
    def now(cls, progress: Progress, records: int) -> Mark:
        return cls(time.perf_counter(), progress.steps, records)
