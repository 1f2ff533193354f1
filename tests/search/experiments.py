"""Create the folder of an experiment that contains only a search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpc_det.node.json_files import write_json
from hpc_det.store.folders import ExperimentFolder


def experiment(folder: Path, **searcher: Any) -> ExperimentFolder:
    """Create an experiment with hyperparameters, a seed and this searcher, with the defaults of an effective config."""
    found = ExperimentFolder(folder)
    found.search.mkdir(parents=True)
    defaults = {
        "metric": "loss",
        "smaller_is_better": True,
        "max_length": None,
        "max_concurrent_trials": 16,
        "divisor": 4,
        "bracket_rungs": [],
        "stop_once": False,
    }
    config = {
        "searcher": {**defaults, **searcher},
        "hyperparameters": {"lr": {"type": "log", "base": 10.0, "minval": -4.0, "maxval": -1.0}},
        "reproducibility": {"experiment_seed": 7},
    }
    write_json(found.effective, config)
    return found
