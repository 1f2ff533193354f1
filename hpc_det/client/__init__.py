"""Experiments from Python: create them, wait for them, and read their metrics, logs and checkpoints.

    from hpc_det import client

    experiment = client.create("digits.yaml", ".", cluster="slurm")
    print(experiment.result().value)

All state is read from files, so the objects need no job, no server and no torch, and are current at each access. Only
`Checkpoint.load` imports torch. A UsageError means invalid input, its base class HpcDetError that an operation has
failed. Notes are printed on stderr, as by the commands of `hpc-det`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_det.client.api import create, dry_run, get, get_checkpoint, get_trial, list
    from hpc_det.client.checkpoint import Checkpoint
    from hpc_det.client.experiment import Experiment
    from hpc_det.client.metrics import Metrics
    from hpc_det.client.result import ExperimentFailed, Result
    from hpc_det.client.trial import Trial
    from hpc_det.errors import HpcDetError, UsageError
    from hpc_det.view.state import ExperimentState
    from hpc_det.view.trials import TrialState

_HOMES = {
    "create": "hpc_det.client.api",
    "dry_run": "hpc_det.client.api",
    "get": "hpc_det.client.api",
    "get_checkpoint": "hpc_det.client.api",
    "get_trial": "hpc_det.client.api",
    "list": "hpc_det.client.api",
    "Checkpoint": "hpc_det.client.checkpoint",
    "Experiment": "hpc_det.client.experiment",
    "ExperimentFailed": "hpc_det.client.result",
    "ExperimentState": "hpc_det.view.state",
    "HpcDetError": "hpc_det.errors",
    "Metrics": "hpc_det.client.metrics",
    "Result": "hpc_det.client.result",
    "Trial": "hpc_det.client.trial",
    "TrialState": "hpc_det.view.trials",
    "UsageError": "hpc_det.errors",
}

__all__ = [
    "Checkpoint",
    "Experiment",
    "ExperimentFailed",
    "ExperimentState",
    "HpcDetError",
    "Metrics",
    "Result",
    "Trial",
    "TrialState",
    "UsageError",
    "create",
    "dry_run",
    "get",
    "get_checkpoint",
    "get_trial",
    "list",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use: commands use parts of this package, and must not wait for the rest."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
