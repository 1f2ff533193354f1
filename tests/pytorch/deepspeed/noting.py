"""Trials that record the calls of the loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import Any, ClassVar

import deepspeed
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hpc_det.pytorch import DataLoader, MetricReducer, PyTorchCallback
from hpc_det.pytorch.deepspeed import DeepSpeedTrial, DeepSpeedTrialContext, ModelParallelUnit
from tests.pytorch.deepspeed.trials import WIDTH, WithData, Zero


class Noting(Zero):
    """Records all calls in `noted`, in order."""

    noted: ClassVar[list[Any]] = []

    def train_batch(self, dataloader_iter: Iterator[Any] | None, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        loss = super().train_batch(dataloader_iter, epoch_idx, batch_idx)["loss"]
        self.noted.append(("train", batch_idx, loss.item()))
        return {"value": loss, "text": "of the last one"}


class ChangesNames(Noting):
    def train_batch(self, dataloader_iter: Iterator[Any] | None, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        metrics = super().train_batch(dataloader_iter, epoch_idx, batch_idx)
        return {**metrics, f"odd-{len(self.noted) % 2}": 1}


class ByHand(Noting):
    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        context.disable_auto_grad_accumulation()

    def train_batch(self, dataloader_iter: Iterator[Any] | None, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        self.noted.append(("train", batch_idx, None))
        for _ in range(self.context.get_num_micro_batches_per_slot()):
            metrics = Zero.train_batch(self, dataloader_iter, epoch_idx, batch_idx)
        return metrics


class TakesOne(ByHand):
    train_batch = Zero.train_batch


class NeverSteps(ByHand):
    def train_batch(self, dataloader_iter: Iterator[Any] | None, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        losses = [self._loss(dataloader_iter) for _ in range(3)]
        self.engine.backward(losses[0])
        self.engine.step()
        return {"loss": losses[0]}


class OnlyLooks(Noting):
    def train_batch(self, dataloader_iter: Iterator[Any] | None, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        return {"loss": self._loss(dataloader_iter)}


class _Noting(PyTorchCallback):
    def __init__(self, noted: list[Any], rank: int) -> None:
        self._noted = noted
        self._rank = rank

    def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
        self._noted.append(("on_checkpoint_save_start", [*checkpoint]))

    def on_checkpoint_write_end(self, checkpoint_dir: str) -> None:
        self._noted.append(("on_checkpoint_write_end",))
        Path(checkpoint_dir, f"added-{self._rank}.txt").touch()


class Hooked(Noting):
    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {"noting": _Noting(self.noted, self.context.distributed.rank)}


class Two(Zero):
    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        other = nn.Linear(WIDTH, 1, bias=False)
        engine, *_ = deepspeed.initialize(
            model=other, model_parameters=list(other.parameters()), config=self.configured()
        )
        self.other = context.wrap_model_engine(engine)

    def train_batch(self, dataloader_iter: Iterator[Any] | None, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        losses = self._losses(dataloader_iter)
        for engine, loss in zip((self.engine, self.other), losses.values(), strict=True):
            engine.backward(loss)
            engine.step()
        return losses

    def evaluate_batch(self, dataloader_iter: Iterator[Any] | None, batch_idx: int) -> dict[str, Any]:
        return self._losses(dataloader_iter)

    def _losses(self, batches: Iterator[Any] | None) -> dict[str, torch.Tensor]:
        assert batches is not None
        inputs, targets = next(batches)
        engines = {"loss": self.engine, "other": self.other}
        return {name: (engine(inputs) - targets).square().mean() for name, engine in engines.items()}


class _Records(MetricReducer):
    def __init__(self) -> None:
        self.count = 0

    def update(self, count: int) -> None:
        self.count += count

    def reset(self) -> None:
        self.count = 0

    def per_slot_reduce(self) -> int:
        return self.count

    def cross_slot_reduce(self, per_slot_metrics: list[int]) -> int:
        return sum(per_slot_metrics)


class FewToValidate(Noting):
    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        self.records = context.wrap_reducer(_Records(), "records", for_training=False)

    def build_validation_data_loader(self) -> DataLoader:
        inputs = torch.ones(5, WIDTH)
        return DataLoader(TensorDataset(inputs, inputs[:, :1]), batch_size=2)

    def evaluate_batch(self, dataloader_iter: Iterator[Any] | None, batch_idx: int) -> dict[str, Any]:
        assert dataloader_iter is not None
        inputs, targets = next(dataloader_iter)
        self.noted.append(("evaluate", batch_idx))
        assert isinstance(self.records, _Records)
        self.records.update(len(inputs))
        return {"loss": (self.engine(inputs) - targets).square().mean()}


class InFull(Zero):
    evaluate_batch = DeepSpeedTrial.evaluate_batch

    def evaluate_full_dataset(self, data_loader: Iterable[Any]) -> dict[str, Any]:
        return {"loss": sum(len(self.engine(inputs)) for inputs, _ in data_loader)}


class Shared(Zero):
    """Both ranks share one copy of the model; no check compares the training on them."""

    noted: ClassVar[list[Any]] = []

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        rank = context.distributed.rank
        model = nn.Linear(WIDTH, 1)
        mpu = _OneCopy()
        self.engine, *_ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=self.configured(), mpu=mpu
        )
        context.wrap_model_engine(self.engine)
        context.set_mpu(ModelParallelUnit(0, 1, should_report_metrics=not rank, should_build_data_loader=not rank))

    def loader(self, records: int, **options: Any) -> DataLoader:
        self.noted.append(("loader", "training" if options else "validation"))
        return super().loader(records, **options)

    def train_batch(self, dataloader_iter: Iterator[Any] | None, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        return self._of_rank(super().train_batch(dataloader_iter, epoch_idx, batch_idx))

    def evaluate_batch(self, dataloader_iter: Iterator[Any] | None, batch_idx: int) -> dict[str, Any]:
        return self._of_rank(super().evaluate_batch(dataloader_iter, batch_idx))

    def _of_rank(self, metrics: dict[str, Any]) -> dict[str, Any]:
        return {**metrics, "rank": self.context.distributed.rank}

    def _loss(self, batches: Iterator[Any] | None) -> torch.Tensor:
        self.noted.append(("iterator", type(batches).__name__))
        inputs = next(batches)[0] if batches else torch.ones(3, WIDTH)
        loss: torch.Tensor = self.engine(inputs).square().mean()
        return loss


class ReturnsNone(Shared):
    """Like `Shared`, but both ranks have to build data loaders."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        context.mpu = ModelParallelUnit(0, 1, should_report_metrics=True, should_build_data_loader=True)

    def loader(self, records: int, **options: Any) -> Any:
        return None if self.context.distributed.rank else super().loader(records, **options)


