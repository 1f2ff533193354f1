"""What rank 0 of a gang does without the other ranks: it reports, takes part in the search and commits checkpoints.

hpc_det.core.Core is collective where ranks have to agree. Some programs do all of this on rank 0 alone, as those
written for Determined's Core API. For them rank 0 creates a Chief; the other ranks have only the Run.

    with in_job() as run:
        chief = Chief(run) if run.distributed.is_chief else None
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpc_det.checkpoint.checkpoints import Put
from hpc_det.checkpoint.committed import CODE, LOAD_DATA, MANIFEST
from hpc_det.checkpoint.retention import Policy
from hpc_det.checkpoint.seals import FileEntry
from hpc_det.core.portable import Portable
from hpc_det.core.progress import PROGRESS, Progress, restored_progress, unit_of
from hpc_det.core.reports import Reports
from hpc_det.core.run import Run
from hpc_det.core.saver import CheckpointSaver
from hpc_det.core.search import Search
from hpc_det.core.tensorboard import TensorBoard
from hpc_det.distributed.collectives import Distributed
from hpc_det.distributed.metrics import plain, spelled
from hpc_det.distributed.preempt import give_notice
from hpc_det.errors import UsageError
from hpc_det.store.metrics import number_in

RESERVED = (PROGRESS, LOAD_DATA, CODE, MANIFEST)
"""Names at the top of a checkpoint that are hpc_det's own."""
_KEEP_ALL = Policy(trial_best=sys.maxsize, trial_latest=sys.maxsize)


