"""What a trial can ask and must wrap."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch

from hpc_det.core.distributed import Distributed
from hpc_det.errors import UsageError
from hpc_det.pytorch.ddp import data_parallel
from hpc_det.pytorch.lr_scheduler import LRScheduler, ScheduledStep

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)
Scheduler = TypeVar("Scheduler", bound=torch.optim.lr_scheduler.LRScheduler)


class PyTorchTrialContext:
    """One rank's view of its trial. `spec` is the content of trial.json."""

    def __init__(self, spec: dict[str, Any], distributed: Distributed) -> None:
        self._spec = spec
        self.distributed = distributed
        self.device = distributed.device
        self.models: list[torch.nn.Module] = []
        """As given to `wrap_model`, without the wrapping: what checkpoints hold."""
        self.wrapped_models: list[torch.nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.scheduled_steps: list[ScheduledStep] = []
        self._stop_requested = False
        self._batch: int | None = None
        self._epoch: int | None = None

    # --- information

    def get_experiment_id(self) -> int:
        return int(self._spec["experiment_id"])

    def get_trial_id(self) -> int:
        return int(self._spec["trial_id"])

    def get_trial_seed(self) -> int:
        return int(self._spec["trial_seed"])

    def get_experiment_config(self) -> dict[str, Any]:
        """The effective config."""
        return dict(self._spec["config"])

    def get_data_config(self) -> dict[str, Any]:
        """The section `data` of the config."""
        return dict(self._spec["config"]["data"])

    def get_hparams(self) -> dict[str, Any]:
        return dict(self._spec["hparams"])

    def get_hparam(self, name: str) -> Any:
        """Raises UsageError naming the known ones."""
        hparams = self._spec["hparams"]
        if name not in hparams:
            raise UsageError(
                f"hyperparameters.{name}: not in the experiment config, which has {sorted(hparams)}; add it"
            )
        return hparams[name]

    def get_global_batch_size(self) -> int:
        return int(self.get_hparam("global_batch_size"))

    def get_per_slot_batch_size(self) -> int:
        """global_batch_size // slots; the remainder is dropped."""
        return self.get_global_batch_size() // self.distributed.size

    def current_train_batch(self) -> int:
        """The global number of the batch in training, from 0. Raises UsageError before training."""
        return self._during_training(self._batch)

    def current_train_epoch(self) -> int:
        return self._during_training(self._epoch)

    def set_progress(self, batch: int, epoch: int) -> None:
        """The loop's word before each batch."""
        self._batch, self._epoch = batch, epoch

    # --- stop

    def set_stop_requested(self, stop_requested: bool) -> None:
        """Finish cleanly at the end of this batch. Every rank must ask for it at the same batch."""
        self._stop_requested = stop_requested

    def get_stop_requested(self) -> bool:
        return self._stop_requested

    # --- wrapping

    def wrap_model(self, model: torch.nn.Module, **ddp_options: Any) -> torch.nn.Module:
        """The model on this rank's device; with several ranks in DistributedDataParallel(**ddp_options)."""
        model = model.to(self.device)
        self.models.append(model)
        wrapped: torch.nn.Module = model
        if self.distributed.size > 1:
            wrapped = data_parallel(model, self.device, ddp_options)
        self.wrapped_models.append(wrapped)
        return wrapped

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        self.optimizers.append(optimizer)
        return optimizer

    def wrap_lr_scheduler(
        self, lr_scheduler: Scheduler, step_mode: LRScheduler.StepMode, frequency: int = 1
    ) -> Scheduler:
        """The loop steps it after every `frequency` batches or epochs, or leaves that to the trial (MANUAL_STEP).

        Raises UsageError where its optimizer is not wrapped, or ReduceLROnPlateau is not stepped by hand.
        """
        name = type(lr_scheduler).__name__
        if not any(lr_scheduler.optimizer is known for known in self.optimizers):
            raise UsageError(f"wrap_lr_scheduler: the optimizer of {name} is not wrapped; call wrap_optimizer first")
        by_hand = step_mode is LRScheduler.StepMode.MANUAL_STEP
        if isinstance(lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) and not by_hand:
            raise UsageError(f"wrap_lr_scheduler: {name} steps on a metric; use MANUAL_STEP")
        if frequency < 1:
            raise UsageError(f"wrap_lr_scheduler: frequency is {frequency}; use at least 1")
        self.scheduled_steps.append(ScheduledStep(lr_scheduler, step_mode, frequency))
        return lr_scheduler

    # --- in train_batch

    def to_device(self, data: Any) -> Any:
        """Tensors and numeric arrays, nested in dicts, lists and tuples, on this rank's device; the rest as it is."""
        if isinstance(data, torch.Tensor):
            return data.to(self.device, non_blocking=True)
        if isinstance(data, np.ndarray) and data.dtype.kind in "fciub":
            return torch.from_numpy(data).to(self.device, non_blocking=True)
        if isinstance(data, dict):
            return {name: self.to_device(value) for name, value in data.items()}
        if isinstance(data, tuple) and hasattr(data, "_fields"):
            return type(data)(*map(self.to_device, data))
        if isinstance(data, (list, tuple)):
            return type(data)(map(self.to_device, data))
        return data

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, create_graph: bool = False) -> None:
        loss.backward(retain_graph=retain_graph, create_graph=create_graph)  # type: ignore[no-untyped-call]

    def step_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        clip_grads: Callable[[Iterator[torch.nn.Parameter]], Any] | None = None,
        auto_zero_grads: bool = True,
    ) -> None:
        """Step and zero. `clip_grads` gets the optimizer's parameters first."""
        if clip_grads is not None:
            clip_grads(parameter for group in optimizer.param_groups for parameter in group["params"])
        optimizer.step()
        if auto_zero_grads:
            optimizer.zero_grad()

    @staticmethod
    def _during_training(value: int | None) -> int:
        if value is None:
            raise UsageError("current_train_batch and current_train_epoch are known in training only, not before")
        return value
