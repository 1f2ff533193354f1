"""What users, operators and the driver share: keys of configs and results, errors, the options of operators, and the
mixed precision that one of these asks for.

Each error is also of the built-in kind which RaySGD raised for that mistake.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

from hpc_det.errors import UsageError, nearest, shown

BATCH_SIZE = "*batch_size"
"""Key of the config: the batch size of all ranks together. In an operator's `setup` it is the rank's share."""

NUM_SAMPLES = "num_samples"
"""Of a batch: how many samples it had, its weight in the means. Of a result: the samples of all batches."""

BATCH_COUNT = "batch_count"

NUM_STEPS = "__num_steps__"

USE_FP16 = "__use_fp16__"

EPOCH_IDX = "epoch_idx"
"""Keys of `info` beside the caller's own."""

SCHEDULER_STEP_FREQS = ("batch", "epoch", "manual")


class BadArgument(UsageError, ValueError):
    """A value that an argument cannot have."""


class BadModel(UsageError, AssertionError):
    """What was registered as a model is none."""


class NotSet(UsageError, RuntimeError):
    """A default loop needs something that `setup` has not put there."""


class MissingLoader(NotSet, ValueError):
    """Training or validation without the loader for it."""


class MissingApex(UsageError, ImportError):
    """use_fp16="apex" without apex."""


def check_options(*, use_fp16: Any, use_tqdm: Any, scheduler_step_freq: Any) -> None:
    """Raises BadArgument, a ValueError, with all that cannot be."""
    if problems := [*problems_of(use_fp16, use_tqdm, scheduler_step_freq)]:
        raise BadArgument(problems)


def problems_of(use_fp16: Any, use_tqdm: Any, scheduler_step_freq: Any) -> Iterator[str]:
    if not isinstance(use_fp16, bool) and use_fp16 != "apex":
        yield f"use_fp16: {shown(use_fp16)}; use True, False or 'apex'"
    if use_tqdm and importlib.util.find_spec("tqdm") is None:
        yield f"use_tqdm: tqdm is not installed; run {sys.executable} -m pip install 'hpc_det[tqdm]'"
    if scheduler_step_freq not in (None, *SCHEDULER_STEP_FREQS):
        meant = nearest(str(scheduler_step_freq), SCHEDULER_STEP_FREQS)
        known = ", ".join(map(repr, SCHEDULER_STEP_FREQS))
        yield f"scheduler_step_freq: {shown(scheduler_step_freq)}; use {known} or None. {meant}".rstrip(" .")


UseFp16 = bool | Literal["apex"]
"""True is torch's own mixed precision, "apex" is NVIDIA's."""


class Amp:
    """float16 and a scaler on a GPU; bfloat16 on a CPU, which has float32's range and needs no scaler."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._device_type = device.type
        self._dtype = torch.float16 if on_gpu else torch.bfloat16
        self.scaler = torch.amp.GradScaler(device.type, enabled=on_gpu)
        """Where none is needed, one that is off and lets all pass."""
        self._stepped = False

    @property
    def amp(self) -> Amp:
        """What stands for torch.cuda.amp in loops of RaySGD 1.8."""
        return self

    def prepare(self, models: Sequence[torch.nn.Module], optimizers: Sequence[Any], options: dict[str, Any]) -> None:
        """Nothing: torch changes neither, and the options are apex.amp's."""

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device_type, dtype=self._dtype)

    def backward(self, loss: torch.Tensor) -> None:
        self._update()
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: Any) -> None:
        self.scaler.unscale_(optimizer)

    def step(self, optimizer: Any) -> None:
        self.scaler.step(optimizer)
        self._stepped = True

    def _update(self) -> None:
        """The scale changes once after all optimizers' steps (torch.amp's rule): before the next backward pass."""
        if self._stepped:
            self.scaler.update()
            self._stepped = False

    def state_dict(self) -> dict[str, Any]:
        self._update()
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing happens where only one side has a scaler: a run may go from CPUs to GPUs."""
        self._stepped = False
        if state and self.scaler.is_enabled():
            self.scaler.load_state_dict(state)


class Apex:
    """apex.amp, which its authors have given up for torch's own AMP: for those who still have it."""

    scaler = None

    def __init__(self) -> None:
        self.amp = _apex_amp()
        self._optimizers: list[Any] = []

    def prepare(self, models: Sequence[torch.nn.Module], optimizers: Sequence[Any], options: dict[str, Any]) -> None:
        """apex.amp changes both in place. Raises what it raises."""
        self.amp.initialize(list(models), list(optimizers), **options)
        self._optimizers = list(optimizers)

    def autocast(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        with self.amp.scale_loss(loss, self._optimizers) as scaled:
            scaled.backward()

    def unscale(self, optimizer: Any) -> None:
        """Its gradients are unscaled when `backward` returns."""

    def step(self, optimizer: Any) -> None:
        optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.amp.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.amp.load_state_dict(state)


Precision = Amp | Apex


def precision_for(use_fp16: UseFp16, device: torch.device) -> Precision | None:
    """None for float32. Raises MissingApex, an ImportError."""
    if use_fp16 == "apex":
        return Apex()
    return Amp(device) if use_fp16 else None


def _apex_amp() -> Any:
    try:
        from apex import amp
    except ImportError as error:
        raise MissingApex(
            f"use_fp16: 'apex' needs NVIDIA's apex with apex.amp ({error}); use True for torch's own mixed precision"
        ) from None
    return amp
