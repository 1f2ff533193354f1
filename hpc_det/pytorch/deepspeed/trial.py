"""DeepSpeedTrial, which users subclass, and `init` for scripts with a Trainer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hpc_det.core.run import Run
from hpc_det.distributed.collectives import Distributed
from hpc_det.pytorch.data import DataLoader
from hpc_det.pytorch.deepspeed.context import DeepSpeedTrialContext
from hpc_det.pytorch.deepspeed.runtime import explained
from hpc_det.pytorch.deepspeed.state import load_engines, tag
from hpc_det.pytorch.deepspeed.strategy import DeepSpeedStrategy
from hpc_det.pytorch.loop.trainer import context_of_script
from hpc_det.pytorch.trial.trial import Trial


class DeepSpeedTrial(Trial):
    """A trial that trains DeepSpeed engines. Subclass it.

    Call deepspeed.initialize in `__init__` and wrap the engines. Required are `train_batch`, both loaders, and either
    `evaluate_batch` or `evaluate_full_dataset`.
    """

    strategy_class = DeepSpeedStrategy

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context

    def build_training_data_loader(self) -> DataLoader | Iterable[Any] | None:
        """Return the loader of the training data, or None on ranks that load nothing.

        It is an hpc_det.pytorch.DataLoader with batches of train_micro_batch_size_per_gpu records.
        Other loaders are allowed after `context.disable_dataset_reproducibility_checks()`.
        """
        raise NotImplementedError

    def build_validation_data_loader(self) -> DataLoader | Iterable[Any] | None:
        """Return the loader for validations; its batches may have another size."""
        raise NotImplementedError

    def train_batch(
        self, dataloader_iter: Iterator[Any] | None, epoch_idx: int, batch_idx: int
    ) -> torch.Tensor | dict[str, Any]:
        """Train a micro batch, and return scalars by name, or the loss as a tensor.

        Take it with `next(dataloader_iter)` and move it with `context.to_device`; run the engine's forward pass,
        `backward` and `step`. The loop calls this gradient_accumulation_steps times for a batch and averages the
        metrics. With a pipeline, or after `context.disable_auto_grad_accumulation()`, it is called once for a whole
        batch.

        `batch_idx` counts batches from the start of the trial; all micro batches of one batch have the same number.
        `dataloader_iter` is None on ranks that load nothing.
        """
        raise NotImplementedError

    def evaluate_batch(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Evaluate one batch of this rank's share of the validation data, and return scalars by name.

        Declare it as `evaluate_batch(self, dataloader_iter)` or `evaluate_batch(self, dataloader_iter, batch_idx)`;
        batches are counted from 0. A pipeline takes the micro batches of one batch. There are no gradients, and engines
        are in eval mode.
        """
        raise NotImplementedError

    def save(self, context: DeepSpeedTrialContext, path: Path) -> None:
        """Save this rank's shards of the engines into the folder `path`, on every rank. Override it together with
        `load`.
        """
        for number, engine in enumerate(context.models):
            engine.save_checkpoint(path, tag=tag(number), save_latest=not number)

    def load(self, context: DeepSpeedTrialContext, load_path: Path) -> None:
        """Load what `save` has written, on every rank; with ZeRO also on another number of slots.

        Raises UsageError if the engines are of another kind than the saved ones, HpcDetError for damaged files.
        """
        load_engines(context, load_path)


class TrainerContext(DeepSpeedTrialContext):
    """The context of a Trainer, which contains its run."""

    def __init__(self, run: Run) -> None:
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
    """Yield a context, as `hpc_det.pytorch.init`, for a DeepSpeedTrial. Enter it before deepspeed.initialize."""
    where = (hparams, exp_conf, distributed, enable_tensorboard_logging)
    with context_of_script(TrainerContext, *where) as context, explained():
        yield context
