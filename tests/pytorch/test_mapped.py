"""The file of a state is mapped while the state is restored, and unmapped before training continues."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hpc_det.checkpoint.committed import committed
from hpc_det.pytorch import PyTorchCallback, PyTorchTrialContext
from hpc_det.pytorch.state.load import load_trial_from_checkpoint_path
from hpc_det.pytorch.state.state import stored_state
from tests.pytorch.trials import Life, StopAt, Tiny, assert_same


def is_mapped() -> bool:
    return "state_dict.pth" in Path("/proc/self/maps").read_text()


class KeepsTensors(PyTorchCallback):
    """A callback that keeps the tensors that it receives."""

    mapped_at_load = False

    def __init__(self) -> None:
        self.average = torch.zeros(300, 300)
        self.checkpoint: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        KeepsTensors.mapped_at_load = is_mapped()
        self.average = state_dict["average"]


class KeepsTheCheckpoint(KeepsTensors):
    def on_checkpoint_load_start(self, checkpoint: dict[str, Any]) -> None:
        self.checkpoint = checkpoint


class Remembering(nn.Module):
    """Keeps the tensor object that it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.past = torch.zeros(300)

    def get_extra_state(self) -> torch.Tensor:
        return self.past

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.past = state

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs


class Averaging(Tiny):
    """Its optimizer, its callback and a module have tensors in their state."""

    callback: type[KeepsTensors] = KeepsTensors
    mapped_in_training = False

    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        self.model = context.wrap_model(nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), Remembering(), nn.Linear(8, 1)))
        self.optimizer = context.wrap_optimizer(torch.optim.Adam(self.model.parameters(), lr=0.01))

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        gc.collect()
        type(self).mapped_in_training |= is_mapped()
        return super().train_batch(batch, epoch_idx, batch_idx)

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {"keeps": self.callback()}


class AveragingAndKeeping(Averaging):
    callback = KeepsTheCheckpoint


@pytest.mark.integration
@pytest.mark.parametrize("trial_class", [Averaging, AveragingAndKeeping])
def test_a_resume_maps_the_state_and_lets_go_of_it_before_the_first_batch(
    tmp_path: Path, trial_class: type[Averaging]
) -> None:
    undisturbed = Life.begin(tmp_path / "undisturbed", trial_class)
    undisturbed.attempt()
    life = Life.begin(tmp_path / "resumed", trial_class)
    life.attempt(StopAt(5))
    KeepsTensors.mapped_at_load = False
    life.attempt()
    assert KeepsTensors.mapped_at_load == (trial_class is Averaging), "a hook that receives the whole state gets a copy"
    assert not trial_class.mapped_in_training
    assert_same(life, undisturbed)


def test_a_loaded_trial_does_not_lean_on_the_file(tmp_path: Path) -> None:
    life = Life.begin(tmp_path, Averaging)
    life.attempt(StopAt(5))
    (checkpoint,) = committed(life.folder.checkpoints)
    trial = load_trial_from_checkpoint_path(checkpoint.path, Averaging)
    assert isinstance(trial, Averaging)
    gc.collect()
    assert not is_mapped()
    assert all(state["exp_avg"].any() for state in trial.optimizer.state.values())


def test_a_file_that_memory_does_not_hold_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_det.pytorch.state.state.is_in_memory", lambda path: False)
    life = Life.begin(tmp_path, Averaging)
    life.attempt(StopAt(5))
    KeepsTensors.mapped_at_load = False
    life.attempt(StopAt(5))
    assert not KeepsTensors.mapped_at_load
    assert life.checkpoints


def test_a_file_of_an_older_torch_is_read(tmp_path: Path) -> None:
    state = {"models_state_dict": [nn.Linear(2, 2).state_dict()]}
    torch.save(state, tmp_path / "state_dict.pth", _use_new_zipfile_serialization=False)
    assert stored_state(tmp_path)["models_state_dict"][0].keys() == state["models_state_dict"][0].keys()
