"""`ray.tune.analysis`: the results of a search, with the methods of Ray's ExperimentAnalysis."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, cast

from hpc_det.errors import UsageError
from hpc_det.sgd.tune import Analysis as Results
from hpc_det.sgd.tune.files import ITERATION, Mode
from hpc_det.sgd.tune.run import Scope
from hpc_det.sgd.tune.run import Trial as Result

_STATUS = {"running": "RUNNING", "failed": "ERROR", "invalid hyperparameters": "ERROR"}
"""Ray's words for states of trials; all others are "TERMINATED"."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of a trial."""

    value: str
    """Path for TorchTrainer.load."""


class Trial(Result):
    """A trial with the attributes that it has in Ray. `status` is "TERMINATED", "ERROR" or "RUNNING"."""

    @property
    def trial_id(self) -> str:
        """The number of the trial as a text."""
        return str(self.number)

    @property
    def logdir(self) -> str:
        """The folder of the trial."""
        return str(self.folder.path)

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint, or None."""
        kept = self.checkpoints()
        return Checkpoint(kept[max(kept)]) if kept else None


class ExperimentAnalysis(Results):
    """The results of a search.

    Args:
        experiment_checkpoint_path: The run folder of the search.
        default_metric: Default of the methods' argument `metric`.
        default_mode: Default of the methods' argument `mode`. None: it must be given to the methods.
    """

    def __init__(
        self,
        experiment_checkpoint_path: str | os.PathLike[str],
        default_metric: str | None = None,
        default_mode: str | None = None,
    ) -> None:
        # Without a mode every method that needs one refuses: a default would name the worst trial for an accuracy.
        super().__init__(experiment_checkpoint_path, default_metric, cast(Mode, default_mode or ""))

    @cached_property
    def trials(self) -> list[Trial]:  # type: ignore[override]
        """All trials, in the order of their numbers; read from the files once."""
        found = []
        for trial in super().trials:
            values = {field.name: getattr(trial, field.name) for field in fields(trial)}
            found.append(Trial(**{**values, "status": _STATUS.get(trial.status, "TERMINATED")}))
        return found

    def get_best_trial(
        self,
        metric: str | None = None,
        mode: Mode | None = None,
        scope: Scope = "last",
        filter_nan_and_inf: bool = True,
    ) -> Trial | None:
        """Return the best trial, or None if no trial has a number for the metric.

        Args:
            metric: Name of the metric; None: that of the search.
            mode: Whether smaller ("min") or larger ("max") values are better; None: that of the search.
            scope: Whether trials are compared by their "last" result or by the best of "all" their results.
            filter_nan_and_inf: Only True.

        Raises:
            UsageError: Metric or mode are missing, or an argument has another value.
        """
        if scope not in ("last", "all") or not filter_nan_and_inf:
            raise UsageError(
                f"get_best_trial: got scope {scope!r} and filter_nan_and_inf={filter_nan_and_inf}; expected 'last' or "
                f"'all', and True"
            )
        return cast("Trial | None", super().get_best_trial(metric, mode, scope))

    def get_best_checkpoint(  # type: ignore[override]
        self, trial: Trial, metric: str | None = None, mode: Mode | None = None
    ) -> str | None:
        """Return the path of the checkpoint of the trial's best iteration, or of its newest one if that is not kept.

        None if the trial has no checkpoint. The newest two and the best by the metric of the search are kept.
        """
        metric, mode = metric or self._metric, mode or self._mode
        if metric is None or mode not in ("min", "max"):
            raise UsageError(f"get_best_checkpoint: got metric {metric!r} and mode {mode!r}; give both")
        kept, found = trial.checkpoints(), trial.value(metric, mode, "all")
        return (kept.get(found[1][ITERATION]) if found else None) or kept.get(max(kept, default=0))

    @property
    def best_trial(self) -> Trial | None:
        """The best trial by the metric of the search and its last result, or None."""
        return self.get_best_trial()

    @property
    def best_checkpoint(self) -> str | None:
        """The path of a checkpoint of the best trial, or None."""
        best = self.get_best_trial()
        return self.get_best_checkpoint(best) if best else None

    def get_best_logdir(self, metric: str | None = None, mode: Mode | None = None, scope: Scope = "last") -> str | None:
        """Return the folder of the best trial, or None. Arguments and errors are those of `get_best_trial`."""
        best = self.get_best_trial(metric, mode, scope)
        return best.logdir if best else None

    @property
    def best_logdir(self) -> str | None:
        """The folder of the best trial, or None."""
        return self.get_best_logdir()

    @property
    def results(self) -> dict[str, dict[str, Any]]:
        """The last result of each trial, by trial_id."""
        return {trial.trial_id: trial.last_result for trial in self.trials}

    def get_all_configs(self) -> dict[str, dict[str, Any]]:
        """Return the hyperparameters of each trial, by its folder."""
        return {trial.logdir: trial.config for trial in self.trials}

    def dataframe(self, metric: str | None = None, mode: Mode | None = None) -> Any:
        """Return a DataFrame of pandas with one row per trial: its result, its folder, and `config/NAME`.

        Args:
            metric: Name of the metric whose best iteration is the row. None: the row is the last iteration.
            mode: "min" or "max", with `metric`.

        Raises:
            UsageError: pandas is not installed.
        """
        rows = []
        for trial, row in zip(self.trials, self.rows(), strict=True):
            best = trial.value(metric, mode, "all") if metric and mode else None
            own = {"trial_id": trial.trial_id, "logdir": trial.logdir}
            rows.append({**row, **(best[1] if best else {}), **own})
        return _pandas().DataFrame(rows)

    @property
    def results_df(self) -> Any:
        """A DataFrame of pandas with the last result of each trial, indexed by trial_id."""
        return self.dataframe().set_index("trial_id")

    @property
    def trial_dataframes(self) -> dict[str, Any]:
        """A DataFrame of pandas with all results of each trial, by its folder."""
        return {trial.logdir: _pandas().DataFrame(trial.results) for trial in self.trials}

    @property
    def best_dataframe(self) -> Any:
        """A DataFrame of pandas with all results of the best trial."""
        return self.trial_dataframes[str(self.best_logdir)]


Analysis = ExperimentAnalysis


def _pandas() -> Any:
    if importlib.util.find_spec("pandas") is None:
        raise UsageError("dataframes need the package pandas; install it, or use the method rows()")
    import pandas

    return pandas
