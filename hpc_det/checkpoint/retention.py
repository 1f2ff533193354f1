"""The retention policy of checkpoints, which `experiment set gc-policy` can change at any time.

An experiment keeps its best N checkpoints, and the best N and the latest N of each trial; the validation at the same
number of batches decides what is best. A running trial always keeps its two newest, in case one is damaged. Of several
checkpoints at the same batch only the newest counts; the others are deleted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_det.checkpoint.committed import Committed
from hpc_det.node.json_files import read_json
from hpc_det.store.folders import ExperimentFolder, TrialFolder

RESUME_DEPTH = 2
"""Number of newest checkpoints that a trial keeps while it runs."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Numbers of checkpoints to keep."""

    experiment_best: int = 0
    trial_best: int = 1
    trial_latest: int = 1

    @classmethod
    def of(cls, storage: Mapping[str, Any]) -> Policy:
        """Return the policy in `storage`: checkpoint_storage of an effective config."""
        return cls(
            experiment_best=storage["save_experiment_best"],
            trial_best=storage["save_trial_best"],
            trial_latest=storage["save_trial_latest"],
        )

    @property
    def best_while_it_runs(self) -> int:
        """Number of best checkpoints that a running trial keeps."""
        # all of the best checkpoints of the experiment may be of this trial
        return max(self.trial_best, self.experiment_best)


def policies(experiment: ExperimentFolder) -> Callable[[int], Policy]:
    """Return a function from the number of a trial to its current policy."""
    return policies_of(read_json(experiment.effective) or {}, read_json(experiment.points) or [])


def policies_of(config: Mapping[str, Any], points: Sequence[Mapping[str, Any]]) -> Callable[[int], Policy]:
    """Return a function from the number of a trial to its policy; points of a multirun may override the config's."""

    def of_trial(number: int) -> Policy:
        point = points[number - 1] if points else {}
        return Policy.of({**config, **point}["checkpoint_storage"])

    return of_trial


def policy_of(trial: TrialFolder) -> Policy:
    """Return the current policy of one trial."""
    return policies(trial.experiment())(trial.id)


@dataclass(frozen=True, kw_only=True)
class TrialCheckpoints:
    """The checkpoints of one trial, and what determines which of them are kept."""

    checkpoints: Sequence[Committed]
    """Newest first."""
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
    """Return the checkpoints of a trial that are not kept.

    `checkpoints`: newest first. `validations`: batches -> searcher metric; NaN is worst. `best`, `latest`: how many of
    the best and of the newest are kept.
    """
    of_each_batch = _newest_of_each_batch(checkpoints)
    the_best = _best_first(of_each_batch, validations, smaller_is_better)[:best]
    # a trial cannot resume from a checkpoint with removed files, so `latest` of the others are kept as well
    whole = _newest_of_each_batch([item for item in checkpoints if not item.removed])
    kept = {item.uuid for item in [*the_best, *of_each_batch[:latest], *whole[:latest]]}
    return [item for item in checkpoints if item.uuid not in kept]


def superfluous_of_all(trials: Sequence[TrialCheckpoints], *, smaller_is_better: bool) -> list[Committed]:
    """Return the checkpoints of an experiment that no policy keeps."""
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
    """Return the newest of the checkpoints at each batch. `checkpoints` and the result are newest first."""
    # for instance, a checkpoint before a validation and one after it: the later one contains the validation
    by_steps: dict[int, Committed] = {}
    for item in checkpoints:
        by_steps.setdefault(item.steps, item)
    return list(by_steps.values())


def _best_of_experiment(trials: Sequence[TrialCheckpoints], smaller_is_better: bool) -> set[str]:
    """Return the uuids of the checkpoints that are kept because they are among the best of the experiment."""
    validated = [
        (*badness(trial.validations[item.steps], smaller_is_better), item.time, item.uuid, trial.policy)
        for trial in trials
        for item in _newest_of_each_batch(trial.checkpoints)
        if item.steps in trial.validations
    ]
    by_badness = sorted(validated, key=lambda found: found[:4])
    # the points of a multirun may have different numbers: each applies to the checkpoints of its own trial
    return {uuid for rank, (_, _, _, uuid, policy) in enumerate(by_badness) if rank < policy.experiment_best}


def _best_first(
    checkpoints: Sequence[Committed], validations: Mapping[int, float], smaller_is_better: bool
) -> list[Committed]:
    """Return the checkpoints with a validation, best first."""
    # of equal ones the earliest is the best: later ones did not improve on it
    validated = (item for item in checkpoints if item.steps in validations)
    return sorted(validated, key=lambda item: (*badness(validations[item.steps], smaller_is_better), item.steps))


def badness(value: float, smaller_is_better: bool) -> tuple[bool, float]:
    """Return a sort key for metrics: the best first, NaN last."""
    if math.isnan(value):
        return True, 0.0
    return False, value if smaller_is_better else -value  # False sorts before True
