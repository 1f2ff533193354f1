"""Hooks into the loop, with state that is part of every checkpoint."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from hpc_det.errors import UsageError
from hpc_det.pytorch.profiling.timer import CALLBACKS, Timed, untimed


class PyTorchCallback:
    """Override what is needed. A callback is saved and restored under its name in `build_callbacks()`.

    Hooks run on every rank, unless they say otherwise, in the order in which they stand here.
    """

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps; asked of rank 0's callback."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Every rank gets what rank 0 saved."""

    def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
        """Before the data loaders are built; (0, None) in a run that starts anew."""

    def on_checkpoint_load_start(self, checkpoint: dict[str, Any]) -> None:
        """`checkpoint` is the content of state_dict.pth, before any of it is applied. It may be changed."""

    def on_training_start(self) -> None:
        """Everything is restored; once for each start of the process."""

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        """Before the first batch of an epoch; not after a resume inside one."""

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        """After the last batch of an epoch and the scheduler steps."""

    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]) -> None:
        """At each report: the means, and the metrics of each batch since the last report, averaged over ranks."""

    def on_validation_start(self) -> None:
        """Before the validation. One that a stop interrupts is done again, from its start, after the resume."""

    def on_validation_epoch_start(self) -> None:
        """Before the first batch of the validation; not where the trial has `evaluate_full_dataset`."""

    def on_validation_epoch_end(self, outputs: list[Any]) -> None:
        """What this rank's calls of `evaluate_batch` returned."""

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        """The metrics reduced over all ranks."""

    def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
        """Rank 0: `checkpoint` is what state_dict.pth will hold. It may be changed."""

    def on_checkpoint_write_end(self, checkpoint_dir: str) -> None:
        """Rank 0: the files are written and not yet committed. Files added here become part of the checkpoint."""

    def on_checkpoint_upload_end(self, uuid: str) -> None:
        """The checkpoint is committed."""

    def on_trial_shutdown(self) -> None:
        """At the end of the process's run, whatever ends it."""


HOOKS = [name for name in vars(PyTorchCallback) if name.startswith("on_")]

FORMER_NAMES = {
    "on_checkpoint_end": "on_checkpoint_write_end",
    "on_validation_step_start": "on_validation_start",
    "on_validation_step_end": "on_validation_end",
}
"""Determined's names before 0.17."""


class Callbacks:
    """All callbacks of a trial. Hooks that nobody overrides cost nothing."""

    def __init__(self, callbacks: Mapping[str, PyTorchCallback], timed: Timed = untimed) -> None:
        """Raises UsageError for what is no callback."""
        problems = [
            f"build_callbacks: '{name}' is {type(callback).__name__}, no PyTorchCallback; derive it from that class"
            for name, callback in callbacks.items()
            if not isinstance(callback, PyTorchCallback)
        ]
        if problems:
            raise UsageError(problems)
        self._callbacks = callbacks
        self._methods = {
            hook: [
                timed(f"{CALLBACKS}{type(callback).__name__}.{hook}", method)
                for callback in callbacks.values()
                for method in _methods(callback, hook)
            ]
            for hook in HOOKS
        }

    def call(self, hook: str, *arguments: Any) -> None:
        for method in self._methods[hook]:
            method(*arguments)

    def overrides(self, *hooks: str) -> bool:
        """Whether any callback does something at any of the hooks."""
        return any(self._methods[hook] for hook in hooks)

    def state(self) -> dict[str, Any]:
        return {name: callback.state_dict() for name, callback in self._callbacks.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, callback in self._callbacks.items():
            if name in state:
                callback.load_state_dict(state[name])
            elif _overrides(callback, "load_state_dict"):
                warnings.warn(f"callback '{name}' has no state in the checkpoint and starts anew", stacklevel=2)


def _methods(callback: PyTorchCallback, hook: str) -> list[Callable[..., None]]:
    """What of `callback` runs at `hook`: its override, and one under a former name."""
    methods = [getattr(callback, hook)] if _overrides(callback, hook) else []
    if hook == "on_training_epoch_start" and methods and not inspect.signature(methods[0]).parameters:
        warnings.warn(f"{type(callback).__name__}.{hook} should take epoch_idx", DeprecationWarning, stacklevel=4)
        methods = [_without_arguments(methods[0])]
    for former, name in FORMER_NAMES.items():
        if name == hook and hasattr(callback, former):
            warnings.warn(f"{type(callback).__name__}.{former} is now called {name}", DeprecationWarning, stacklevel=4)
            methods.append(getattr(callback, former))
    return methods


def _overrides(callback: PyTorchCallback, name: str) -> bool:
    return getattr(type(callback), name) is not getattr(PyTorchCallback, name) or name in vars(callback)


def _without_arguments(method: Callable[..., None]) -> Callable[..., None]:
    return lambda *arguments: method()