class TooLarge(Zero):
    noted: ClassVar[list[Any]] = []

    def loader(self, records: int, **options: Any) -> Any:
        return DataLoader(TensorDataset(torch.ones(24, WIDTH), torch.ones(24, 1)), batch_size=6)


class NeverLoads(Zero):
    def loader(self, records: int, **options: Any) -> Any:
        return None


class OwnLoaderUnasked(Zero):
    def loader(self, records: int, **options: Any) -> Any:
        return [(torch.ones(3, WIDTH), torch.ones(3, 1))] * 4


class OwnLoader(OwnLoaderUnasked):
    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        context.disable_dataset_reproducibility_checks()


class NoEngine(Zero):
    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context


class _OneCopy:
    """The part of a model parallel unit that deepspeed.initialize needs if all ranks share a model
    (deepspeed/utils/groups.py).
    """

    def __init__(self) -> None:
        ranks = range(torch.distributed.get_world_size())
        alone = [torch.distributed.new_group([rank]) for rank in ranks]
        self._data_parallel = alone[torch.distributed.get_rank()]
        self._model_parallel = torch.distributed.new_group([*ranks])

    def get_model_parallel_rank(self) -> int:
        return torch.distributed.get_rank()

    def get_model_parallel_world_size(self) -> int:
        return torch.distributed.get_world_size()

    def get_model_parallel_group(self) -> Any:
        return self._model_parallel

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_world_size(self) -> int:
        return 1

    def get_data_parallel_group(self) -> Any:
        return self._data_parallel


class ReportsNothing(Shared):
    """Like `Shared`; the rank whose metrics do not count returns None."""

    def train_batch(self, dataloader_iter: Iterator[Any] | None, epoch_idx: int, batch_idx: int) -> Any:
        metrics = super().train_batch(dataloader_iter, epoch_idx, batch_idx)
        return None if self.context.distributed.rank else metrics

    def evaluate_batch(self, dataloader_iter: Iterator[Any] | None, batch_idx: int) -> Any:
        metrics = super().evaluate_batch(dataloader_iter, batch_idx)
        return None if self.context.distributed.rank else metrics


class NotSavable(Noting):
    """The state of its schedule contains a date, which a checkpoint cannot hold."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        super().__init__(context)
        self.engine.lr_scheduler.state_dict = lambda: {"began": date(2024, 2, 29)}


class Thawed(Zero):
    """The first layer is frozen when the engine is created, and unfrozen in the second batch."""

    noted: ClassVar[list[Any]] = []

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        WithData.__init__(self, context)
        model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 1, bias=False))
        model[0].requires_grad_(False)
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=self.configured()
        )
        self.engine = context.wrap_model_engine(engine)

    def train_batch(self, dataloader_iter: Iterator[Any] | None, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        next(self.engine.module.children()).requires_grad_(batch_idx > 0)
        self.noted.append(batch_idx)
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)
