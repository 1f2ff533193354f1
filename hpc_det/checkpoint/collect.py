"""At the end of an experiment: what `checkpoint_storage` does not keep goes, over all its trials."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hpc_det.checkpoint.committed import Committed
from hpc_det.checkpoint.policy import policies
from hpc_det.checkpoint.prune import Policy, TrialCheckpoints, superfluous_of_all
from hpc_det.checkpoint.sources import wanted_by_later
from hpc_det.checkpoint.storage import TrialStorage, clear_leftovers
from hpc_det.node.json_files import Shape, checked, read_json
from hpc_det.store.folders import ExperimentFolder
from hpc_det.store.metrics import validations

_SHAPE: Shape = {"searcher": {"metric": str, "smaller_is_better": bool}, "checkpoint_storage": dict}
"""What decides, of an effective configuration."""


class Superfluous(NamedTuple):
    storage: TrialStorage
    checkpoint: Committed


def collect(experiment: ExperimentFolder) -> list[Superfluous]:
    """Delete what no policy keeps and no other experiment begins with; what that was. Nobody may have work of it.

    Any number of processes may do it, and gangs may still save: a newer checkpoint never makes that one worth keeping
    again which it has put behind. Raises HpcDetError where a store does not answer; the next call does the rest.
    """
    found = superfluous_in(experiment, policies(experiment))
    if found:
        wanted = set(wanted_by_later(experiment, {each.checkpoint.uuid for each in found}))
        found = [each for each in found if each.checkpoint.uuid not in wanted]
    for trial in experiment.trials():
        clear_leftovers(trial)
    for storage, checkpoint in found:
        storage.remove(checkpoint.uuid)
    return found


def superfluous_in(experiment: ExperimentFolder, policy_of: Callable[[int], Policy]) -> list[Superfluous]:
    """What `policy_of` each trial, by its number, does not keep."""
    config = checked(read_json(experiment.effective) or {}, _SHAPE, experiment.effective)
    searcher = config["searcher"]
    owners: dict[str, TrialStorage] = {}
    trials: list[TrialCheckpoints] = []
    for trial in experiment.trials():
        storage = TrialStorage(trial, config["checkpoint_storage"])
        known = storage.all()
        owners |= {checkpoint.uuid: storage for checkpoint in known}
        found = validations(trial.metrics, searcher["metric"])
        trials.append(TrialCheckpoints(checkpoints=known, validations=found, policy=policy_of(trial.id)))
    gone = superfluous_of_all(trials, smaller_is_better=searcher["smaller_is_better"])
    return [Superfluous(owners[checkpoint.uuid], checkpoint) for checkpoint in gone]
