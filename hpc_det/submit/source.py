"""The checkpoint that an experiment names as the source of its trials' first weights."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_det.checkpoint.committed import Committed, committed, lacks_files, newest_good
from hpc_det.errors import UsageError
from hpc_det.search.journal import SearchJournal
from hpc_det.search.state import best_trial
from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.folders import ExperimentFolder, TrialFolder

WEIGHTS = ("*state_dict.pth", "shard-*.pth", "engines.json", "model[0-9]*/*")
"""The files of a checkpoint that the weights are in, of a PyTorchTrial and of a DeepSpeedTrial."""


def source_checkpoint(searcher: Mapping[str, Any], store: ExperimentStore) -> Path | None:
    """The folder that `source_trial_id` or `source_checkpoint_uuid` means; None where neither is given.

    Of a trial it is the latest checkpoint (upstream's rule). Raises UsageError where there is none.
    """
    try:
        if name := searcher.get("source_trial_id"):
            return _latest(_trial(name, store))
        uuid = searcher.get("source_checkpoint_uuid")
        return _of_uuid(uuid, store) if uuid else None
    except UsageError as error:
        key = "source_trial_id" if searcher.get("source_trial_id") else "source_checkpoint_uuid"
        raise UsageError([f"searcher.{key}: {problem}" for problem in error.problems]) from None


def _trial(name: str, store: ExperimentStore) -> TrialFolder:
    """`name`: "12/3", or "12" for the best trial of experiment 12."""
    number, _, trial = name.partition("/")
    experiment = store.existing(int(number))
    known = [begun.id for begun in experiment.trials()]
    if not known:
        raise UsageError(f"no trial of experiment {number} has begun")
    found = int(trial) if trial else _best(experiment) or known[0]
    if found not in known:
        raise UsageError(f"{name}: experiment {number} has no trial {found}; it has {', '.join(map(str, known))}")
    return experiment.trial(found)


def _best(experiment: ExperimentFolder) -> int | None:
    search = SearchJournal(experiment)
    best = best_trial(search.new(), search.searcher)
    return best.trial if best else None


def _latest(trial: TrialFolder) -> Path:
    found, skipped = newest_good(trial.checkpoints)
    if found is None:
        name = f"{trial.experiment().id}/{trial.id}"
        raise UsageError([*skipped, f"trial {name} has no checkpoint; name one that was trained and kept one"])
    return found.path


def _of_uuid(uuid: str, store: ExperimentStore) -> Path:
    for experiment in store.all():
        for trial in experiment.trials():
            found = (checkpoint for checkpoint in committed(trial.checkpoints) if checkpoint.uuid == uuid)
            if checkpoint := next(found, None):
                _insist_on_weights(checkpoint, experiment)
                return checkpoint.path
    raise UsageError(f"no experiment below {store.root} has a checkpoint {uuid!r}")


def _insist_on_weights(checkpoint: Committed, experiment: ExperimentFolder) -> None:
    if any(fnmatch.fnmatch(name, pattern) for name in checkpoint.removed for pattern in WEIGHTS):
        raise UsageError(
            f"{checkpoint.path} {lacks_files(checkpoint)}; name one that has its weights: "
            f"`hpc-det experiment list-checkpoints {experiment.id}` shows which are COMPLETED"
        )
    if damage := checkpoint.damage():
        raise UsageError([f"{checkpoint.path}: damaged: {problem}" for problem in damage])
