"""What came of a search: its trials, and which of them is the best."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from hpc_det.checkpoint.committed import committed
from hpc_det.errors import UsageError, nearest
from hpc_det.node.json_files import read_json
from hpc_det.search.journal import SearchJournal
from hpc_det.search.method import better
from hpc_det.search.state import TrialState
from hpc_det.sgd.json_values import number
from hpc_det.sgd.tune.files import DONE, ITERATION, Mode, TuneFolder, TuneTrial, checkpoint_data

Scope = Literal["last", "all"]


@dataclass(frozen=True)
class Trial:
    number: int
    """From 1."""
    config: dict[str, Any]
    """What is its own: without what all trials share because no file can hold it."""
    status: str
    """completed, failed, invalid hyperparameters, running, or, where the search has left it behind: stopped."""
    results: list[dict[str, Any]]
    """Of each iteration."""
    error: str | None
    folder: TuneTrial

    @property
    def last_result(self) -> dict[str, Any]:
        """Empty where it has none."""
        return self.results[-1] if self.results else {}

    def checkpoints(self) -> dict[int, str]:
        """Iteration -> what the trainable's load_checkpoint takes: the newest two, and the best one, are kept."""
        kept = committed(self.folder.checkpoints)
        return {checkpoint.steps: checkpoint_data(checkpoint.path) for checkpoint in kept}

    def value(self, metric: str, mode: Mode, scope: Scope) -> tuple[float, dict[str, Any]] | None:
        """The best of its results, or with scope "last" the last one; None where it is no number."""
        best: tuple[float, dict[str, Any]] | None = None
        for result in self.results if scope == "all" else self.results[-1:]:
            value = number(result.get(metric))
            if better(value, best[0] if best else None, mode == "min"):
                best = value, result
        return best


class Analysis:
    """Of the search in a run folder, also while it runs; `metric` and `mode` are what the methods take by default."""

    def __init__(self, path: str | os.PathLike[str], metric: str | None = None, mode: Mode = "min") -> None:
        self.path = Path(path)
        self._metric = metric
        self._mode: Mode = mode

    @cached_property
    def trials(self) -> list[Trial]:
        run = TuneFolder(self.path)
        return [_trial(run.trial(n), state) for n, state in SearchJournal(run).state().trials.items()]

    def get_best_trial(
        self, metric: str | None = None, mode: Mode | None = None, scope: Scope = "last"
    ) -> Trial | None:
        """By the last result of each trial, or with scope "all" by any; None where none has such a number."""
        found = self._best(metric, mode, scope)
        return found[0] if found else None

    def get_best_config(
        self, metric: str | None = None, mode: Mode | None = None, scope: Scope = "last"
    ) -> dict[str, Any] | None:
        """The config of the best trial. Raises UsageError where no trial has told such a metric."""
        found = self._best(metric, mode, scope)
        return found[0].config if found else None

    def get_best_checkpoint(
        self, metric: str | None = None, mode: Mode | None = None, scope: Scope = "last"
    ) -> str | None:
        """Of the best trial, that of its best iteration among those that are kept: what load_checkpoint, and
        TorchTrainer.load, take.
        """
        found = self._best(metric, mode, scope)
        if not found:
            return None
        trial, result = found
        kept = trial.checkpoints()
        return kept.get(result[ITERATION]) or kept.get(max(kept, default=0))

    @property
    def best_trial(self) -> Trial | None:
        return self.get_best_trial()

    @property
    def best_config(self) -> dict[str, Any] | None:
        return self.get_best_config()

    @property
    def best_result(self) -> dict[str, Any] | None:
        found = self._best(None, None, "last")
        return found[1] if found else None

    @property
    def best_checkpoint(self) -> str | None:
        return self.get_best_checkpoint()

    def rows(self) -> list[dict[str, Any]]:
        """A row for each trial, ready for a table: the last result, and config/NAME for what is in its config."""
        return [
            {
                "trial": trial.number,
                "status": trial.status,
                **dict(_flat(trial.config, "config/")),
                **dict(_flat(trial.last_result)),
            }
            for trial in self.trials
        ]

    def _best(self, metric: str | None, mode: Mode | None, scope: Scope) -> tuple[Trial, dict[str, Any]] | None:
        metric, mode = metric or self._metric, mode or self._mode
        if metric is None:
            raise UsageError("metric: give the name of the metric that trials are compared by, or give it to tune_run")
        if mode not in ("min", "max"):
            raise UsageError(f"mode: got {mode!r}; expected 'min' or 'max'")
        self._check_known(metric)
        best: tuple[Trial, dict[str, Any]] | None = None
        best_value = math.nan
        for trial in self.trials:
            found = trial.value(metric, mode, scope)
            if found and better(found[0], best_value, mode == "min"):
                best_value, best = found[0], (trial, found[1])
        return best

    def _check_known(self, metric: str) -> None:
        known = {name for trial in self.trials for name in trial.last_result}
        if known and metric not in known:
            hint = nearest(metric, known) or f"known: {', '.join(sorted(known))}"
            raise UsageError(f"metric {metric!r}: no trial has told it; {hint}")


def _trial(folder: TuneTrial, state: TrialState) -> Trial:
    noted, results = read_json(folder.trial) or {}, folder.results()
    is_done = bool(results) and results[-1][DONE]
    left = "stopped" if state.worker is None else "running"
    return Trial(
        number=folder.id,
        config=(noted.get("turn") or {}).get("config", {}),
        status=state.ended.value if state.ended else "completed" if is_done else left,
        results=results,
        error=noted.get("error"),
        folder=folder,
    )


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value
