"""The code for DeepSpeedTrial in Determined's reference, completed, on two ranks.

Its lines are unchanged; the classes around them add only the parts that the reference omits.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import pytest
import sklearn.metrics
import torch
from deepspeed.pipe import PipelineModule
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]
from torch.utils.data import TensorDataset

from hpc_det.distributed.collectives import Distributed
from hpc_det.pytorch import Batch, DataLoader
from hpc_det.pytorch.deepspeed import (
    DeepSpeedTrial,
    DeepSpeedTrialContext,
    ModelParallelUnit,
    Trainer,
    init,
    overwrite_deepspeed_config,
)
from hpc_det.store.folders import TrialFolder
from hpc_det.store.metrics import read_reports
from tests.distributed.ranks import OnRanks

BASE = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 1.0, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}


class AttrDict(dict[str, Any]):
    """A replacement for the class of the package attrdict, which no longer works."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Classifier(torch.nn.Module):
    """Returns scores, or the loss for a batch of records and labels."""

    def __init__(self) -> None:
        super().__init__()
        self.score = torch.nn.Linear(4, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        records, labels = batch
        return torch.nn.functional.binary_cross_entropy_with_logits(self.score(records).squeeze(1), labels)


class WithData(DeepSpeedTrial):
    """64 records for training, 32 for validation; the label is whether their sum is positive."""

    def build_training_data_loader(self) -> DataLoader:
        return self.loader(64)

    def build_validation_data_loader(self) -> DataLoader:
        return self.loader(32)

    def loader(self, number: int) -> DataLoader:
        records = torch.randn(number, 4, generator=torch.Generator().manual_seed(number))
        labels = (records.sum(dim=1) > 0).float()
        return DataLoader(TensorDataset(records, labels), self.context.train_micro_batch_size_per_gpu)


class DataParallel(WithData):
    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        self.args = AttrDict(self.context.get_hparams())

        # Build deepspeed model engine.
        model = Classifier()
        ds_config = overwrite_deepspeed_config(self.args.deepspeed_config, self.args.overwrite_deepspeed_args)
        model_engine, optimizer, lr_scheduler, _ = deepspeed.initialize(  # noqa: RUF059
            model=model, model_parameters=model.parameters(), config=ds_config
        )

        self.model_engine = self.context.wrap_model_engine(model_engine)

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        batch = self.context.to_device(next(dataloader_iter))
        loss = self.model_engine(batch)
        self.model_engine.backward(loss)
        self.model_engine.step()
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        return {"loss": self.model_engine(self.context.to_device(next(dataloader_iter)))}


# Custom reducer function.
def roc_auc_reducer(values: list[Any]) -> float:
    # values will be a flat list of all inputs to .update()
    y_trues, y_scores = zip(*values, strict=True)
    return float(sklearn.metrics.roc_auc_score(np.concatenate(y_trues), np.concatenate(y_scores)))


class WithReducer(DataParallel):
    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        self.roc_auc: Any = context.wrap_reducer(roc_auc_reducer, name="roc_auc", for_training=False)

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        records, y_true = next(dataloader_iter)
        y_score = self.model_engine.module.score(records).squeeze(1)
        self.roc_auc.update((y_true.numpy(), y_score.numpy()))
        return {}


class WithWriter(DataParallel):
    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        self.writer = context.get_tensorboard_writer()

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        self.writer.add_scalar("my_metric", np.random.random(), batch_idx)
        self.writer.add_image("my_image", torch.ones((3, 32, 32)), batch_idx)
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)


