"""effective.json of an experiment: the effective configuration, as its workers and the command line read it."""

from __future__ import annotations

from typing import Any

from hpc_det.node.json_files import Shape, checked
from hpc_det.store.folders import ExperimentFolder
from hpc_det.store.secret_files import read_secrets

WHOLE: Shape = {
    "name": str,
    "searcher": {"name": str, "metric": str, "smaller_is_better": bool},
    "hyperparameters": dict,
    "checkpoint_storage": dict.fromkeys(("save_experiment_best", "save_trial_best", "save_trial_latest"), int),
}
"""What each reader needs; the schema of an experiment file says more."""


_OF_SEARCH: Shape = {"searcher": {"name": str}, "hyperparameters": dict, "reproducibility": dict}


def read_effective(experiment: ExperimentFolder) -> dict[str, Any] | None:
    """None where there is no such file. Secrets are masked for colleagues. Raises DamagedFile."""
    found = read_secrets(experiment.effective)
    return None if found is None else checked(found, WHOLE, experiment.effective)


def read_for_search(experiment: ExperimentFolder) -> dict[str, Any]:
    """As far as a search needs it. Raises DamagedFile, also where there is no such file."""
    return checked(read_secrets(experiment.effective), _OF_SEARCH, experiment.effective)
