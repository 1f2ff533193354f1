"""How many checkpoints an experiment keeps, as of now: `experiment set gc-policy` may change it at any time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hpc_det.checkpoint.prune import Policy
from hpc_det.node.json_files import read_json
from hpc_det.store.folders import ExperimentFolder, TrialFolder


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
