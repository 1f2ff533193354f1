"""A cluster and an experiment to start from."""

from __future__ import annotations

from typing import Any

from hpc_det.config.cluster import Cluster
from hpc_det.config.schema import Experiment


def cluster(**settings: Any) -> Cluster:
    """Slurm with nodes of four GPUs."""
    required: dict[str, Any] = {"name": "atlas", "scheduler": "slurm", "slots_per_node": 4, "slot_type": "gpu"}
    return Cluster(**(required | settings))


def experiment(**settings: Any) -> Experiment:
    """One slot, a legacy entrypoint."""
    required: dict[str, Any] = {
        "name": "digits",
        "entrypoint": "model_def:DigitsTrial",
        "searcher": {"metric": "loss", "max_length": 10},
    }
    return Experiment(**(required | settings))
