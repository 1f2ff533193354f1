from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from hpc_det.pytorch import Batch, DataLoader, PyTorchCallback, PyTorchTrial, PyTorchTrialContext, Trainer, init
from tests.conformance.callbacks import BATCHES, ROWS, Calls

pytestmark = pytest.mark.integration

CONFIG = {"searcher": {"metric": "error"}, "checkpoint_interval": "none"}
"""Without checkpoints besides those that `fit` asks for."""


class Counted(PyTorchCallback):
    """Counts the calls of its hooks."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
        self.calls["startups"] += 1

    def on_training_start(self) -> None:
        self.calls["starts"] += 1

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        self.calls["epochs started"] += 1

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        self.calls["epochs ended"] += 1

    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]) -> None:
        self.calls["reports"] += 1

    def on_validation_start(self) -> None:
        self.calls["validations started"] += 1

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        self.calls["validations ended"] += 1

    def on_checkpoint_write_end(self, checkpoint_dir: str) -> None:
        self.calls["checkpoints written"] += 1

    def on_checkpoint_upload_end(self, uuid: str) -> None:
        self.calls["checkpoints uploaded"] += 1

    def on_trial_shutdown(self) -> None:
        self.calls["shutdowns"] += 1


class Line(PyTorchTrial):
    """Learns a line from 16 points."""

    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        self.counted = Counted()
        self.model = context.wrap_model(torch.nn.Linear(1, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {"counted": self.counted}

    def build_training_data_loader(self) -> DataLoader:
        points = torch.linspace(-1, 1, 16).unsqueeze(1)
        return DataLoader(TensorDataset(points, 2 * points), batch_size=self.context.get_per_slot_batch_size())

    build_validation_data_loader = build_training_data_loader

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        points, targets = batch
        loss = torch.nn.functional.mse_loss(self.model(points), targets)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> dict[str, torch.Tensor]:
        points, targets = batch
        return {"error": (self.model(points) - targets).abs().mean()}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.case)
def test_hooks_are_called_as_often(row: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPC_DET_ROOT", str(tmp_path))
    with init(hparams={"global_batch_size": 2}, exp_conf=CONFIG) as context:
        trial = Line(context)
        options = {"reporting_period": Batch(1000), **row.options}
        Trainer(trial, context).fit(max_length=Batch(BATCHES), checkpoint_policy="all", **options)
    assert trial.counted.calls == {
        "startups": 1,
        "starts": 1,
        "epochs started": 2,
        "epochs ended": 2,
        "reports": row.reports,
        "validations started": row.validations,
        "validations ended": row.validations,
        "checkpoints written": row.checkpoints,
        "checkpoints uploaded": row.checkpoints,
        "shutdowns": 1,
    }
