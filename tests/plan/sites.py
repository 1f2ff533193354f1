"""A default cluster and a default experiment."""

from __future__ import annotations

from typing import Any

from hpc_det.config.cluster import Cluster
from hpc_det.config.schema import Experiment


def cluster(**settings: Any) -> Cluster:
    """Return a Slurm cluster with nodes of four GPUs."""
    required: dict[str, Any] = {"name": "atlas", "scheduler": "slurm", "slots_per_node": 4, "slot_type": "gpu"}
    return Cluster(**(required | settings))


def experiment(**settings: Any) -> Experiment:
    """Return an experiment with one slot and a legacy entrypoint."""
    required: dict[str, Any] = {
        "name": "digits",
        "entrypoint": "model_def:DigitsTrial",
        "searcher": {"metric": "loss", "max_length": 10},
    }
    return Experiment(**(required | settings))
