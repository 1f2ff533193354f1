"""The facts of a trial for `describe`, the report and `top`, from its files and its search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hpc_det.checkpoint.committed import Committed, committed
from hpc_det.checkpoint.damaged import Damaged, damaged_ones
from hpc_det.store.folders import TrialFolder
from hpc_det.store.metrics import each
from hpc_det.store.save_times import Save, read_each_save
from hpc_det.view.metric_history import MetricHistory
from hpc_det.view.performance.profile import Record, profile
from hpc_det.view.performance.system import gpu_use
from hpc_det.view.state import ExperimentState, ExperimentView
from hpc_det.view.summary import best_of_one
from hpc_det.view.trial_history import SPEC, AttemptHistory, Metrics, checkpoint_to_take, read_tolerantly
from hpc_det.view.trials import TrialState, attempts_of, trial_state

MOST_OF_PROFILE = 32 * 2**20
"""Largest profile, in bytes, that is read for a verdict; this takes two seconds. `trial profile` has no limit."""


@dataclass(frozen=True, kw_only=True)
class TrialFacts:
    """A trial that the search has created. Each file is read once, when it is first needed."""

    view: ExperimentView
    """The view of its experiment."""
    id: int
    is_over: bool
    """True if nothing of the experiment runs any more."""
    read_metrics: Metrics | None = None
    """Its metrics, if they were read already."""

    @cached_property
    def folder(self) -> TrialFolder:
        return self.view.folder.trial(self.id)

    @cached_property
    def attempts(self) -> list[AttemptHistory]:
        """Attempts, oldest first."""
        return attempts_of(self.view.search, self.folder, is_over=self.is_over)

    @cached_property
    def state(self) -> TrialState:
        return trial_state(self.view.search, self.id, self.attempts, is_over=self.is_over)

    @property
    def worker(self) -> int | None:
        """Number of the worker that trains it now; None without one."""
        return None if self.is_over else self.view.search.trials[self.id].worker

    @property
    def job_id(self) -> str | None:
        """Job of its last attempt; None before the first one."""
        return self.attempts[-1].job_id if self.attempts else None

    @property
    def hparams(self) -> dict[str, Any]:
        return self._sample[0]

    @property
    def seed(self) -> int:
        return self._sample[1]

    @cached_property
    def _sample(self) -> tuple[dict[str, Any], int]:
        """Return the hyperparameters and the seed that its worker has written or will write."""
        if written := read_tolerantly(self.folder.trial, SPEC):
            return written["hparams"], written["trial_seed"]
        sample = self.view.sample(self.id)
        return sample.hparams, sample.seed

    # --- metrics

    @cached_property
    def metrics(self) -> Metrics:
        """Its progress, and the last and best metrics."""
        return self.read_metrics or Metrics.read(self.folder, self.view.config["searcher"])

    @property
    def best(self) -> dict[str, Any] | None:
        """Best validation: metric, value, batches and trial; None before the first one."""
        return best_of_one(self.metrics, self.id)

    @property
    def reported(self) -> float | None:
        """Last value that the trial reported to the search; None before the first report."""
        return self.view.search.trials[self.id].value

    def history(self) -> MetricHistory:
        """Return all metrics over the batches.

        The file is read at each call: the metrics of a thousand trials would not fit into memory.
        """
        return MetricHistory(each(self.folder.metrics), self.saves)

    @cached_property
    def saves(self) -> list[Save]:
        return read_each_save(self.folder.saves)

    # --- checkpoints

    def checkpoints(self) -> list[Committed]:
        """Committed checkpoints, newest first."""
        return committed(self.folder.checkpoints)

    def checkpoint(self) -> str | None:
        """Return path and batches of the checkpoint of the best validation, or of the newest one if that was not kept.

        None without a checkpoint on this machine's file systems.
        """
        found = checkpoint_to_take(self.folder, self.metrics.best)
        return f"{found.path} (batch {found.steps})" if found else None

    def set_aside(self) -> list[Damaged]:
        """Damaged checkpoints from which no trial resumes, oldest first."""
        return damaged_ones(self.folder.checkpoints)

    # --- performance

    def profile(self, history: MetricHistory | None = None) -> Record | None:
        """Return the record that `trial profile --json` prints, or None without a profile.

        `history`: all metrics, if they were read already.
        """
        return profile(self.view, self.folder, history) if self.folder.profile.exists() else None

    def verdict(self) -> str | None:
        """Return the verdict on its profile; None without one, or if reading it would take long."""
        size = sum(file.stat().st_size for file in self.folder.profile.glob("*.jsonl"))
        found = self.profile() if 0 < size <= MOST_OF_PROFILE else None
        return f"{found['verdict']}: {found['why']}" if found else None

    def gpu_use(self) -> float | None:
        """Return the mean use of its GPUs in the last minute in percent; None if it is not measured."""
        return gpu_use(self.folder)


def trials_of(view: ExperimentView, state: ExperimentState) -> Iterator[TrialFacts]:
    """Yield all trials of the experiment with this `state`, by number."""
    for number in sorted(view.search.trials):
        yield TrialFacts(view=view, id=number, is_over=state.is_final)
