"""What a user of DeepSpeed implements, and the Trainer form: a script of the user's own, under any launcher or none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hpc_det.distributed.collectives import Distributed
from hpc_det.pytorch.data import DataLoader
from hpc_det.pytorch.deepspeed.context import DeepSpeedTrialContext
from hpc_det.pytorch.deepspeed.runtime import explained
from hpc_det.pytorch.deepspeed.state import load_engines, tag
from hpc_det.pytorch.deepspeed.strategy import DeepSpeedStrategy
from hpc_det.pytorch.loop.run import TrialRun
from hpc_det.pytorch.loop.trainer import context_of_script
from hpc_det.pytorch.trial.trial import Trial


class DeepSpeedTrial(Trial):
    """Subclass this; give deepspeed.initialize models, optimizers and schedulers in `__init__`, and wrap its engines.

    `train_batch`, both loaders and one of `evaluate_batch` and `evaluate_full_dataset` are required.
    """

    strategy_class = DeepSpeedStrategy

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context

    def build_training_data_loader(self) -> DataLoader | Iterable[Any] | None:
        """hpc_det's DataLoader, with batches of train_micro_batch_size_per_gpu records; any other after
        `context.disable_dataset_reproducibility_checks()`. None on ranks that load nothing.
        """
        raise NotImplementedError

    def build_validation_data_loader(self) -> DataLoader | Iterable[Any] | None:
        """Like the one for training; its batches may be of another size."""
        raise NotImplementedError

    def train_batch(
        self, dataloader_iter: Iterator[Any] | None, epoch_idx: int, batch_idx: int
    ) -> torch.Tensor | dict[str, Any]:
        """A micro batch, `next(dataloader_iter)`, moved by `context.to_device`: the engine's forward pass, `backward`
        and `step`. Called gradient_accumulation_steps times for a batch, whose metrics are the averages.

        With a pipeline, or after `context.disable_auto_grad_accumulation()`, a whole batch: called once for it.

        `batch_idx` counts batches from the start of the trial; the micro batches of one have the same.
        `dataloader_iter` is None on ranks that load nothing. Returns scalars by name; a bare tensor is the loss.
        """
        raise NotImplementedError

    def evaluate_batch(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        """(dataloader_iter) or (dataloader_iter, batch_idx): one batch of this rank's share of the validation data, or
        what a pipeline takes at once; counted from 0.

        Without gradients, engines in eval mode. Returns scalars by name.
        """
        raise NotImplementedError

    def save(self, context: DeepSpeedTrialContext, path: Path) -> None:
        """On every rank: its shards of the engines, into the folder `path`. Override it together with `load`."""
        for number, engine in enumerate(context.models):
            engine.save_checkpoint(path, tag=tag(number), save_latest=not number)

    def load(self, context: DeepSpeedTrialContext, load_path: Path) -> None:
        """On every rank: what `save` has written; of ZeRO also on another number of slots.

        Raises UsageError where the engines are of another kind than those that were saved, HpcDetError for damage.
        """
        load_engines(context, load_path)


class TrainerContext(DeepSpeedTrialContext):
    """A context that knows where it runs, for the Trainer."""

    def __init__(self, run: TrialRun) -> None:
        super().__init__(run.spec, run.distributed, run.folder)
        self.run = run


@contextmanager
def init(
    *,
    hparams: dict[str, Any] | None = None,
    exp_conf: dict[str, Any] | None = None,
    distributed: Distributed | None = None,
    enable_tensorboard_logging: bool = True,
) -> Iterator[TrainerContext]:
    """As `hpc_det.pytorch.init`, for a DeepSpeedTrial. Enter it before deepspeed.initialize."""
    where = (hparams, exp_conf, distributed, enable_tensorboard_logging)
    with context_of_script(TrainerContext, *where) as context, explained():
        yield context
