"""tune_run: from what was asked for to an Analysis, which tells what came of the trials and which is the best."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from hpc_det.checkpoint.committed import committed
from hpc_det.errors import HpcDetError, UsageError, nearest, shown
from hpc_det.node.json_files import read_json
from hpc_det.search.journal import SearchJournal
from hpc_det.search.method import better
from hpc_det.search.state import TrialState
from hpc_det.sgd.tune.driver import TuneDriver
from hpc_det.sgd.tune.files import DONE, ITERATION, Mode, TuneFolder, TuneTrial, checkpoint_data, run_folder
from hpc_det.sgd.tune.places import Jobs, TrialPlace, packed
from hpc_det.sgd.tune.space import config_of, searcher_of, space_of
from hpc_det.sgd.tune.trainable import Trainable
from hpc_det.store.metrics import number_or_nan

JOBS = 16
"""At the same time, unless `max_concurrent` says otherwise; as in an experiment file."""

Scope = Literal["last", "all"]


def tune_run(
    trainable: type[Trainable],
    *,
    config: Mapping[str, Any] | None = None,
    stop: Mapping[str, float] | None = None,
    metric: str | None = None,
    mode: Mode = "min",
    num_samples: int = 1,
    searcher: Mapping[str, Any] | None = None,
    max_concurrent: int | None = None,
    resources_per_trial: Mapping[str, int] | None = None,
    executor: Any = None,
    run: str | os.PathLike[str] | None = None,
    seed: int | None = None,
    max_failures: int = 3,
    checkpoint_freq: int = 1,
) -> Analysis:
    """Train trials with the hyperparameters of `config`, each in a process of its own, and tell which was the best.

    `config`: values, and ranges: grid_search, choice, uniform, loguniform, randint, or as in an experiment file. Every
    point of the grid is tried `num_samples` times. `stop`: a trial ends when one of these metrics is as great as that,
    or greater; {"training_iteration": n} are its most iterations. `searcher`: asha(), adaptive_asha(), pbt(), or a
    `searcher` of an experiment file; None: every trial runs to its end.

    Trials run beside each other on this machine, as many as have room for `resources_per_trial`, {"cpu", "gpu"} (by
    default what the trainable says); or each as a job that `executor`, one of submitit's, submits, JOBS at a time. One
    that the scheduler refuses while others run is submitted again later.

    `run`: a name below $HPC_DET_ROOT/sgd, or a path. A call with the same run goes on where an earlier one was ended:
    finished trials are not repeated, others go on from their last checkpoint. They save one every `checkpoint_freq`
    iterations. None: a new folder. `seed`: of what is drawn; None: by the time.

    A trial whose process dies is started again from its last checkpoint, `max_failures` times. A trial that raises has
    failed, and the others go on. Raises UsageError for what cannot be done, and HpcDetError where every trial failed.
    """
    _check(trainable, stop or {}, num_samples, max_concurrent, max_failures, checkpoint_freq)
    taken_apart = config_of(config or {})
    folder = run_folder(f"tune-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}" if run is None else run, os.environ)
    before = read_json(folder.effective) or {}
    seed = _seed(before, seed)
    place: TrialPlace
    if executor is None:
        place = packed(resources_per_trial or trainable.resources(), os.environ, max_concurrent)
    else:
        place = Jobs(executor, max_concurrent or JOBS)
    length = (stop or {}).get(ITERATION)
    asked = searcher_of(
        dict(searcher) if searcher is not None else None,
        taken_apart,
        num_samples=num_samples,
        metric=metric,
        mode=mode,
        length=None if length is None else int(length),
        max_concurrent=before.get("searcher", {}).get("max_concurrent_trials", place.slots),
        seed=seed,
    )
    whole = {"searcher": asked, "hyperparameters": space_of(taken_apart), "reproducibility": {"experiment_seed": seed}}
    folder.prepare(whole)
    turns = {"stop": dict(stop or {}), "checkpoint_freq": checkpoint_freq, "keep": {"metric": metric, "mode": mode}}
    with folder.claimed():
        folder.write_trainable((trainable, taken_apart.objects))
        TuneDriver(folder, place, max_failures=max_failures, turns=turns).drive()
    return _analysis(folder, metric, mode)


def _seed(before: Mapping[str, Any], given: int | None) -> int:
    """What was drawn stays so where the search goes on."""
    recorded = before.get("reproducibility", {}).get("experiment_seed")
    return next(seed for seed in (given, recorded, int(time.time())) if seed is not None)


def _check(
    trainable: Any, stop: Mapping[str, Any], num_samples: int, max_concurrent: Any, max_failures: int, freq: int
) -> None:
    problems = []
    if not (isinstance(trainable, type) and issubclass(trainable, Trainable)):
        problems.append(f"trainable: got {shown(trainable)}; give TorchTrainer.as_trainable(...), or a Trainable")
    problems += [
        f"stop.{name}: got {shown(end)}; expected a number"
        for name, end in stop.items()
        if isinstance(end, bool) or not isinstance(end, (int, float))
    ]
    if isinstance(length := stop.get(ITERATION), (int, float)) and length < 1:
        problems.append(f"stop.{ITERATION}: got {length}; expected a whole number >= 1")
    least = {"num_samples": (num_samples, 1), "max_failures": (max_failures, 0), "checkpoint_freq": (freq, 1)}
    if max_concurrent is not None:
        least["max_concurrent"] = (max_concurrent, 1)
    problems += [f"{name}: got {value}; expected >= {low}" for name, (value, low) in least.items() if value < low]
    if problems:
        raise UsageError(problems)


def _analysis(folder: TuneFolder, metric: str | None, mode: Mode) -> Analysis:
    analysis = Analysis(folder.path, metric, mode)
    if not any(trial.results for trial in analysis.trials):
        raise HpcDetError([f"trial {trial.number}: {trial.status}: {trial.error}" for trial in analysis.trials])
    return analysis


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
            value = number_or_nan(result.get(metric))
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
