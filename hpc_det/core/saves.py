"""The saves of a loop: between two batches, at the end of a pass, on request, and before the exit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpc_det.checkpoint.save_schedule import SaveSchedule
from hpc_det.core.passes import Passes
from hpc_det.core.progress import Batch, Epoch, Position, Progress, TrainUnit
from hpc_det.core.saver import CheckpointSaver
from hpc_det.core.tracked import Tracked
from hpc_det.distributed.preempt import StopAgreement

LOOK = 50
"""Batches between two looks at a save in flight."""


class Saves:
    """The saves of one rank. All ranks call each method at the same batch."""

    def __init__(
        self,
        saver: CheckpointSaver,
        schedule: SaveSchedule,
        period: TrainUnit | None,
        *,
        tracked: Tracked,
        progress: Progress,
        passes: Passes,
    ) -> None:
        """`period`: `min_checkpoint_period` of the configuration. `progress` and `passes` change as the loop trains."""
        self.saver = saver
        self._schedule = schedule
        self._period = period
        self._tracked = tracked
        self._progress = progress
        self._passes = passes
        schedule.begin(progress.steps)
        self._counted, self._counted_at = progress.steps, time.perf_counter()
        """Batches that were reported to the schedule, and when, by time.perf_counter."""
        self._asked = Position(progress.position.epoch, progress.steps)
        """Passes and batches at the last call of `is_due`."""
        self._is_due = False
        self.next = self._next_boundary()
        """Number of batches at which `do_what_is_due` is to be called next."""

    def do_what_is_due(self) -> None:
        """Save if a save is due at this batch; finish the save in flight if it is committed."""
        steps = self._progress.steps
        self._schedule.trained(steps - self._counted, time.perf_counter() - self._counted_at)
        if self._tracked:
            self._take_position()
            self.saver.settle(wait=False)
            self.saver.expect()
            in_period = isinstance(self._period, Batch) and self._period.due(self._progress)
            is_due = self._schedule.is_due(steps) or in_period
            if (is_due or self.saver.is_postponed) and not self.saver.is_saved:
                self.saver.save_when_free()
        self._counted, self._counted_at = steps, time.perf_counter()
        self.next = self._next_boundary()

    def is_due(self) -> bool:
        """Return whether a checkpoint is due, which it stays until there is one. For loops without tracked objects."""
        steps = self._progress.steps
        before, self._asked = self._asked, Position(self._progress.position.epoch, steps)
        self._schedule.trained(steps - self._counted, time.perf_counter() - self._counted_at)
        self._counted, self._counted_at = steps, time.perf_counter()
        in_period = bool(self._period and self._period.passed(before, self._asked))
        self._is_due |= self._schedule.is_due(steps) or in_period
        return self._is_due and not self.saver.is_saved

    def want(self) -> None:
        """Let `is_due` return True until there is a checkpoint."""
        self._is_due = True

    def end_pass(self) -> bool:
        """Count a completed pass, and return whether a save is due."""
        self._passes.end()
        self._progress.position = Position(self._progress.position.epoch + 1)
        self._progress.epoch_ended = True
        return bool(self._tracked) and isinstance(self._period, Epoch) and self._period.due(self._progress)

    def save(self) -> None:
        """Save the tracked objects; training continues while the checkpoint is written."""
        self._take_position()
        self.saver.save()

    def save_and_wait(self) -> None:
        """Save the tracked objects unless they are saved, and wait for the commit."""
        if self._tracked and not self.saver.is_saved:
            self.save()
        self.saver.settle()

    def save_the_rest(self, stop: StopAgreement) -> None:
        """Save what no checkpoint contains, if the deadline of the stop leaves time for it."""
        if self._tracked:
            self._take_position()
            self.saver.save_the_rest(stop)
        self.saver.settle()

    @contextmanager
    def around(self) -> Iterator[Path]:
        """Yield the folder of a checkpoint, into which every rank writes files, and commit it."""
        self._take_position()
        with self.saver.saving() as folder:
            yield folder
        self._is_due = False

    def _take_position(self) -> None:
        """Put the position in the open pass into the progress; counting it there at each batch would cost time."""
        self._progress.position = Position(self._progress.position.epoch, self._passes.done)
        self._progress.epoch_ended = self._passes.done == 0 and self._progress.steps > 0

    def _next_boundary(self) -> float:
        """Return the number of batches at which something may be due next, the same on all ranks."""
        steps = self._progress.steps
        period = self._period.next_boundary(steps) if self._period else float("inf")
        expectation = self.saver.next_expectation
        if expectation <= steps:  # nothing is tracked, so there was nothing to expect; look again later
            expectation = float("inf")
        return min(self._schedule.next_look, expectation, period, steps + LOOK)
