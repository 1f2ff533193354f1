"""Names shared by users, operators and the driver: keys of configs and results, errors, operator options, precision.

Each error class also derives from the built-in exception that RaySGD raises for the same mistake.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

from hpc_det.errors import UsageError, nearest, pip_install, shown

BATCH_SIZE = "*batch_size"
"""Key of the config for the batch size in samples, over all ranks. In an operator's `setup` it is the rank's share."""

NUM_SAMPLES = "num_samples"
"""Key of metrics: the number of samples, of one batch (its weight in means) or in a result of all batches."""

BATCH_COUNT = "batch_count"
"""Key of a result: the number of batches that were trained or validated on a rank."""

NUM_STEPS = "__num_steps__"
"""Key of `info`: the argument `num_steps` of `train` or `validate`."""

USE_FP16 = "__use_fp16__"
"""Key of `info`: the argument `use_fp16` of TorchTrainer."""

EPOCH_IDX = "epoch_idx"
"""Key of `info`: the number of completed passes over the training data when the call began."""

SCHEDULER_STEP_FREQS = ("batch", "epoch", "manual")
"""Valid values of `scheduler_step_freq` besides None."""


class BadArgument(UsageError, ValueError):
    """An argument has an invalid value."""


class BadModel(UsageError, AssertionError):
    """A registered model is not an nn.Module."""


class NotAvailable(UsageError, NotImplementedError):
    """A function of RaySGD that has no counterpart."""


class NotSet(UsageError, RuntimeError):
    """`setup` has not set an attribute that a default loop needs."""


class MissingLoader(NotSet, ValueError):
    """`train` or `validate` was called, and no loader is registered for it."""


class MissingApex(UsageError, ImportError):
    """`use_fp16` is "apex", and apex cannot be imported."""


def check_options(*, use_fp16: Any, use_tqdm: Any, scheduler_step_freq: Any) -> None:
    """Check the options of operators. Raises BadArgument, a ValueError, that lists all problems."""
    if problems := [*problems_of(use_fp16, use_tqdm, scheduler_step_freq)]:
        raise BadArgument(problems)


def problems_of(use_fp16: Any, use_tqdm: Any, scheduler_step_freq: Any) -> Iterator[str]:
    """Yield a message for each invalid option."""
    if not isinstance(use_fp16, bool) and use_fp16 != "apex":
        yield f"use_fp16: got {shown(use_fp16)}; use True, False or 'apex'"
    if use_tqdm and importlib.util.find_spec("tqdm") is None:
        yield f"use_tqdm: tqdm is not installed; run {pip_install('hpc_det[tqdm]')}"
    if scheduler_step_freq not in (None, *SCHEDULER_STEP_FREQS):
        meant = nearest(str(scheduler_step_freq), SCHEDULER_STEP_FREQS)
        known = ", ".join(map(repr, SCHEDULER_STEP_FREQS))
        yield f"scheduler_step_freq: got {shown(scheduler_step_freq)}; use {known} or None. {meant}".rstrip(" .")


UseFp16 = bool | Literal["apex"]
"""True: torch's mixed precision; "apex": NVIDIA's apex.amp; False: float32."""


class Amp:
    """torch's mixed precision: float16 with a gradient scaler on a GPU, bfloat16 without one on a CPU."""

    def __init__(self, device: torch.device) -> None:
        # bfloat16 has the exponent range of float32, so gradients do not underflow and need no scaling.
        on_gpu = device.type == "cuda"
        self._device_type = device.type
        self._dtype = torch.float16 if on_gpu else torch.bfloat16
        self.scaler = torch.amp.GradScaler(device.type, enabled=on_gpu)
        """The gradient scaler; on a CPU it is disabled and changes nothing."""
        self._stepped = False

    @property
    def amp(self) -> Amp:
        """This object, because training loops of RaySGD 1.8 call `self._amp.autocast()`."""
        return self

    def prepare(self, models: Sequence[torch.nn.Module], optimizers: Sequence[Any], options: dict[str, Any]) -> None:
        """Do nothing: torch's mixed precision changes neither models nor optimizers, and the options are for apex."""

    def autocast(self) -> AbstractContextManager[Any]:
        """Return torch.autocast for the device and its data type."""
        return torch.autocast(self._device_type, dtype=self._dtype)

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass of the scaled loss."""
        self._update()
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: Any) -> None:
        """Divide the gradients of the optimizer by the scale."""
        self.scaler.unscale_(optimizer)

    def step(self, optimizer: Any) -> None:
        """Step the optimizer, unless one of its gradients is infinite or NaN."""
        self.scaler.step(optimizer)
        self._stepped = True

    def _update(self) -> None:
        """Update the scale if an optimizer was stepped since the last update."""
        # torch.amp requires one update after the steps of all optimizers. Which step is the last one is not known,
        # so the update is made before the next backward pass or when the state is saved.
        if self._stepped:
            self.scaler.update()
            self._stepped = False

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scaler; empty on a CPU."""
        self._update()
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of the scaler; do nothing if the state is empty or the scaler is disabled."""
        self._stepped = False
        # A run may move between CPUs and GPUs, so that only one of state and device has a scaler.
        if state and self.scaler.is_enabled():
            self.scaler.load_state_dict(state)


class Apex:
    """Mixed precision of NVIDIA's apex.amp, which its authors have deprecated in favour of torch.amp.

    Its methods are those of Amp. Raises MissingApex, an ImportError, if apex cannot be imported.
    """

    scaler = None

    def __init__(self) -> None:
        self.amp = _apex_amp()
        self._optimizers: list[Any] = []

    def prepare(self, models: Sequence[torch.nn.Module], optimizers: Sequence[Any], options: dict[str, Any]) -> None:
        """Call apex.amp.initialize, which changes models and optimizers in place; its exceptions are passed on."""
        self.amp.initialize(list(models), list(optimizers), **options)
        self._optimizers = list(optimizers)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context manager that does nothing: apex has patched the models."""
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass of the scaled loss; the gradients are unscaled when this returns."""
        with self.amp.scale_loss(loss, self._optimizers) as scaled:
            scaled.backward()

    def unscale(self, optimizer: Any) -> None:
        """Do nothing: `backward` has unscaled the gradients."""

    def step(self, optimizer: Any) -> None:
        """Step the optimizer."""
        optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of apex.amp."""
        state: dict[str, Any] = self.amp.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of apex.amp."""
        self.amp.load_state_dict(state)


Precision = Amp | Apex


def precision_for(use_fp16: UseFp16, device: torch.device) -> Precision | None:
    """Return the mixed precision that `use_fp16` selects, or None for float32.

    Raises MissingApex, an ImportError, if it is "apex" and apex cannot be imported.
    """
    if use_fp16 == "apex":
        return Apex()
    return Amp(device) if use_fp16 else None


def _apex_amp() -> Any:
    try:
        from apex import amp
    except ImportError as error:
        raise MissingApex(
            f"use_fp16: 'apex' needs NVIDIA's apex with apex.amp, which cannot be imported ({error}); "
            f"use True for torch's mixed precision"
        ) from None
    return amp
