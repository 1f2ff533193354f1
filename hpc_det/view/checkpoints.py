"""The checkpoints of a trial, of an experiment, or by UUID, each with the metrics of its validation."""

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
"""Number of characters of a UUID that a user must give at least."""


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint, the storage that contains it, and the metrics of its validation."""

    checkpoint: Committed
    storage: TrialStorage
    metrics: dict[str, Any]
    """Metrics of the validation at the same number of batches; empty if there was none."""
    set_aside: Damaged | None = None
    """The record of its damage if it was set aside: no trial resumes from it, and retention does not count it."""

    @property
    def uuid(self) -> str:
        return self.checkpoint.uuid

    @property
    def trial(self) -> TrialFolder:
        return self.storage.trial

    @property
    def state(self) -> str:
        """COMPLETED, PARTIALLY_DELETED, SET_ASIDE or DAMAGED.

        PARTIALLY_DELETED: `checkpoint rm --glob` removed files. SET_ASIDE: it was damaged when a trial was to resume
        from it. DAMAGED: a file is missing or its size is wrong; the content is not read.
        """
        if self.set_aside:
            return "SET_ASIDE"
        if is_here(self.checkpoint.path) and not is_complete(self.checkpoint):
            return "DAMAGED"
        return "PARTIALLY_DELETED" if self.checkpoint.removed else "COMPLETED"

    def value(self, metric: str) -> float | None:
        """Return a metric of the validation, or None if it is missing or not a number."""
        return number_in(self.metrics.get(metric))


def of_trial(trial: TrialFolder, config: Tree) -> list[StoredCheckpoint]:
    """Return the checkpoints of a trial, newest first. `config`: the effective configuration of its experiment."""
    storage = TrialStorage(trial, config["checkpoint_storage"])
    found = storage.all()
    validated = validation_metrics(trial.metrics, {each.steps for each in found})
    return [StoredCheckpoint(each, storage, validated.get(each.steps, {})) for each in found]


def set_aside_in(trial: TrialFolder, config: Tree) -> list[StoredCheckpoint]:
    """Return the checkpoints of a trial that were set aside, oldest first.

    `of_trial` may contain one of them as well, if it was downloaded again from an object store.
    """
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
    """Return the checkpoints of all trials, trial by trial, newest first. `config`: the effective configuration."""
    return [found for trial in experiment.trials() for found in of_trial(trial, config)]


def best_first(
    checkpoints: Sequence[StoredCheckpoint], metric: str, *, smaller_is_better: bool
) -> list[StoredCheckpoint]:
    """Return the checkpoints whose validation has a number for `metric`, best first. Of equal values, the earliest is
    best.
    """
    valued = [(item, value) for item in checkpoints if (value := item.value(metric)) is not None]
    ranked = sorted(valued, key=lambda found: (badness(found[1], smaller_is_better), found[0].checkpoint.time))
    return [item for item, _ in ranked]


def best_of_experiment(
    experiment: ExperimentFolder, metric: str | None = None, smaller_is_better: bool | None = None
) -> list[StoredCheckpoint]:
    """Return the checkpoints with a validation, best first by `metric`, or by the searcher's metric for None.

    Checkpoints that lost files to `checkpoint rm --glob` are left out. Raises UsageError if no validation has the
    metric, or if `smaller_is_better` is None for another metric than the searcher's.
    """
    config = effective_config(experiment)
    return _ranked(of_experiment(experiment, config), config["searcher"], metric, smaller_is_better)


def best_of_trial(
    trial: TrialFolder, metric: str | None = None, smaller_is_better: bool | None = None
) -> list[StoredCheckpoint]:
    """Return the checkpoints of a trial like `best_of_experiment`."""
    config = effective_config(trial.experiment())
    return _ranked(of_trial(trial, config), config["searcher"], metric, smaller_is_better)


def _ranked(
    found: Sequence[StoredCheckpoint], searcher: Tree, metric: str | None, smaller_is_better: bool | None
) -> list[StoredCheckpoint]:
    by = metric or searcher["metric"]
    if smaller_is_better is None and by != searcher["metric"]:
        raise UsageError(
            f"sort_by {by!r}: is not the searcher's metric, {searcher['metric']!r}; set smaller_is_better, too"
        )
    is_small = searcher["smaller_is_better"] if smaller_is_better is None else smaller_is_better
    whole = [item for item in found if not item.checkpoint.removed]
    best = best_first(whole, by, smaller_is_better=is_small)
    known = sorted({name for item in found for name in item.metrics if item.value(name) is not None})
    if known and not best:
        raise UsageError(f"no checkpoint has a validation with {by!r}: they have {', '.join(known)}")
    return best


# --- by uuid


def find(store: ExperimentStore, uuid: str) -> StoredCheckpoint:
    """Return the checkpoint whose UUID is `uuid` or starts with it. Raises UsageError for none or several.

    The folders of all trials are listed without opening files, since there may be ten thousand. Object stores are
    queried only if no folder contains the checkpoint, and checkpoints that were set aside are considered last.
    """
    if len(uuid) < SHORTEST or uuid.startswith(".") or "/" in uuid:
        raise UsageError(
            f"{uuid!r} is not a checkpoint; expected its UUID, or at least its first {SHORTEST} characters"
        )
    found = list(_here(store, uuid)) or list(_stored(store, uuid)) or list(_set_aside(store, uuid))
    if not found:
        raise UsageError(
            f"no experiment below {store.root} has a checkpoint {uuid!r}; `hpc-det experiment list-checkpoints ID` "
            f"shows those of an experiment"
        )
    if len(found) > 1:
        listed = ", ".join(f"{name} of trial {trial.experiment().id}/{trial.id}" for trial, name in found[:5])
        raise UsageError(f"{uuid!r} is the start of {len(found)} UUIDs: {listed}; give more characters")
    trial, name = found[0]
    config = effective_config(trial.experiment())
    for item in (*of_trial(trial, config), *set_aside_in(trial, config)):
        if item.uuid == name:
            return item
    raise HpcDetError(
        f"{trial.checkpoints / name / MANIFEST}: damaged, so the files of checkpoint {name} are not known"
    )


def _here(store: ExperimentStore, uuid: str) -> Iterator[tuple[TrialFolder, str]]:
    """Yield trial and UUID of the checkpoints that have a folder on this machine's file systems."""
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
    """Yield trial and UUID of the checkpoints of experiments that use an object store."""
    for experiment in store.all():
        if experiment.checkpoints_url():
            found = of_experiment(experiment, effective_config(experiment))
            yield from ((item.trial, item.uuid) for item in found if item.uuid.startswith(uuid))
