"""Options that upstream keeps under `context.experimental`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from hpc_det.pytorch.trial.context import PyTorchTrialContext


class PyTorchExperimentalContext:
    def __init__(self, context: PyTorchTrialContext) -> None:
        self._context = context

    def use_amp(self, dtype: torch.dtype | None = None) -> None:
        """Automatic mixed precision, all of it: forward passes under autocast, losses scaled where float16 needs it.

        Call it before `wrap_model`, and not together with `wrap_scaler`. `dtype`: torch.float16, which comes with a
        gradient scaler, or torch.bfloat16, which needs none; by default float16 on a GPU and bfloat16 on a CPU.
        """
        self._context.precision.use_amp(dtype)

    def disable_dataset_reproducibility_checks(self) -> None:
        """Allow other loaders than hpc_det's. They shuffle, repeat, shard and skip by themselves."""
        self._context.checks_dataset_reproducibility = False

    def disable_auto_to_device(self) -> None:
        """The trial moves each batch by itself, with `context.to_device`."""
        self._context.to_device_automatically = False
