from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpc_det.config.request import Request
from hpc_det.errors import UsageError
from hpc_det.plan.effective import Effective, effective

TRIAL = """
from hpc_det.pytorch import PyTorchTrial

class MyTrial(PyTorchTrial):
    def train_batch(self, batch, epoch_idx, batch_idx): ...
    def build_training_data_loader(self): ...
    def build_validation_data_loader(self): ...
    def evaluate_batch(self, batch): ...
"""
CLUSTER = {"name": "lab", "scheduler": "slurm", "slots_per_node": 2, "slot_type": "cpu"}
CONFIG = {
    "name": "tiny",
    "entrypoint": "python3 -m hpc_det.launch.torch_distributed --trial model_def:MyTrial",
    "searcher": {"metric": "accuracy", "max_length": {"batches": 10}},
}


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """Return a context directory with a complete trial."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "model_def.py").write_text(TRIAL)
    return folder


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a user with an empty state folder."""
    return {"HPC_DET_ROOT": str(tmp_path / "root")}


@pytest.fixture
def user_file(tmp_path: Path) -> Callable[[str, Any], Path]:
    """Return a function that writes a file into the user's conf folder."""

    def write(name: str, tree: Any) -> Path:
        file = tmp_path / "root" / "conf" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree))
        return file

    return write


@pytest.fixture
def build(code: Path) -> Callable[..., Effective]:
    """Return a function that makes the effective configuration of a small valid experiment with changes."""

    def run(template: dict[str, Any] | None = None, cluster: dict[str, Any] | None = None, **config: Any) -> Effective:
        return effective(
            Request(
                cluster={**CLUSTER, **(cluster or {})},
                template=template,
                template_name="site" if template else None,
                config={**CONFIG, **config},
                context_dir=code,
            )
        )

    return run


@pytest.fixture
def problems(build: Callable[..., Effective]) -> Callable[..., list[str]]:
    """Return a function that returns the problems of a small experiment with changes."""

    def run(**changes: Any) -> list[str]:
        with pytest.raises(UsageError) as error:
            build(**changes)
        return error.value.problems

    return run
