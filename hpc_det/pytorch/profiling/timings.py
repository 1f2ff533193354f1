"""Where the time of training goes: a line for each stretch of batches, from each rank."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpc_det.pytorch.loop.progress import Progress
from hpc_det.pytorch.profiling.communication import Exchange
from hpc_det.pytorch.profiling.lines import Lines
from hpc_det.pytorch.profiling.timer import Timer

SHORTEST_S = 1.0
"""Of a stretch, and of an epoch that has one of its own: a small model trains thousands of batches a second."""


@dataclass(frozen=True)
class Mark:
    """Where a stretch begins."""

    time: float
    batches: int
    records: int
    """Of this rank."""

    @classmethod
    def now(cls, progress: Progress, records: int) -> Mark:
        return cls(time.perf_counter(), progress.steps, records)


class Timings:
    """What is due at the end of a stretch belongs to it: validations and checkpoints, too."""

    def __init__(
        self, timer: Timer, exchange: Exchange | None, lines: Lines, facts: Mapping[str, Any], shares: int
    ) -> None:
        """`facts`: what each line says. `shares`: of ranks that train on records of their own."""
        self._timer = timer
        self._exchange = exchange
        self._lines = lines
        self._facts = facts
        self._shares = shares

    def begin(self, progress: Progress, records: int) -> None:
        """`records`: of this rank so far, here and below."""
        self._stretch = self._epoch = Mark.now(progress, records)
        self._timer.start()

    def at(self, progress: Progress, records: int) -> None:
        """Training goes on from here: where a stretch was long enough, the next one begins."""
        since = self._epoch if progress.epoch_ended else self._stretch
        if time.perf_counter() - since.time >= SHORTEST_S:
            self._end_stretch(progress, records)

    def end(self, progress: Progress, records: int) -> None:
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
