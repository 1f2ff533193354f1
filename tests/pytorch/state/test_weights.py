"""A trial that starts with the weights of another trial's checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hpc_det.checkpoint.committed import committed
from hpc_det.errors import UsageError
from hpc_det.pytorch import PyTorchCallback, PyTorchTrialContext
from hpc_det.pytorch.state.state import stored_state
from tests.facts import refused
from tests.pytorch.trials import Life, StopAt, Tiny

BIAS = "0.bias"


class Seen(Tiny):
    """Has a different learning rate, and records the state at the beginning of each batch."""

    rate = 0.01
    batches: list[tuple[int, float, list[float]]]

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        rate = self.optimizer.param_groups[0]["lr"]
        self.batches.append((batch_idx, rate, self.model.get_parameter(BIAS).tolist()))
        return super().train_batch(batch, epoch_idx, batch_idx)


class Wider(Tiny):
    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        self.model = context.wrap_model(nn.Sequential(nn.Linear(5, 9), nn.Linear(9, 1)))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    life = Life.begin(tmp_path_factory.mktemp("source"), searcher={"max_length": {"batches": 5}})
    life.attempt()
    return committed(life.folder.checkpoints)[0].path


def begun(folder: Path, source: Path, trial_class: type[Tiny] = Seen) -> Life:
    life = Life.begin(folder, trial_class, searcher={"max_length": {"batches": 6}})
    life.weights = source
    Seen.batches = []
    return life


def test_the_weights_are_the_others_and_the_rest_is_its_own(tmp_path: Path, source: Path) -> None:
    life = begun(tmp_path, source)
    life.attempt()
    stored: list[float] = stored_state(source)["models_state_dict"][0][BIAS].tolist()
    assert Seen.batches[0] == (0, 0.01, stored)
    assert life.steps("validation") == [5, 6]
    assert life.checkpoints[-1] == 6


def test_a_checkpoint_of_its_own_goes_first(tmp_path: Path, source: Path) -> None:
    undisturbed = begun(tmp_path / "undisturbed", source)
    undisturbed.attempt()
    batches = Seen.batches
    life = begun(tmp_path / "stopped", source)
    life.attempt(StopAt(4))
    life.attempt()
    assert [number for number, _, _ in Seen.batches] == [number for number, _, _ in batches] == list(range(6))
    assert Seen.batches == batches


def test_weights_of_another_model_are_the_users_error(tmp_path: Path, source: Path) -> None:
    with refused(UsageError, "state_dict.pth", "weights", "state_dict for Sequential"):
        begun(tmp_path, source, Wider).attempt()
