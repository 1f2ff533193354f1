"""The checkpoints of experiments as their owner asks for them: by uuid or all, with what was validated at them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_det.checkpoint.committed import MANIFEST, Committed
from hpc_det.checkpoint.damaged import Damaged, damaged_ones
from hpc_det.checkpoint.retention import badness
from hpc_det.checkpoint.storage import TrialStorage, is_here
from hpc_det.config.merge import Tree
from hpc_det.errors import HpcDetError, UsageError
from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.folders import ExperimentFolder, TrialFolder
from hpc_det.store.metrics import number_in, validation_metrics
from hpc_det.view.state import effective_config
from hpc_det.view.trial_history import is_complete

SHORTEST = 4
"""Characters of a uuid that name a checkpoint."""


@dataclass(frozen=True)
class StoredCheckpoint:
    checkpoint: Committed
    storage: TrialStorage
    metrics: dict[str, Any]
    """Of the validation at its batches; empty where there was none."""
    set_aside: Damaged | None = None
    """What was found when it was set aside: no trial goes on from it, and nothing counts it."""

    @property
    def uuid(self) -> str:
        return self.checkpoint.uuid

    @property
    def trial(self) -> TrialFolder:
        return self.storage.trial

    @property
    def state(self) -> str:
        """COMPLETED, PARTIALLY_DELETED by its owner, SET_ASIDE since it was damaged when a trial was to resume from it,
        or DAMAGED: files are missing or cut; no byte is read.
        """
        if self.set_aside:
            return "SET_ASIDE"
        if is_here(self.checkpoint.path) and not is_complete(self.checkpoint):
            return "DAMAGED"
        return "PARTIALLY_DELETED" if self.checkpoint.removed else "COMPLETED"

    def value(self, metric: str) -> float | None:
        return number_in(self.metrics.get(metric))


def of_trial(trial: TrialFolder, config: Tree) -> list[StoredCheckpoint]:
    """The newest first; `config` is the effective one of its experiment."""
    storage = TrialStorage(trial, config["checkpoint_storage"])
    found = storage.all()
    validated = validation_metrics(trial.metrics, {each.steps for each in found})
    return [StoredCheckpoint(each, storage, validated.get(each.steps, {})) for each in found]


def set_aside_in(trial: TrialFolder, config: Tree) -> list[StoredCheckpoint]:
    """Those that were damaged, the oldest first; one may have come back whole from a store meanwhile."""
    storage = TrialStorage(trial, config["checkpoint_storage"])
    return [
        StoredCheckpoint(
            Committed(path=trial.checkpoints / found.uuid, steps=found.steps or 0, time=found.time, files={}),
            storage,
            {},
            found,
        )
        for found in damaged_ones(trial.checkpoints)
    ]


def of_experiment(experiment: ExperimentFolder, config: Tree) -> list[StoredCheckpoint]:
    """Trial after trial, the newest of each first; `config` is the effective one."""
    return [found for trial in experiment.trials() for found in of_trial(trial, config)]


def best_first(
    checkpoints: Sequence[StoredCheckpoint], metric: str, *, smaller_is_better: bool
) -> list[StoredCheckpoint]:
    """Those with a validation in which `metric` was a number. Of equals the earliest is the best."""
    valued = [(item, value) for item in checkpoints if (value := item.value(metric)) is not None]
    ranked = sorted(valued, key=lambda found: (badness(found[1], smaller_is_better), found[0].checkpoint.time))
    return [item for item, _ in ranked]


# --- by uuid


def find(store: ExperimentStore, uuid: str) -> StoredCheckpoint:
    """The checkpoint whose uuid is `uuid`, or begins with it. Raises UsageError where there is none, or several.

    A folder of a trial is listed and no file of it opened: there may be ten thousand. Stores are asked only about what
    lies in no folder.
    """
    if len(uuid) < SHORTEST or uuid.startswith(".") or "/" in uuid:
        raise UsageError(f"{uuid!r} is no checkpoint; expected its uuid, or the first {SHORTEST} characters and more")
    found = list(_here(store, uuid)) or list(_stored(store, uuid)) or list(_set_aside(store, uuid))
    if not found:
        raise UsageError(
            f"no experiment below {store.root} has a checkpoint {uuid!r}; `hpc-det experiment list-checkpoints ID` "
            f"shows those of an experiment"
        )
    if len(found) > 1:
        listed = ", ".join(f"{name} of trial {trial.experiment().id}/{trial.id}" for trial, name in found[:5])
        raise UsageError(f"{uuid!r} begins {len(found)} uuids: {listed}; give more of it")
    trial, name = found[0]
    config = effective_config(trial.experiment())
    for item in (*of_trial(trial, config), *set_aside_in(trial, config)):
        if item.uuid == name:
            return item
    raise HpcDetError(
        f"{trial.checkpoints / name / MANIFEST}: damaged, so the files of checkpoint {name} are not known"
    )


def _here(store: ExperimentStore, uuid: str) -> Iterator[tuple[TrialFolder, str]]:
    for experiment in store.all():
        for trial in experiment.trials():
            for name in _beginning_with(uuid, trial.checkpoints):
                if is_here(trial.checkpoints / name):
                    yield trial, name


def _set_aside(store: ExperimentStore, uuid: str) -> Iterator[tuple[TrialFolder, str]]:
    for experiment in store.all():
        for trial in experiment.trials():
            found = damaged_ones(trial.checkpoints)
            yield from ((trial, item.uuid) for item in found if item.uuid.startswith(uuid))


def _beginning_with(uuid: str, checkpoints: Path) -> list[str]:
    try:
        return [name for name in os.listdir(checkpoints) if name.startswith(uuid)]
    except FileNotFoundError:
        return []


def _stored(store: ExperimentStore, uuid: str) -> Iterator[tuple[TrialFolder, str]]:
    for experiment in store.all():
        if experiment.checkpoints_url():
            found = of_experiment(experiment, effective_config(experiment))
            yield from ((item.trial, item.uuid) for item in found if item.uuid.startswith(uuid))
