"""tune_run: from what was asked for to an Analysis."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from hpc_det.errors import HpcDetError, UsageError, shown
from hpc_det.node.json_files import read_json
from hpc_det.sgd.tune.analysis import Analysis
from hpc_det.sgd.tune.driver import Driver
from hpc_det.sgd.tune.files import ITERATION, Mode, TuneFolder, run_folder
from hpc_det.sgd.tune.places import Jobs, Place, packed
from hpc_det.sgd.tune.searchers import searcher_of, space_of
from hpc_det.sgd.tune.space import config_of
from hpc_det.sgd.tune.trainable import Trainable

JOBS = 16
"""At the same time, unless `max_concurrent` says otherwise; as in an experiment file."""


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
    place: Place
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
        Driver(folder, place, max_failures=max_failures, turns=turns).drive()
    return _analysis(folder, metric, mode)


def _analysis(folder: TuneFolder, metric: str | None, mode: Mode) -> Analysis:
    analysis = Analysis(folder.path, metric, mode)
    if not any(trial.results for trial in analysis.trials):
        raise HpcDetError([f"trial {trial.number}: {trial.status}: {trial.error}" for trial in analysis.trials])
    return analysis


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
