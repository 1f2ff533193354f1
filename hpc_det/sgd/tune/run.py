"""tune_run, which runs a search, and Analysis, its results."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

from hpc_det.checkpoint.committed import committed
from hpc_det.errors import HpcDetError, UsageError, nearest, shown
from hpc_det.node.json_files import read_json
from hpc_det.plan.local_experiment import GangSize
from hpc_det.search.journal import SearchJournal
from hpc_det.search.method import better
from hpc_det.search.state import NO_METRIC, TrialState
from hpc_det.sgd.driver.experiment import (
    Description,
    has_own_experiment,
    insist_on_no_other_driver,
    named,
    opened_experiment,
)
from hpc_det.sgd.tune.driver import TuneDriver
from hpc_det.sgd.tune.files import DONE, ITERATION, Mode, TuneFolder, TuneTrial, checkpoint_data, flat, run_folder
from hpc_det.sgd.tune.places import Jobs, TrialPlace, packed
from hpc_det.sgd.tune.space import config_of, searcher_of, space_of
from hpc_det.sgd.tune.table import shown_progress
from hpc_det.sgd.tune.trainable import Trainable
from hpc_det.store.folders import ExperimentFolder
from hpc_det.store.metrics import number_or_nan

JOBS = 16
"""Default number of jobs at the same time; the same as `max_concurrent_trials` in an experiment file."""

Scope = Literal["last", "all"]
"""Whether a trial is represented by its last result, or by the best of all its results."""


class NoResults(HpcDetError):
    """No trial of a search has completed an iteration."""


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
    verbose: bool = True,
) -> Analysis:
    """Run a search: train trials with different hyperparameters, each in a separate process, and return the results.

    A trial whose process dies is restarted from its last checkpoint. A trial that raises an exception has failed; the
    others continue.

    Args:
        trainable: The class to train: TorchTrainer.as_trainable(...), or a subclass of Trainable.
        config: Hyperparameters by name, also nested: fixed values, grid_search, choice, uniform, loguniform, randint,
            sample_from, or a range as in an experiment file. None: no hyperparameters.
        stop: By metric, the value at or above which a trial is complete. `{"training_iteration": n}` limits a trial to
            n iterations. None: a trial is complete when its step returns `{"done": True}`.
        metric: Name of the metric by which trials are compared.
        mode: Whether smaller ("min") or larger ("max") values of `metric` are better.
        num_samples: Number of trials; with grid_search, the number of trials for each point of the grid.
        searcher: asha(), adaptive_asha(), pbt(), or the `searcher` section of an experiment file. None: every trial
            runs to its end.
        max_concurrent: Largest number of trials at the same time. None: on this machine as many as it has resources
            for, with an `executor` 16.
        resources_per_trial: `{"cpu": n, "gpu": m}` for a trial on this machine. None: what the trainable requires.
        executor: An executor of submitit, which submits each trial as a job. A job that the scheduler rejects while
            others run is submitted again later. None: trials run on this machine.
        run: A name below $HPC_DET_ROOT/sgd, or a path: the run folder. A call with the run of an earlier, unfinished
            search continues it: complete trials are not repeated, others continue from their last checkpoint. None: a
            new folder.
        seed: Seed of the drawn hyperparameters. None: the seed of the search that is continued, or the time.
        max_failures: How often a trial is restarted after its process has died; -1: without limit.
        checkpoint_freq: Iterations from one checkpoint of a trial to the next; 0: only the last iteration of each part
            that the searcher assigns, or of the trial, has a checkpoint.
        verbose: Whether to show the trials on stdout: a table in a terminal, else a line for each change.

    Returns:
        The results of all trials.

    Raises:
        UsageError: An argument is invalid, the run belongs to another search or another process runs it, or a trial
            does not return `metric`.
        CommandError: The scheduler rejects a job while no other runs.
        SearchStopped: An HpcDetError; a command such as `hpc-det experiment pause` has stopped the search.
        NoResults: An HpcDetError; no trial has completed an iteration.
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
    # A search that is continued keeps its `max_concurrent_trials`, even if there are other slots now: `prepare` rejects
    # a configuration that differs.
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
    searched = {"hyperparameters": space_of(taken_apart), "reproducibility": {"experiment_seed": seed}}
    folder.prepare({"searcher": asked, **searched})
    # Experiments have the metric of every searcher; in the run folder that of a population would be a difference.
    sections = {"searcher": {**asked, "metric": metric or NO_METRIC}, **searched}
    turns = {"stop": dict(stop or {}), "checkpoint_freq": checkpoint_freq, "keep": {"metric": metric, "mode": mode}}
    with (
        folder.claimed(),
        _as_experiment(folder, named(run), sections, place, verbose=verbose),
        shown_progress(folder, metric, verbose=verbose) as progress,
    ):
        folder.write_trainable((trainable, taken_apart.objects))
        limit = math.inf if max_failures == -1 else max_failures
        TuneDriver(folder, place, max_failures=limit, turns=turns, progress=progress).drive()
    return _analysis(folder, metric, mode)