class Chief:
    """Rank 0's part in a training whose other ranks take no part in reports, search and checkpoints."""

    def __init__(self, run: Run, *, tensorboard: bool = True) -> None:
        """Verify the newest checkpoint, and continue after it. `tensorboard`: write reported metrics as events.

        Outside a job, no checkpoint is deleted.
        """
        self._run = run
        config = run.spec["config"]
        searcher = config.get("searcher") or {}
        smaller_is_better = searcher.get("smaller_is_better", True)
        alone = replace(run, distributed=Distributed())
        self._checkpointing = alone.checkpointing(_KEEP_ALL, smaller_is_better=smaller_is_better)
        found = self._checkpointing.checkpoints.newest(lambda name: not name.startswith(f"{CODE}/"))
        self._progress = _progress_in(*found) if found else Progress()
        self.metric: str | None = searcher.get("metric")
        """The searcher's metric."""
        self._length = searcher.get("max_length")
        context = run.job.searcher.on_rank_0_alone() if run.job else None
        compares = context is not None and context.compares()
        self.compares = bool(self._length) and compares
        """Whether a search decides how long trials train, by the metrics that they report."""
        self._only_records = context is not None and not compares
        """Whether a search compares no trials."""
        self._search = Search(
            context,
            sets_length=self.compares,
            metric=self.metric,
            smaller_is_better=smaller_is_better,
        )
        self.requested: int | None = None
        """The length at which the search wants the metric next, in `unit`; None: it wants none."""
        self.is_stopped_by_search = False
        """Whether the search wants no more training of this trial, for now or for good."""
        self.tensorboard = TensorBoard(run.folder.tensorboard)
        self.tensorboard.enabled = tensorboard
        self._content = _Files(Portable(run.spec, run.job.code if run.job else None, trial_type="script"))
        self._saver = CheckpointSaver(
            self._content, self._checkpointing, alone.distributed, progress=self._progress, search=self._search,
            log=run.log,
        )  # fmt: skip
        self._reports = Reports(run.log, self.tensorboard)
        self._begin(is_resumed=found is not None)

    @property
    def steps(self) -> int:
        """The number of batches of the latest report or checkpoint."""
        return self._progress.steps

    @property
    def unit(self) -> str:
        """The unit of lengths: batches, records or epochs."""
        return unit_of(self._length or 0)

    @property
    def length(self) -> int | None:
        """The longest training of a trial, in `unit`; None if the configuration sets none."""
        return next(iter(self._length.values())) if isinstance(self._length, Mapping) else self._length

    # --- reports

    def report(self, step: int, metrics: Mapping[str, Any], *, group: str = "training") -> None:
        """Report metrics after `step` batches. The search is not notified: see `report_to_search`.

        Raises UsageError if a search compares trials and a validation lacks its metric.
        """
        self._progress.steps = step
        if group == "validation":
            self._validate(step, metrics)
        elif group == "training":
            self._reports.training(step, metrics)
        else:
            self._reports.group(group, step, metrics)

    def report_progress(self, fraction: float) -> None:
        """Report which part of the whole training is done, from 0 to 1; later reports show the number of batches."""
        if fraction > 0 and self.steps:
            self._reports.total = max(self.steps, round(self.steps / fraction))

    def report_to_search(self, value: float | None, *, at: float = math.inf) -> None:
        """Report the searcher's metric to a search that compares trials, for each requested length up to `at`.

        `at`: how long the trial has trained, in `unit`; by default, exactly the requested length. None counts as NaN.
        If the search then wants no more training, notice of a stop is given to all ranks.
        """
        while self.requested is not None and at >= self.requested:
            self._search.validations[self.steps] = math.nan if value is None else value
            self.requested = self._search.next_length(self._progress)
            if self.requested is None:
                self._stop()
            if at == math.inf:
                return

    def trained(self, step: int, metrics: Mapping[str, Any]) -> float:
        """Return how long the trial has trained after `step` batches, in `unit`.

        A metric with the name of the unit counts. Without it, batches are `step`, and records follow from the batch
        size; epochs are unknown. Raises UsageError if the length is unknown.
        """
        if (given := number_in(plain(metrics.get(self.unit)))) is not None:
            return given
        batch_size: int | None = self._run.spec["hparams"].get("global_batch_size")
        if self.unit == "batches":
            return step
        if self.unit == "records" and batch_size:
            return step * batch_size
        raise UsageError(
            f"validation at batch {step}: the search counts {self.unit}, and the metrics have no {self.unit!r}; report "
            f"it with the metric {self.metric!r}, or set searcher.max_length in batches"
        )

    # --- checkpoints

    @contextmanager
    def checkpoint(self, step: int, metadata: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
        """Yield a folder for the files of a checkpoint of `step` batches, and the checkpoint's uuid.

        On leaving the block, the checkpoint is committed; other ranks may write files into the folder before that.

        `metadata`: entries of metadata.json, which may still change in the block. After an exception nothing is
        committed. Raises UsageError for a file with one of the names that hpc_det uses.
        """
        self._progress.steps = step
        self._content.metadata = metadata
        self._reports.flush()
        with self._saver.saving() as folder:
            before = _marks(folder)
            yield folder, folder.name.removeprefix(".partial-")
            if taken := [name for name, mark in _marks(folder).items() if mark != before.get(name)]:
                raise UsageError(f"checkpoint: {', '.join(taken)} is a file of hpc_det; write files with other names")
            self._progress.steps = step  # a report in the block may have changed it

    def verify(self, folder: Path) -> None:
        """Check a checkpoint that another trial has committed.

        Raises HpcDetError if it is damaged, or if other users may have changed it.
        """
        self._checkpointing.checkpoints.verify(folder)

    # --- the end

    def finish(self, *, stopped: bool) -> None:
        """Write the outcome. `stopped`: the program has been asked to stop and exits for this reason, so that the trial
        is continued later; otherwise its training is complete.
        """
        self._reports.flush()
        end = self._end(stopped)
        if end == "finished" and self._run.job:
            self._saver.prune_all()
        self.tensorboard.close()
        self._run.write_outcome(end, self.steps, saved=self._saver.is_saved)

    # --- helpers

    def _begin(self, *, is_resumed: bool) -> None:
        progress, log = self._progress, self._run.log
        if is_resumed:
            self._saver.resumed()
        log.begin_at(trained=progress.steps, validated=progress.validated)
        if self.metric:
            self._search.validations = log.validations(self.metric)
        if self.compares:
            self._search.wants_training()
            self.requested = self._search.length()
            if self.requested is None:
                self._stop()

    def _validate(self, step: int, metrics: Mapping[str, Any]) -> None:
        metrics = spelled({name: plain(value) for name, value in metrics.items()})
        if self.metric and (self.metric in metrics or self.compares):
            number = number_in(metrics.get(self.metric))
            self._search.take(self._progress, metrics if number is None else {**metrics, self.metric: number})
        self._progress.validated = step
        self._reports.validation(step, metrics)

    def _stop(self) -> None:
        self.is_stopped_by_search = True
        give_notice(self._run.distributed.messages)

    def _end(self, stopped: bool) -> str:
        if self.is_stopped_by_search:
            return "waiting" if self._search.may_come_back else "finished"
        if stopped:
            return "stopped"
        if self.compares or (self._only_records and self._progress.validated >= 0):
            self._search.end(self._progress)  # the program has ended before the length that the search requested
        return "finished"


class _Files:
    """The content of checkpoints whose files the program writes: see hpc_det.core.saver.Content."""

    writes = False
    sees_files = False

    def __init__(self, portable: Portable) -> None:
        self._portable = portable
        self.metadata: Mapping[str, Any] = {}

    def expected(self) -> list[Any]:
        return []

    def files(self) -> dict[str, Any]:
        return {}

    def write(self, folder: Path, put: Put) -> None:
        """Write nothing."""

    def finish(self, folder: Path, steps: int) -> Mapping[str, FileEntry]:
        return self._portable.write(folder, steps, self.metadata)

    def committed(self, uuid: str) -> None:
        """Do nothing."""


def _progress_in(folder: Path, steps: int) -> Progress:
    """Return the progress of a checkpoint; a checkpoint that other code committed has only its number of batches."""
    return restored_progress(folder)[0] if (folder / PROGRESS).exists() else Progress(steps=steps)


def _marks(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Return inode, size and time of change of the existing files with reserved names."""
    found: dict[str, tuple[int, int, int]] = {}
    for name in RESERVED:
        if (path := folder / name).exists():
            status = path.stat()
            found[name] = status.st_ino, status.st_size, status.st_mtime_ns
    return found
