"""Which checkpoints may go: a pure rule.

Kept are the best N of the experiment, the best N of their trial (both by the validation at the same number of batches)
and the latest N of it; while a trial runs, always its two newest, so that a damaged one has something to fall back to.
Of several checkpoints of the same batch only the newest counts: the others go.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hpc_det.checkpoint.committed import Committed
from hpc_det.checkpoint.storage import TrialStorage, clear_leftovers
from hpc_det.errors import HpcDetError
from hpc_det.node.json_files import Shape, checked, read_json
from hpc_det.search.journal import SearchJournal
from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.folders import ExperimentFolder, TrialFolder
from hpc_det.store.metrics import validations


def policies(experiment: ExperimentFolder) -> Callable[[int], Policy]:
    return policies_of(read_json(experiment.effective) or {}, read_json(experiment.points) or [])


def policies_of(config: Mapping[str, Any], points: Sequence[Mapping[str, Any]]) -> Callable[[int], Policy]:
    """The policy of each trial: of a multirun, its point's."""

    def of_trial(number: int) -> Policy:
        point = points[number - 1] if points else {}
        return Policy.of({**config, **point}["checkpoint_storage"])

    return of_trial


def policy_of(trial: TrialFolder) -> Policy:
    return policies(trial.experiment())(trial.id)


RESUME_DEPTH = 2


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How many checkpoints stay."""

    experiment_best: int = 0
    trial_best: int = 1
    trial_latest: int = 1

    @classmethod
    def of(cls, storage: Mapping[str, Any]) -> Policy:
        """`storage`: checkpoint_storage of an effective config."""
        return cls(
            experiment_best=storage["save_experiment_best"],
            trial_best=storage["save_trial_best"],
            trial_latest=storage["save_trial_latest"],
        )

    @property
    def best_while_it_runs(self) -> int:
        """Of a trial: the best of the experiment may all be in one."""
        return max(self.trial_best, self.experiment_best)


@dataclass(frozen=True, kw_only=True)
class TrialCheckpoints:
    checkpoints: Sequence[Committed]
    """The newest first."""
    validations: Mapping[int, float]
    """Batches -> searcher metric; NaN is worst."""
    policy: Policy


def superfluous(
    checkpoints: Sequence[Committed],
    validations: Mapping[int, float],
    *,
    smaller_is_better: bool,
    best: int,
    latest: int,
) -> list[Committed]:
    """Those of a trial's `checkpoints` (newest first) that nothing keeps.

    `validations`: batches -> searcher metric; NaN is worst.
    """
    of_each_batch = _newest_of_each_batch(checkpoints)
    the_best = _best_first(of_each_batch, validations, smaller_is_better)[:best]
    whole = _newest_of_each_batch([item for item in checkpoints if not item.removed])  # a trial resumes from no other
    kept = {item.uuid for item in [*the_best, *of_each_batch[:latest], *whole[:latest]]}
    return [item for item in checkpoints if item.uuid not in kept]


def superfluous_of_all(trials: Sequence[TrialCheckpoints], *, smaller_is_better: bool) -> list[Committed]:
    """Those of an experiment's checkpoints that no policy keeps."""
    kept = _best_of_experiment(trials, smaller_is_better)
    return [
        item
        for trial in trials
        for item in superfluous(
            trial.checkpoints,
            trial.validations,
            smaller_is_better=smaller_is_better,
            best=trial.policy.trial_best,
            latest=trial.policy.trial_latest,
        )
        if item.uuid not in kept
    ]


def _newest_of_each_batch(checkpoints: Sequence[Committed]) -> list[Committed]:
    """`checkpoints` are the newest first. One from before a validation is superseded by the one after it."""
    by_steps: dict[int, Committed] = {}
    for item in checkpoints:
        by_steps.setdefault(item.steps, item)
    return list(by_steps.values())


def _best_of_experiment(trials: Sequence[TrialCheckpoints], smaller_is_better: bool) -> set[str]:
    """The points of a multirun may differ in how many they keep: each counts its own among the best of all."""
    validated = [
        (*badness(trial.validations[item.steps], smaller_is_better), item.time, item.uuid, trial.policy)
        for trial in trials
        for item in _newest_of_each_batch(trial.checkpoints)
        if item.steps in trial.validations
    ]
    bybadness = sorted(validated, key=lambda found: found[:4])
    return {uuid for rank, (_, _, _, uuid, policy) in enumerate(bybadness) if rank < policy.experiment_best}


def _best_first(
    checkpoints: Sequence[Committed], validations: Mapping[int, float], smaller_is_better: bool
) -> list[Committed]:
    """Those with a validation. Of equals the earliest is the best: it was strictly better when it came."""
    validated = (item for item in checkpoints if item.steps in validations)
    return sorted(validated, key=lambda item: (*badness(validations[item.steps], smaller_is_better), item.steps))


def badness(value: float, smaller_is_better: bool) -> tuple[bool, float]:
    """To sort metrics by, the best first; NaN is the worst."""
    if math.isnan(value):
        return True, 0.0
    return False, value if smaller_is_better else -value


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


def source_of(experiment: ExperimentFolder) -> Path | None:
    """The checkpoint whose weights its trials begin with; None where each has its own."""
    with suppress(ValueError, OSError):  # torn, or its owner's alone
        if told := read_json(experiment.warm_start):
            return Path(told["checkpoint"])
    return None


def wanted_by_later(experiment: ExperimentFolder, uuids: Container[str]) -> Iterator[str]:
    """Those of its checkpoints `uuids` that another experiment begins with which has not ended, as far as files tell.

    Only a later one can: it was created when the checkpoint was there. The scheduler is not asked, since this may be a
    node that cannot: an experiment whose jobs are gone without a word wants its checkpoint still.
    """
    for other in ExperimentStore(experiment.root()).all():
        source = source_of(other) if other.id > experiment.id else None
        if source and source.name in uuids and not _has_ended(other):
            yield source.name


def _has_ended(experiment: ExperimentFolder) -> bool:
    try:
        return SearchJournal(experiment).state().finished
    except (HpcDetError, OSError, ValueError, LookupError, TypeError):  # damaged: nobody knows
        return False