class WithProfiler(DataParallel):
    """Skips batch 1, warms up on batch 2, and profiles batches 3 and 4."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        self.context.set_profiler(
            activities=[torch.profiler.ProfilerActivity.CPU],
            schedule=torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1),
        )


class WithOwnSave(DataParallel):
    def save(self, context: DeepSpeedTrialContext, path: Path) -> None:
        for i, m in enumerate(context.models):
            m.save_checkpoint(path, tag=f"model{i}")

    def load(self, context: DeepSpeedTrialContext, load_path: Path) -> None:
        for i, m in enumerate(context.models):
            m.load_checkpoint(load_path, tag=f"model{i}")


class Pipelined(WithData):
    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        self.args = AttrDict(self.context.get_hparams())
        layers = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 1), torch.nn.Flatten(0)]
        model = PipelineModule(layers, num_stages=2, loss_fn=torch.nn.BCEWithLogitsLoss())
        model_engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            config=overwrite_deepspeed_config(self.args.deepspeed_config, self.args.overwrite_deepspeed_args),
        )
        self.model_engine = self.context.wrap_model_engine(model_engine)

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        loss = self.model_engine.train_batch(dataloader_iter)
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        return {"loss": self.model_engine.eval_batch(dataloader_iter)}


class OwnMpu(DataParallel):
    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        rank, size = context.distributed.get_rank(), context.distributed.get_size()
        mpu = ModelParallelUnit(
            data_parallel_rank=rank,
            data_parallel_world_size=size,
            should_report_metrics=rank == 0,
            should_build_data_loader=True,
        )
        context.wrap_mpu(mpu)


def with_base(folder: Path) -> Path:
    """Write the base config and return its path."""
    path = folder / "ds_config.json"
    path.write_text(json.dumps(BASE))
    return path


# --- on ranks


def trained(
    distributed: Distributed, trial_class: type[DeepSpeedTrial], root: Path, batches: int = 20, **options: Any
) -> TrialFolder:
    """Train and return the folder of the run; its learning rate overrides that of the file."""
    os.environ["HPC_DET_ROOT"] = str(root / f"{trial_class.__name__}-{batches}")
    hparams = {
        "deepspeed_config": str(with_base(root)),
        "overwrite_deepspeed_args": {"optimizer": {"params": {"lr": 0.1}}},
    }
    torch.manual_seed(1)  # also the seed of the trial
    with init(hparams=hparams, distributed=distributed) as context:
        trial = trial_class(context)
        Trainer(trial, context).fit(
            max_length=Batch(batches), reporting_period=Batch(5), checkpoint_policy="none", **options
        )
    (folder,) = Path(os.environ["HPC_DET_ROOT"], "local").iterdir()
    return TrialFolder(folder)


def all_trained(distributed: Distributed, root: Path) -> dict[str, TrialFolder]:
    """Train all trials and return their folders by class name; `Resumed` starts from the checkpoint after 10 of 20
    batches.
    """
    (checkpoint,) = trained(distributed, WithOwnSave, root, batches=10).checkpoints.iterdir()
    resumed = trained(distributed, WithOwnSave, root, latest_checkpoint=checkpoint)
    classes = (DataParallel, WithReducer, WithWriter, WithProfiler, OwnMpu, Pipelined)  # pipelines last
    others = {trial_class.__name__: trained(distributed, trial_class, root) for trial_class in classes}
    return {**others, "Resumed": resumed}


def series(folder: TrialFolder, kind: str, metric: str) -> list[float]:
    return [record["metrics"][metric] for record in read_reports(folder.metrics) if record["kind"] == kind]


def events(folder: TrialFolder) -> EventAccumulator:
    return EventAccumulator(str(folder.tensorboard)).Reload()


@pytest.mark.long
def test_its_trials_learn_and_show_what_they_should(on_ranks: OnRanks, tmp_path: Path) -> None:
    folders, _ = on_ranks(2, all_trained, tmp_path)
    losses = {name: series(folder, "training", "loss") for name, folder in folders.items()}
    for name in ("DataParallel", "Pipelined", "OwnMpu"):
        assert losses[name][-1] < losses[name][0] / 2
    assert losses["Resumed"] == losses["DataParallel"][2:]
    assert series(folders["WithReducer"], "validation", "roc_auc")[-1] > 0.9
    assert [event.step for event in events(folders["WithWriter"]).Scalars("my_metric")][::2] == [*range(20)]
    assert len(list(folders["WithProfiler"].tensorboard.rglob("*.pt.trace.json"))) == 2


# --- without a run


def outside_of_a_run(distributed: Distributed, base: Path) -> list[float]:
    config = {
        "hyperparameters": {
            "deepspeed_config": str(base),
            "overwrite_deepspeed_args": {
                "optimizer": {"params": {"lr": {"type": "log", "minval": -1, "maxval": -1, "base": 10}}}
            },
        }
    }
    context = DeepSpeedTrialContext.from_config(config)
    my_trial = DataParallel(context)

    losses = []
    train_ds = my_trial.build_training_data_loader()
    for epoch_idx in range(3):
        for batch_idx, batch in enumerate(train_ds):
            metrics = my_trial.train_batch(iter([batch]), epoch_idx, batch_idx)
            losses.append(float(metrics["loss"].detach()))
    return losses


def test_a_context_from_a_config_trains_in_a_loop_of_ones_own(on_ranks: OnRanks, tmp_path: Path) -> None:
    [losses] = on_ranks(1, outside_of_a_run, with_base(tmp_path))
    first, _, last = [sum(losses[batch : batch + 8]) for batch in (0, 8, 16)]  # the sums of the losses of each epoch
    assert last < first * 2 / 3
