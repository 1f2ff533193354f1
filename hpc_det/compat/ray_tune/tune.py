"""`ray.tune.tune`: `run`, with Ray's arguments, as a search of hpc_det.sgd.tune."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from hpc_det.compat.ray_tune.analysis import ExperimentAnalysis
from hpc_det.compat.ray_tune.error import TuneError
from hpc_det.compat.ray_tune.progress_reporter import CLIReporter, ProgressReporter
from hpc_det.compat.ray_tune.schedulers import FIFOScheduler, TrialScheduler, create_scheduler
from hpc_det.errors import UsageError, shown
from hpc_det.sgd.tune import tune_run
from hpc_det.sgd.tune.files import ITERATION, Mode
from hpc_det.sgd.tune.run import NoResults
from hpc_det.store.run_folder import path_of

logger = logging.getLogger("ray.tune")

_NOT_HERE = {
    "time_budget_s": "limit the trials with stop, or the job with its walltime",
    "search_alg": "hyperparameters are drawn from their ranges; searches with Optuna are experiments",
    "restore": "call trainer.load in setup",
    "export_formats": "save the model with trainer.save",
    "trial_executor": "set max_concurrent_trials",
}
"""Arguments that would change the results, and what to do instead of giving them."""
_WITHOUT_EFFECT = {
    "keep_checkpoints_num": None,
    "checkpoint_score_attr": None,
    "checkpoint_at_end": False,
    "log_to_file": False,
    "trial_name_creator": None,
    "trial_dirname_creator": None,
    "sync_config": None,
    "fail_fast": False,
    "server_port": None,
    "queue_trials": False,
    "reuse_actors": False,
    "callbacks": None,
    "loggers": None,
}
"""Arguments that change no result, and their defaults."""


def run(
    run_or_experiment: Any,
    name: str | None = None,
    metric: str | None = None,
    mode: str | None = None,
    stop: Mapping[str, float] | None = None,
    time_budget_s: None = None,
    config: Mapping[str, Any] | None = None,
    resources_per_trial: Mapping[str, int] | None = None,
    num_samples: int = 1,
    local_dir: str | None = None,
    search_alg: None = None,
    scheduler: TrialScheduler | str | None = None,
    *,
    checkpoint_freq: int = 0,
    verbose: int = 3,
    progress_reporter: ProgressReporter | None = None,
    max_failures: int = 0,
    resume: bool | str = False,
    raise_on_failed_trial: bool = True,
    max_concurrent_trials: int | None = None,
    **others: Any,
) -> ExperimentAnalysis:
    """Run a search and return its results: `tune_run` of hpc_det.sgd.tune, with the arguments of Ray's `tune.run`.

    Args:
        run_or_experiment: TorchTrainer.as_trainable(...), or a subclass of tune.Trainable.
        name: The beginning of the name of the run folder, to which the time is appended. None: "tune".
        metric: Name of the metric by which trials are compared.
        mode: Whether smaller ("min") or larger ("max") values are better; needed where a metric is given.
        stop: By metric, the value at or above which a trial is complete.
        time_budget_s: Only None.
        config: Hyperparameters: fixed values, and ranges of ray.tune.
        resources_per_trial: `{"cpu": n, "gpu": m}` for a trial. None: what the trainable requires.
        num_samples: Number of trials, or of trials for each point of the grid.
        local_dir: The folder of the run folder. None: $HPC_DET_ROOT/sgd.
        search_alg: Only None.
        scheduler: A scheduler of ray.tune.schedulers, or its name.
        checkpoint_freq: Iterations between checkpoints; 0: only at the end of a trial.
        verbose: 0: neither lines nor tables of the trials.
        progress_reporter: A CLIReporter, which prints a table at the end. None: one with the iteration and `metric`;
            in a terminal, the table that was shown during the search.
        max_failures: How often a trial is restarted after its process has died; -1: without limit. A trial that raises
            an exception has failed.
        resume: True or "LOCAL": continue the newest search of this name; "AUTO": if there is one.
        raise_on_failed_trial: Whether failed trials raise TuneError after the end of the search.
        max_concurrent_trials: Largest number of trials at the same time; None or 0: as many as there are resources for.
        **others: Other arguments of Ray's `tune.run`. Those that would change results raise UsageError; a line in the
            log names those without effect.

    Raises:
        TuneError: Trials have failed.
        ValueError: A metric is given without a mode, or one of them to the scheduler as well.
        UsageError: An argument is invalid, or works only in Ray.
    """
    _check({**others, "time_budget_s": time_budget_s, "search_alg": search_alg}, stop, resources_per_trial)
    chosen = create_scheduler(scheduler) if isinstance(scheduler, str) else scheduler or FIFOScheduler()
    metric, mode = _compared_by("metric", metric, chosen.metric), _compared_by("mode", mode, chosen.mode)
    if metric and not mode:
        raise ValueError(f"mode: none is given for metric {metric!r}; give mode='min' or mode='max'")
    ends = dict(stop or {})
    if chosen.max_t is not None:
        ends[ITERATION] = min(chosen.max_t, ends.get(ITERATION, chosen.max_t))
    folder = _run_folder(name or "tune", local_dir, resume)
    with suppress(NoResults):  # each trial has failed, which is reported below
        tune_run(
            run_or_experiment,
            config=chosen.completed(config or {}),
            stop=ends,
            metric=metric,
            mode=cast(Mode, mode or "min"),
            num_samples=num_samples,
            searcher=chosen.searcher(int(ends[ITERATION]) if ITERATION in ends else None),
            max_concurrent=max_concurrent_trials or None,
            resources_per_trial=resources_per_trial,
            run=folder,
            max_failures=max_failures,
            checkpoint_freq=checkpoint_freq,
            verbose=bool(verbose),
        )
    analysis = ExperimentAnalysis(folder, metric, mode)
    if verbose and progress_reporter:
        progress_reporter.show(analysis)
    elif verbose and not sys.stdout.isatty():  # in a terminal, the table of tune_run stays
        CLIReporter(metric_columns=[ITERATION, *filter(None, [metric])]).show(analysis)
    failed = [trial for trial in analysis.trials if trial.status == "ERROR"]
    if failed and raise_on_failed_trial:
        raise TuneError([f"trial {trial.number}: {trial.error}; see {trial.logdir}" for trial in failed])
    return analysis


def _check(others: Mapping[str, Any], stop: Any, resources: Any) -> None:
    """Check the arguments that Ray understands in more forms, and log those without effect. Raises UsageError."""
    problems = [
        f"tune.run({name}=...): not available here; {remedy}"
        for name, remedy in _NOT_HERE.items()
        if others.get(name) is not None
    ]
    problems += [
        f"tune.run: no argument {name!r}" for name in others if name not in _NOT_HERE and name not in _WITHOUT_EFFECT
    ]
    if stop is not None and not isinstance(stop, Mapping):
        problems.append(
            f"stop: got {shown(stop)}; expected a dict of metrics, or return {{'done': True}} from override_tune_step"
        )
    if resources is not None and not _is_whole(resources):
        problems.append(
            f"resources_per_trial: got {shown(resources)}; expected whole numbers of 'cpu' and 'gpu', of all ranks"
        )
    if problems:
        raise UsageError(problems)
    given = [name for name, default in _WITHOUT_EFFECT.items() if others.get(name, default) != default]
    if given:
        logger.warning(
            "tune.run: no effect here: %s; the newest two checkpoints of each trial and the best are kept, and logs "
            "are in the run folder",
            ", ".join(given),
        )


def _is_whole(resources: Any) -> bool:
    is_known = isinstance(resources, Mapping) and set(resources) <= {"cpu", "gpu"}
    return is_known and all(type(number) is int for number in resources.values())


def _compared_by(name: str, asked: str | None, schedulers: str | None) -> str | None:
    """Return the metric or mode of tune.run or of the scheduler. Raises ValueError if both are given, as Ray does."""
    if asked and schedulers:
        raise ValueError(f"{name}: given to tune.run ({asked!r}) and to its scheduler ({schedulers!r}); give it to one")
    return asked or schedulers


def _run_folder(name: str, local_dir: str | None, resume: bool | str) -> Path:
    """Return a new run folder, or with `resume` the newest of this name.

    Raises UsageError if there is none to resume.
    """
    if resume not in (True, False, None, "LOCAL", "AUTO"):
        raise UsageError(f"resume: got {resume!r}; expected True, False, 'LOCAL' or 'AUTO'")
    stem = Path(local_dir).expanduser().absolute() / name if local_dir else path_of(name, os.environ)
    earlier = sorted(stem.parent.glob(f"{stem.name}-*/effective.json"), key=lambda path: path.stat().st_mtime)
    if resume and earlier:
        return earlier[-1].parent
    if resume and resume != "AUTO":
        raise UsageError(f"resume: found no search {stem}-*; give name and local_dir of the earlier search")
    return stem.with_name(f"{stem.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