@contextmanager
def _as_experiment(
    folder: TuneFolder, name: str | None, sections: Mapping[str, Any], place: TrialPlace, *, verbose: bool
) -> Iterator[None]:
    """Let the search be an experiment to the commands, with this process in the place of its jobs."""

    def link(experiment: ExperimentFolder) -> None:
        for trial in folder.trials():
            folder.trial(trial.id).convert()
        experiment.search.symlink_to(folder.search)
        (experiment.path / "trials").symlink_to(folder.path / "trials")

    experiment = None
    if has_own_experiment(os.environ):
        insist_on_no_other_driver(folder.path)
        size = GangSize(nodes=1, ranks_per_node=place.slots, has_gpus=False)
        about = Description(name=name, hparams={}, sections=sections, size=size)
        experiment = opened_experiment(folder.path, about, workers=place.slots, link=link)
    if experiment is None:
        yield
        return
    if verbose:
        print(f"hpc-det: experiment {experiment.folder.id}; its files are in {folder.path}", flush=True)
    experiment.watch(lambda: None)
    try:
        yield
    finally:
        experiment.end()


def _seed(before: Mapping[str, Any], given: int | None) -> int:
    """Return the given seed, or the seed of the search that is continued, or the time."""
    recorded = before.get("reproducibility", {}).get("experiment_seed")
    return next(seed for seed in (given, recorded, int(time.time())) if seed is not None)


def _check(
    trainable: Any, stop: Mapping[str, Any], num_samples: Any, max_concurrent: Any, max_failures: Any, freq: Any
) -> None:
    problems = []
    if not (isinstance(trainable, type) and issubclass(trainable, Trainable)):
        problems.append(
            f"trainable: got {shown(trainable)}; give TorchTrainer.as_trainable(...), or a subclass of Trainable"
        )
    problems += [
        f"stop.{name}: got {shown(end)}; expected a number"
        for name, end in stop.items()
        if isinstance(end, bool) or not isinstance(end, (int, float))
    ]
    if isinstance(length := stop.get(ITERATION), (int, float)) and length < 1:
        problems.append(f"stop.{ITERATION}: got {length}; expected a whole number >= 1")
    least: dict[str, tuple[Any, int]] = {
        "num_samples": (num_samples, 1),
        "max_failures": (max_failures, -1),
        "checkpoint_freq": (freq, 0),
    }
    if max_concurrent is not None:
        least["max_concurrent"] = (max_concurrent, 1)
    problems += [
        f"{name}: got {shown(value)}; expected a whole number >= {low}"
        for name, (value, low) in least.items()
        if not isinstance(value, Integral) or value < low
    ]
    if problems:
        raise UsageError(problems)


def _analysis(folder: TuneFolder, metric: str | None, mode: Mode) -> Analysis:
    """Return the results of the search. Raises NoResults, with the error of each trial, if no trial has a result."""
    analysis = Analysis(folder.path, metric, mode)
    if not any(trial.results for trial in analysis.trials):
        raise NoResults([f"trial {trial.number}: {trial.status}: {trial.error}" for trial in analysis.trials])
    return analysis


@dataclass(frozen=True)
class Trial:
    """A trial of a search, with its results."""

    number: int
    """Number of the trial, from 1."""
    config: dict[str, Any]
    """Hyperparameters of the trial, without values that JSON cannot represent, which all trials share."""
    status: str
    """One of "completed", "failed", "invalid hyperparameters", "running", and "stopped" early by the searcher."""
    results: list[dict[str, Any]]
    """The result of each iteration."""
    error: str | None
    """The last error of the trial; None if there was none."""
    folder: TuneTrial
    """The folder of the trial."""

    @property
    def last_result(self) -> dict[str, Any]:
        """The result of the last iteration; empty if there is none."""
        return self.results[-1] if self.results else {}

    def checkpoints(self) -> dict[int, str]:
        """Return the paths of the newest two checkpoints and the best one for `load_checkpoint`, by iteration."""
        kept = committed(self.folder.checkpoints)
        return {checkpoint.steps: checkpoint_data(checkpoint.path) for checkpoint in kept}

    def value(self, metric: str, mode: Mode, scope: Scope) -> tuple[float, dict[str, Any]] | None:
        """Return value and result of the best iteration, or of the last one with scope "last".

        None if the trial has no result with a number for this metric.
        """
        best: tuple[float, dict[str, Any]] | None = None
        for result in self.results if scope == "all" else self.results[-1:]:
            value = number_or_nan(result.get(metric))
            if better(value, best[0] if best else None, mode == "min"):
                best = value, result
        return best


