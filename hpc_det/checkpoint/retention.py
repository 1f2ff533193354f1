"""Which checkpoints an experiment keeps. `experiment set gc-policy` may change its policy at any time.

Kept are the best N of the experiment, the best N of their trial (both by the validation at the same number of batches)
and the latest N of it; while a trial runs, always its two newest, so that a damaged one has something to fall back to.
Of several checkpoints of the same batch only the newest counts: the others go.
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
"""How many of its newest checkpoints a trial keeps while it runs."""


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


def policies(experiment: ExperimentFolder) -> Callable[[int], Policy]:
    """The policy of each trial, by its number, as of now."""
    return policies_of(read_json(experiment.effective) or {}, read_json(experiment.points) or [])


def policies_of(config: Mapping[str, Any], points: Sequence[Mapping[str, Any]]) -> Callable[[int], Policy]:
    """The policy of each trial: of a multirun, its point's."""

    def of_trial(number: int) -> Policy:
        point = points[number - 1] if points else {}
        return Policy.of({**config, **point}["checkpoint_storage"])

    return of_trial


def policy_of(trial: TrialFolder) -> Policy:
    """The policy of one trial, as of now."""
    return policies(trial.experiment())(trial.id)


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
    by_badness = sorted(validated, key=lambda found: found[:4])
    return {uuid for rank, (_, _, _, uuid, policy) in enumerate(by_badness) if rank < policy.experiment_best}


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
