"""A thousand experiments with ten thousand trials on disk, made in seconds.

A few are written as their real writers do; the others are copies with other ids.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from hpc_det.launch.job.worker import prepare_trial
from hpc_det.node.json_files import read_json, write_json
from hpc_det.requeue import Action, AttemptEnd, Cause, Decision
from hpc_det.search.journal import SearchJournal
from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.folders import ExperimentFolder
from tests.cli.life import LENGTH, Life, random_search

SEARCHES = {1000: 1, 500: 5, 100: 20, 40: 90}
"""Number of trials -> number of searches; the other experiments have one trial each."""
EXPERIMENTS, UNDER_WAY = 1000, 5
USUAL = {
    "description": "", "labels": [], "project": "", "workspace": "", "data": {}, "debug": False,
    "resources": dict.fromkeys(("slots_per_trial", "max_slots", "resource_pool", "priority", "shm_size")),
    "max_restarts": 5, "records_per_epoch": 0, "scheduling_unit": 10, "min_validation_period": {"epochs": 1},
    "min_checkpoint_period": {"epochs": 5}, "hang_timeout_s": None, "perform_initial_validation": False,
    "optimizations": dict.fromkeys(("aggregation_frequency", "mixed_precision", "tensor_fusion_threshold"), 1),
    "environment": dict.fromkeys(("image", "environment_variables", "registry_auth", "ports", "proxy_ports")),
    "slurm": dict.fromkeys(("slots_per_node", "gpu_type", "sbatch_args")),
    "pbs": dict.fromkeys(("slots_per_node", "gpu_type", "pbsbatch_args")),
    "checkpoint_storage": {"type": None, "save_experiment_best": 0, "save_trial_best": 1, "save_trial_latest": 1},
    "log_policies": [{"name": "CUDA OOM", "pattern": ".*CUDA out of memory.*", "action": None}],
}  # fmt: skip
"""Keys of an effective configuration that only add to its size, since it is read for each experiment."""


def make_world(root: Path) -> ExperimentStore:
    """Write experiments with ids from 1: searches, the largest first, then single trials, of which the last few run."""
    store = ExperimentStore(root)
    for trials, count in SEARCHES.items():
        searched = make_search(root, trials)
        for _ in range(count - 1):
            copied(searched, store)
    single = make_search(root, 1)
    for _ in range(EXPERIMENTS - sum(SEARCHES.values()) - 1 - UNDER_WAY):
        copied(single, store)
    for _ in range(UNDER_WAY):
        begun(root)
    return store


def make_search(root: Path, trials: int) -> ExperimentFolder:
    """Write a finished experiment: a single trial or a random search, with metrics and a checkpoint per trial."""
    life = begun(root, **(random_search(trials) if trials > 1 else {}))
    life.journal.ended(1, AttemptEnd(cause=Cause.FINISHED, steps=LENGTH), Decision(Action.DONE, "finished"), None)
    search = life.search
    while work := search.state().open.get(0):
        if work.trial > 1:
            _same_as_first(life.folder, search, work.trial)
        search.report(0, work, 0.5 + work.trial / 10_000)
    search.leave(0)
    return life.folder


def begun(root: Path, **searcher: Any) -> Life:
    """Write an experiment whose first trial is under way."""
    life = Life.submitted(root, job_id=str(5000 + ExperimentStore(root).next_id()), **searcher)
    write_json(life.folder.effective, {**USUAL, **(read_json(life.folder.effective) or {})})
    life.begins()
    for batches in range(2, LENGTH, 2):
        life.reports("training", batches, {"loss": 2.0 / batches})
    life.reports("validation", LENGTH, {"loss": 0.01, "accuracy": 0.9})
    life.saves(LENGTH)
    return life


def _same_as_first(folder: ExperimentFolder, search: SearchJournal, number: int) -> None:
    """Give the trial the files of the first one, except its hyperparameters."""
    trial = folder.trial(number)
    prepare_trial(trial, search)
    shutil.copytree(
        folder.trial().path,
        trial.path,
        copy_function=os.link,
        ignore=lambda _, names: {trial.trial.name} & set(names),
        dirs_exist_ok=True,
    )


def copied(experiment: ExperimentFolder, store: ExperimentStore) -> None:
    """Copy this experiment as the next one."""
    folder = store.folder(store.next_id())
    shutil.copytree(experiment.path, folder.path, copy_function=os.link)
    plan, job = read_json(folder.plan) or {}, read_json(folder.job()) or {}
    write_json(folder.plan, {**plan, "experiment_id": folder.id, "folder": str(folder.path)})
    write_json(folder.job(), {**job, "job_id": str(5000 + folder.id)})
