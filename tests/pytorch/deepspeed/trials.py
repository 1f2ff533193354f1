"""Small trials with engines, one for each way in which DeepSpeed trains in these tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from hpc_det.pytorch import DataLoader, PyTorchCallback
from hpc_det.pytorch.deepspeed import DeepSpeedTrial, DeepSpeedTrialContext
from tests.pytorch.deepspeed.engines import config
from tests.pytorch.trials import Counting

WIDTH = 6


class CountingRank(Counting):
    """Has a different state on each rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.seen["rank"] = rank


class WithData(DeepSpeedTrial):
    """Hyperparameters: `stage`, `accumulation`."""

    training_records = 46

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context

    def build_training_data_loader(self) -> DataLoader:
        return self.loader(self.training_records, shuffle=True)

    def build_validation_data_loader(self) -> DataLoader:
        return self.loader(26)

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {"counting": CountingRank(self.context.distributed.rank)}

    def loader(self, records: int, **options: Any) -> DataLoader:
        inputs = torch.randn(records, WIDTH, generator=torch.Generator().manual_seed(records))
        return DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=3, **options)

    def configured(self) -> dict[str, Any]:
        hparams = self.context.get_hparams()
        return config(hparams.get("stage", 0), gas=hparams.get("accumulation", 1), micro=3, **hparams.get("config", {}))


class Zero(WithData):
    """Dropout, batch norm, momentum and a schedule: a resume must restore all of them on each rank.

    No parameter has an odd number of elements: ZeRO-3 pads and saves those with uninitialised memory.
    """

    norm: ClassVar[Any] = nn.BatchNorm1d
    dropout = 0.3

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        model = nn.Sequential(
            nn.Linear(WIDTH, 16), self.norm(16), nn.ReLU(), nn.Dropout(self.dropout), nn.Linear(16, 1, bias=False)
        )
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=self.configured()
        )
        self.engine = context.wrap_model_engine(engine)

    def train_batch(self, dataloader_iter: Iterator[Any] | None, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        loss = self._loss(dataloader_iter)
        self.engine.backward(loss)
        self.engine.step()
        return {"loss": loss, "batch": batch_idx}

    def evaluate_batch(self, dataloader_iter: Iterator[Any] | None, batch_idx: int) -> dict[str, Any]:
        return {"loss": self._loss(dataloader_iter)}

    def _loss(self, batches: Iterator[Any] | None) -> torch.Tensor:
        assert batches is not None
        inputs, targets = self.context.to_device(next(batches))
        kind = next(self.engine.module.parameters()).dtype
        return functional.mse_loss(self.engine(inputs.to(kind)).float(), targets)


class AttrDict(dict[str, Any]):
    """A dict with its keys as attributes, as packages and many scripts have it. `copy.deepcopy` of it fails."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        super().__init__({key: AttrDict(value) if isinstance(value, dict) else value for key, value in items.items()})

    __getattr__ = dict.__getitem__


class OfAttributes(Zero):
    def configured(self) -> dict[str, Any]:
        return AttrDict(super().configured())


class InBf16(Zero):
    norm = nn.LayerNorm

    def configured(self) -> dict[str, Any]:
        return {**super().configured(), "bf16": {"enabled": True}}


class Skipping(Zero):
    """Takes batch 2 without training on it, as trials do with outliers."""

    def train_batch(self, dataloader_iter: Iterator[Any] | None, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        if batch_idx == 2 and dataloader_iter is not None:
            return {"loss": next(dataloader_iter)[0].sum(), "batch": batch_idx}
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)


class Freezing(Zero):
    """The first layer is trained only in the first epoch."""

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {"freezing": _Freezing(next(self.engine.module.children()))}


class _Freezing(PyTorchCallback):
    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        self._layer.requires_grad_(False)


class InParts(Zero):
    """No dropout and no batch norm: the same for any number of ranks, except for the order of sums."""

    training_records = 48
    norm = nn.LayerNorm
    dropout = 0.0


class Piped(WithData):
    """A pipeline of two stages."""

    training_records = 48

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        layers = [LayerSpec(nn.Linear, WIDTH, 8), nn.ReLU(), nn.Dropout(0.2), LayerSpec(nn.Linear, 8, 8), nn.ReLU()]
        module = PipelineModule([*layers, LayerSpec(nn.Linear, 8, 1)], num_stages=2, loss_fn=nn.MSELoss())
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.engine, *_ = deepspeed.initialize(model=module, model_parameters=parameters, config=self.configured())
        context.wrap_model_engine(self.engine)

    def train_batch(self, dataloader_iter: Iterator[Any] | None, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        return {"loss": self.engine.train_batch(dataloader_iter), "batch": batch_idx}

    def evaluate_batch(self, dataloader_iter: Iterator[Any] | None, batch_idx: int) -> dict[str, Any]:
        return {"loss": self.engine.eval_batch(dataloader_iter)}


class PipedInBf16(Piped):
    def configured(self) -> dict[str, Any]:
        return {**super().configured(), "bf16": {"enabled": True}}

    def loader(self, records: int, **options: Any) -> DataLoader:
        inputs = torch.randn(records, WIDTH, generator=torch.Generator().manual_seed(records)).bfloat16()
        return DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=3, **options)


class Counted(Piped):
    """Each rank counts its batches, including those without metrics."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        self.batches = context.wrap_reducer(len, "batches", for_validation=False)

    def train_batch(self, dataloader_iter: Iterator[Any] | None, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        self.batches.update(1)  # type: ignore[attr-defined]
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)