class Analysis:
    """The results of a search, read from its run folder; the search may still be running.

    Args:
        path: The run folder.
        metric: Default of the methods' argument `metric`.
        mode: Default of the methods' argument `mode`.

    Attributes:
        path: The run folder.
    """

    def __init__(self, path: str | os.PathLike[str], metric: str | None = None, mode: Mode = "min") -> None:
        self.path = Path(path)
        self._metric = metric
        self._mode: Mode = mode

    @cached_property
    def trials(self) -> list[Trial]:
        """All trials, in the order of their numbers; read from the files once."""
        run = TuneFolder(self.path)
        return [_trial(run.trial(n), state) for n, state in SearchJournal(run).state().trials.items()]

    def get_best_trial(
        self, metric: str | None = None, mode: Mode | None = None, scope: Scope = "last"
    ) -> Trial | None:
        """Return the best trial, or None if no trial has a number for the metric.

        Args:
            metric: Name of the metric. None: that of this Analysis.
            mode: Whether smaller ("min") or larger ("max") values are better. None: that of this Analysis.
            scope: Whether trials are compared by their "last" result or by the best of "all" their results.

        Raises:
            UsageError: No metric is given, no trial has returned it, or `mode` is invalid.
        """
        found = self._best(metric, mode, scope)
        return found[0] if found else None

    def get_best_config(
        self, metric: str | None = None, mode: Mode | None = None, scope: Scope = "last"
    ) -> dict[str, Any] | None:
        """Return the hyperparameters of the best trial, or None. Arguments and errors are those of `get_best_trial`."""
        found = self._best(metric, mode, scope)
        return found[0].config if found else None

    def get_best_checkpoint(
        self, metric: str | None = None, mode: Mode | None = None, scope: Scope = "last"
    ) -> str | None:
        """Return the path of a checkpoint of the best trial, or None.

        It is the checkpoint of the trial's best iteration if that is kept, else the newest one. `load_checkpoint` and
        TorchTrainer.load take this path. Arguments and errors are those of `get_best_trial`.
        """
        found = self._best(metric, mode, scope)
        if not found:
            return None
        trial, result = found
        kept = trial.checkpoints()
        return kept.get(result[ITERATION]) or kept.get(max(kept, default=0))

    @property
    def best_trial(self) -> Trial | None:
        """The best trial by the default metric and its last result, or None."""
        return self.get_best_trial()

    @property
    def best_config(self) -> dict[str, Any] | None:
        """The hyperparameters of the best trial, or None."""
        return self.get_best_config()

    @property
    def best_result(self) -> dict[str, Any] | None:
        """The last result of the best trial, or None."""
        found = self._best(None, None, "last")
        return found[1] if found else None

    @property
    def best_checkpoint(self) -> str | None:
        """The path of a checkpoint of the best trial, or None."""
        return self.get_best_checkpoint()

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per trial for a table: number, status, `config/NAME` for its config, and its last result.

        Nested dicts are flattened, with their keys joined by slashes.
        """
        return [
            {
                "trial": trial.number,
                "status": trial.status,
                **dict(flat(trial.config, "config/")),
                **dict(flat(trial.last_result)),
            }
            for trial in self.trials
        ]

    def _best(self, metric: str | None, mode: Mode | None, scope: Scope) -> tuple[Trial, dict[str, Any]] | None:
        """Return the best trial, and the result by which it is the best, or None."""
        metric, mode = metric or self._metric, mode or self._mode
        if metric is None:
            raise UsageError(
                "metric: none is given; pass the name of the metric to compare trials by, here or to tune_run"
            )
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
        """Raise UsageError if trials have results, and none of the last ones contains the metric."""
        known = {name for trial in self.trials for name in trial.last_result}
        if known and metric not in known:
            hint = nearest(metric, known) or f"known: {', '.join(sorted(known))}"
            raise UsageError(f"metric {metric!r}: no trial has returned it; {hint}")


def _trial(folder: TuneTrial, state: TrialState) -> Trial:
    """Return a trial from its files and its state in the journal."""
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
