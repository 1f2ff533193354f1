"""det.core.TrainContext: reports of a training (upstream: determined/core/_train.py). Only rank 0's reports count."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpc_det.compat.det_core.session import Session
from hpc_det.distributed.metrics import scalar
from hpc_det.distributed.rank_process import note_error
from hpc_det.errors import InvalidHP
from hpc_det.node.files import make_folders
from hpc_det.node.json_files import read_json, write_json
from hpc_det.search.method import better
from hpc_det.store.attempt import Attempt
from hpc_det.store.metrics import validations

logger = logging.getLogger("determined.core")


class EarlyExitReason(enum.Enum):
    """Why a script exits before its training is complete."""

    INVALID_HP = "EXITED_REASON_INVALID_HP"
    USER_REQUESTED_STOP = "EXITED_REASON_USER_REQUESTED_STOP"


class TensorboardMode(enum.Enum):
    """Whether reported metrics are written as TensorBoard events (AUTO), or the script writes all events (MANUAL)."""

    AUTO = "AUTO"
    MANUAL = "MANUAL"


class TrainContext:
    """Reports of metrics and progress. Any rank may call the methods; metrics of other ranks than 0 are ignored."""

    def __init__(self, session: Session, tensorboard_mode: TensorboardMode = TensorboardMode.AUTO) -> None:
        self._session = session
        self._mode = TensorboardMode(tensorboard_mode)

    # --- metrics

    def report_training_metrics(
        self, steps_completed: int, metrics: dict[str, Any], batch_metrics: list[dict[str, Any]] | None = None
    ) -> None:
        """Report training metrics. `batch_metrics` is ignored."""
        self.report_metrics("training", steps_completed, metrics)

    def report_validation_metrics(self, steps_completed: int, metrics: dict[str, Any]) -> None:
        """Report validation metrics; a search that compares trials gets the searcher's metric.

        Bytes are removed. Raises RuntimeError for a metric that is None.
        """
        self.report_metrics("validation", steps_completed, metrics)

    def report_metrics(self, group: str, steps_completed: int, metrics: dict[str, Any]) -> None:
        """Report metrics of a group: "training", "validation" or any other name.

        Raises UsageError if a search compares trials and a validation lacks its metric.
        """
        logger.info("report_metrics(group=%s, steps_completed=%s, metrics=%s)", group, steps_completed, metrics)
        if group == "validation":
            metrics = _without_bytes(metrics)
        if (chief := self._session.chief) is None:
            self._session.run  # noqa: B018  # raises RuntimeError before the block of core.init
            return
        chief.report(int(steps_completed), metrics, group=group)
        if group == "validation" and chief.compares and not self._session.uses_operations:
            value = scalar(metrics[str(chief.metric)])
            chief.report_to_search(value, at=chief.trained(int(steps_completed), metrics))

    def get_experiment_best_validation(self) -> float | None:
        """Return the best value of the searcher's metric in all trials; None before the first, and without an
        experiment.
        """
        run = self._session.run
        searcher = run.spec["config"].get("searcher") or {}
        if not run.job:
            return None
        best: float | None = None
        for trial in run.folder.experiment().trials():
            for value in validations(trial.metrics, searcher["metric"]).values():
                if better(value, best, searcher.get("smaller_is_better", True)):
                    best = value
        return best

    # --- progress and facts

    def report_progress(self, progress: float) -> None:
        """Report which part of the training is done. Raises ValueError unless it is from 0 to 1."""
        if not 0 <= progress <= 1:
            raise ValueError(f"report_progress: expected a number from 0 to 1, got {progress}")
        if self._session.chief:
            self._session.chief.report_progress(progress)

    def set_status(self, status: str) -> None:
        """Log a short text that tells what the script does."""
        logger.info("status: %s", status)

    def set_metadata(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """Replace the metadata of the trial, a dict of JSON values, and return it."""
        write_json(self._session.run.folder.run_metadata, metadata)
        return metadata

    def get_metadata(self) -> dict[str, Any] | None:
        """Return the metadata of the trial; None if none was set."""
        found: dict[str, Any] | None = read_json(self._session.run.folder.run_metadata)
        return found

    def report_early_exit(self, reason: EarlyExitReason) -> None:
        """Report why the script will exit. INVALID_HP: the trial is not continued, as after det.InvalidHP."""
        run = self._session.run
        logger.info("report_early_exit(%s)", reason)
        if EarlyExitReason(reason) is EarlyExitReason.INVALID_HP and not self._session.is_invalid:
            self._session.is_invalid = True
            if run.job:
                attempt = Attempt.from_env(run.distributed.env)
                note_error(attempt, run.distributed.rank, InvalidHP("the script has reported invalid hyperparameters"))

    # --- TensorBoard

    def get_tensorboard_path(self) -> Path:
        """Return the folder of this rank's event files, which exists."""
        run = self._session.run
        path = run.folder.tensorboard
        if run.distributed.rank:
            path /= f"rank-{run.distributed.rank}"
        make_folders(path)
        return path

    def upload_tensorboard_files(
        self,
        selector: Callable[[Path], bool] = lambda _: True,
        mangler: Callable[[Path, int], Path] = lambda path, _: path,
    ) -> None:
        """Do nothing: the files are in the trial's folder, those of each rank in a folder of this rank.

        Raises RuntimeError in mode AUTO.
        """
        if self._mode is TensorboardMode.AUTO:
            raise RuntimeError("upload_tensorboard_files: use it with tensorboard_mode=TensorboardMode.MANUAL")


def _without_bytes(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics of a validation without bytes. Raises RuntimeError for None."""
    if nothing := [name for name, value in metrics.items() if value is None]:
        raise RuntimeError(f"validation metric {nothing[0]!r} is None; report a number")
    removed = [name for name, value in metrics.items() if isinstance(value, (bytes, bytearray))]
    if removed:
        logger.warning("validation metrics %s are bytes, and are removed", ", ".join(removed))
    return {name: value for name, value in metrics.items() if name not in removed}
