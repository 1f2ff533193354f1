"""Short trainings: an experiment that does not support them is refused before submission, with all problems."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_det.config.request import Request
from hpc_det.plan.effective import effective
from hpc_det.plan.short_training import problems

CLUSTER = {"name": "here", "scheduler": "local", "slots_per_node": 2, "slot_type": "cpu"}
RANGE = {"type": "log", "minval": -4, "maxval": -1}


def named(folder: Path, script: str | None, *, scripts: bool = False, **config: Any) -> list[str]:
    """Return the keys that the problems name."""
    entrypoint = "python3 -m hpc_det.launch.direct --trial model_def:T"
    if script is not None:
        (folder / "train.py").write_text(script)
        entrypoint = "python3 train.py"
    tree = {"entrypoint": entrypoint, "searcher": {"metric": "loss", "max_length": 9}, **config}
    (folder / "model_def.py").write_text("from trials import T")
    found = effective(Request(config=tree, cluster=CLUSTER, template=None, template_name=None, context_dir=folder))
    return [problem.partition(":")[0] for problem in problems(found, scripts=scripts)]


@pytest.mark.parametrize("script", [None, "from hpc_det import pytorch", "from hpc_det.pytorch import Trainer"])
def test_a_trial_and_a_script_with_a_trainer_are_fine(tmp_path: Path, script: str | None) -> None:
    assert named(tmp_path, script) == []


@pytest.mark.parametrize("script", ["import torch", "from hpc_det.sgd import TorchTrainer", "import hpc_det.core"])
def test_every_range_and_a_script_with_a_loop_of_its_own_are_refused_at_once(tmp_path: Path, script: str) -> None:
    ranges = {"lr": RANGE, "model": {"width": {"type": "categorical", "vals": [1, 2]}, "depth": 3}}
    keys = named(tmp_path, script, hyperparameters=ranges)
    assert keys == ["entrypoint", "hyperparameters.lr", "hyperparameters.model.width"]


@pytest.mark.parametrize(
    ("script", "keys"),
    [
        ("import hpc_det.core", []),
        ("from hpc_det import core", []),
        ("from hpc_det.integrations.transformers import Callback", []),
        ("from hpc_det.pytorch import Trainer", []),
        ("from hpc_det.sgd import TorchTrainer", ["entrypoint"]),
        ("import torch", ["entrypoint"]),
    ],
)
def test_a_script_with_a_loop_on_the_core_api_can_be_compared(tmp_path: Path, script: str, keys: list[str]) -> None:
    assert named(tmp_path, script, scripts=True) == keys
