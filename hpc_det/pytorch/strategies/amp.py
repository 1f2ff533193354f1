"""Automatic mixed precision: autocast around each wrapped model's forward pass, and gradient scaling."""

from __future__ import annotations

from typing import Any

import torch

from hpc_det.errors import UsageError
from hpc_det.pytorch.strategies.device import mapped


class Precision:
    """The precision of models and the scaling of losses: unchanged, automatic, or with the trial's own scaler."""

    def __init__(self, device: torch.device, *, automatic: bool = False) -> None:
        """`automatic`: enable `use_amp(None)` unless the trial chooses a precision (optimizations.mixed_precision)."""
        self._device = device
        self._automatic = automatic
        self._autocast: Autocast | None = None
        self._wraps_models = False
        self._stepped = False
        """True if the scaler has made an optimizer step since its last update."""
        self.scaler: torch.amp.GradScaler | None = None
        """Gradient scaler, whose state is part of every checkpoint; None without one."""
        self.scales_losses = False
        """True if the loop scales losses; a trial with its own scaler does it itself."""

    def use_amp(self, dtype: torch.dtype | None) -> None:
        """Run models under autocast to `dtype`; with float16, losses are scaled.

        The default (None) is float16 on a GPU, as in Determined, and bfloat16, which is fast there, on a CPU.
        """
        dtype = dtype or (torch.float16 if self._device.type == "cuda" else torch.bfloat16)
        if dtype not in (torch.float16, torch.bfloat16):
            raise UsageError(f"use_amp: {dtype} is neither torch.float16 nor torch.bfloat16")
        self._check_first("use_amp")
        self._autocast = Autocast(self._device, dtype)
        if dtype == torch.float16:  # bfloat16 has float32's range and needs no scaling
            self.scaler = torch.amp.GradScaler(self._device.type)
            self.scales_losses = True

    def take_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """Use the trial's own scaler, whose state becomes part of checkpoints."""
        self._check_first("wrap_scaler")
        if self._automatic:
            raise UsageError(
                "wrap_scaler: optimizations.mixed_precision is O1, which scales losses already; remove one of them"
            )
        self.scaler = scaler

    def prepare(self, model: torch.nn.Module) -> None:
        """Prepare a model for mixed precision, before it is wrapped in anything."""
        if self._automatic and not self._autocast:
            self.use_amp(None)
        self._wraps_models = True
        if self._autocast:
            self._autocast.surround(model)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss, scaled if the loop scales losses."""
        if self.scaler and self.scales_losses:
            return self.scaler.scale(loss)
        return loss

    def step(self, optimizer: torch.optim.Optimizer, own: torch.amp.GradScaler | None) -> None:
        """Make an optimizer step. `own`: the trial's scaler for this step, which the trial updates."""
        scaler = own or (self.scaler if self.scales_losses else None)
        if scaler is None:
            optimizer.step()
            return
        scaler.step(optimizer)
        self._stepped = scaler is self.scaler and self.scales_losses

    def unscale(self, optimizer: torch.optim.Optimizer, own: torch.amp.GradScaler | None) -> None:
        """Unscale the gradients, so that they can be clipped. `own`: as for `step`."""
        scaler = own or (self.scaler if self.scales_losses else None)
        if scaler is not None:
            scaler.unscale_(optimizer)

    def end_batch(self) -> None:
        """Update the scale, once for each batch even with several optimizer steps (torch.amp's rule)."""
        if self._stepped and self.scaler:
            self.scaler.update()
            self._stepped = False

    def _check_first(self, what: str) -> None:
        if self._wraps_models:
            raise UsageError(f"{what}: call it before wrap_model, which prepares each model for it")
        if self.scaler or self._autocast:
            raise UsageError(f"{what}: precision is set already; call either use_amp or wrap_scaler, once")


class Autocast:
    """Autocast around the forward pass of a model.

    It uses hooks and not a new `forward`, so that it also works for a copy of the model that a callback makes.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device_type = device.type
        self._dtype = dtype
        self._entered: list[torch.autocast] = []

    def surround(self, model: torch.nn.Module) -> None:
        """Run the model's forward pass under autocast from now on, with float32 results."""
        model.register_forward_pre_hook(self._enter)
        # always_call: also after an exception in the forward pass, or autocast would stay enabled
        model.register_forward_hook(self._leave, always_call=True)

    def _enter(self, model: torch.nn.Module, inputs: Any) -> None:
        context = torch.autocast(self._device_type, dtype=self._dtype)
        context.__enter__()  # type: ignore[no-untyped-call]
        self._entered.append(context)

    def _leave(self, model: torch.nn.Module, inputs: Any, outputs: Any) -> Any:
        self._entered.pop().__exit__(None, None, None)
        return as_float32(outputs)


def as_float32(data: Any) -> Any:
    """Return float16 and bfloat16 tensors as float32, in dicts, lists and tuples of any depth."""
    return mapped(_float32, data)


def _float32(value: Any) -> Any:
    is_half = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if is_half else value
