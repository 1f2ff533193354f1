"""Reports of a loop's metrics: rank 0 writes them to the trial's files and to TensorBoard.

A report is converted at once and written soon: a loop may report at every batch, and a write costs as much as a small
batch. The first report after a pause is written at once, the others together after WRITE_S, by a thread, so that the
last one is visible even if the loop then does something that takes long.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hpc_det.core.tensorboard import TensorBoard
from hpc_det.distributed.metrics import MetricsLog, spelled

WRITE_S = 1.0
"""Seconds between two writes of training metrics."""


class Reports:
    """The reports of one loop. Rank 0 alone creates one."""

    def __init__(self, log: MetricsLog, tensorboard: TensorBoard) -> None:
        self._log = log
        self._tensorboard = tensorboard
        self._writing = threading.RLock()
        """Held during a write, which may take long; `training` waits for it only if it writes itself."""
        self._lock = threading.Lock()
        """Protects `_waiting`."""
        self._waiting: list[tuple[int, dict[str, Any], float]] = []
        """Training reports that are not written yet: batches, metrics, and the time in seconds since the epoch."""
        self._write_at = 0.0
        """Seconds of time.monotonic from which on a training report is written at once; infinite during a write."""
        self._thread: threading.Thread | None = None
        self._has_news, self._is_closed = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        """The error of a write by the thread, which the next call raises."""
        self.total: int | None = None
        """Number of batches of the whole trial; None if it is unknown."""

    def training(self, steps: int, metrics: Mapping[str, Any]) -> None:
        """Report training metrics after `steps` batches. Values on a GPU are copied, and read when they are written.

        Raises the error of an earlier write.
        """
        if self._error:
            raise self._error
        report = steps, {name: _kept(value) for name, value in metrics.items()}, time.time()
        with self._lock:
            is_alone = not self._waiting  # otherwise the thread writes them soon
            self._waiting.append(report)
        if is_alone and time.monotonic() >= self._write_at:
            self.write()
        elif not self._has_news.is_set():
            self._wake()

    def validation(self, steps: int, metrics: Mapping[str, Any]) -> None:
        """Report validation metrics, which are written at once."""
        with self._writing:
            self.write()
            self._log.report("validation", steps, self.total, metrics)
            self._tensorboard.report("validation", steps, metrics)

    def group(self, group: str, steps: int, metrics: Mapping[str, Any]) -> None:
        """Report metrics of another group, which are written at once."""
        with self._writing:
            self._log.report_group(group, steps, metrics)
            self._tensorboard.report("training", steps, {f"{group}/{name}": value for name, value in metrics.items()})

    def write(self) -> None:
        """Write the training reports that are waiting."""
        with self._writing:
            self._write_at = math.inf
            with self._lock:
                waiting, self._waiting = self._waiting, []
            records = [
                {"kind": "training", "steps": steps, "total": self.total, "metrics": spelled(metrics), "time": at}
                for steps, metrics, at in waiting
            ]
            if records:
                self._log.report_all(records)
            for record in records:
                self._tensorboard.report("training", record["steps"], record["metrics"])
            self._write_at = time.monotonic() + WRITE_S

    def flush(self) -> None:
        """Write all reports, and flush them to disk. Any thread may call this."""
        self.write()
        self._log.flush()

    def saved(self, steps: int, checkpoint: Path) -> None:
        """Take note of a committed checkpoint."""
        self._log.saved(steps, checkpoint)

    def close(self) -> None:
        """Write the reports that are waiting, as before an error, and end the thread."""
        self._is_closed.set()
        self._has_news.set()
        if self._thread:
            self._thread.join()
        if self._error is None:
            self.write()

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_later, name="reports", daemon=True)
            self._thread.start()
        self._has_news.set()

    def _write_later(self) -> None:
        while self._has_news.wait() and not self._is_closed.wait(WRITE_S):
            self._has_news.clear()
            if self._is_closed.is_set():
                return  # `close` has set both events since the wait, and has_news was cleared
            try:
                self.write()
            except BaseException as error:
                self._error = error
                return


def _kept(value: Any) -> Any:
    """Return a value that later changes of the loop do not reach."""
    if isinstance(value, torch.Tensor):
        # reading a GPU's value now would wait for the GPU
        return value.item() if value.is_cpu and not value.ndim else value.detach().clone()
    return value if isinstance(value, (int, float, str)) else spelled(value)
