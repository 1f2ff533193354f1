"""Callbacks: hooks that the training loop calls, with state that each checkpoint contains."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from hpc_det.core.timer import CALLBACKS, Timed, untimed
from hpc_det.errors import UsageError


class PyTorchCallback:
    """The base class of callbacks. Subclass it, override the hooks that are needed, and return instances from
    `build_callbacks()`.

    Every rank builds the callbacks and runs each hook, unless the hook's documentation names its ranks. If a trial has
    several callbacks, a hook runs in the order of `build_callbacks()`. Checkpoints contain the state of a callback
    under its key in `build_callbacks()`.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint keeps for this callback; the default is an empty dict.

        The values may be tensors, numpy arrays, numbers, strings, lists and dicts. A checkpoint of a PyTorchTrial
        contains the state of rank 0, one of a DeepSpeedTrial the state of each rank. The method is also called when
        nothing is saved (at the start, before a validation), so it must not change anything.
        """
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a value that `state_dict` returned. Called on every rank, before `on_training_start`.

        It is also called when a stop interrupts a validation: the state is then put back to that before the validation.

        Args:
            state_dict: The state that rank 0 saved; with a DeepSpeedTrial, the state that this rank saved, or that of
                rank 0 if the gang had fewer ranks when it was saved.
        """

    def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
        """Run before the data loaders are built and before any state is restored.

        Args:
            first_batch_idx: Number of the first batch that this process trains; 0 if the trial does not resume.
            checkpoint_uuid: UUID of the checkpoint that the trial resumes from; None if it does not resume.
        """

    def on_checkpoint_load_start(self, checkpoint: dict[str, Any]) -> None:
        """Run before the state of a checkpoint is applied.

        Args:
            checkpoint: The content of state_dict.pth; of rank-R.pth for a DeepSpeedTrial. Changes take effect.
        """

    def on_training_start(self) -> None:
        """Run once per process, after all state is restored and before the first batch."""

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        """Run before the first batch of an epoch. Not called if the process resumes inside the epoch.

        Args:
            epoch_idx: Number of the epoch, from 0.
        """

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        """Run after the last batch of an epoch and the steps of the learning-rate schedulers.

        Args:
            epoch_idx: Number of the epoch, from 0.
        """

    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]) -> None:
        """Run at each report of training metrics: every `scheduling_unit` (100 batches by default), before each
        validation and each checkpoint of `min_checkpoint_period`, and at the end.

        A checkpoint at another batch, such as one for a preemption, is no report: the open metrics are part of it.

        Args:
            avg_metrics: The reported metrics by name: means over the ranks and over the batches since the last report,
                and the metrics of reducers.
            batch_metrics: The metrics of each batch since the last report, oldest first, averaged over the ranks.
                With `optimizations.average_training_metrics: false` both arguments contain the batch metrics of rank 0
                alone (with a pipeline, of the first rank that reports metrics).
        """

    def on_validation_start(self) -> None:
        """Run before a validation. If a stop interrupts the validation, it is repeated from its start after the resume.

        Models are still in training mode.
        """

    def on_validation_epoch_start(self) -> None:
        """Run before the first batch of a validation, with models in eval mode and without gradients.

        Not called if the trial implements `evaluate_full_dataset`.
        """

    def on_validation_epoch_end(self, outputs: list[Any]) -> None:
        """Run after the last batch of a validation. Not called if the trial implements `evaluate_full_dataset`.

        Args:
            outputs: The values that `evaluate_batch` returned on this rank, in the order of the batches.
        """

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        """Run after a validation that was not interrupted.

        Args:
            metrics: The validation metrics by name, reduced over all ranks; the same on every rank.
        """

    def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
        """Run before a checkpoint is written: on rank 0, with a DeepSpeedTrial on every rank.

        Args:
            checkpoint: The future content of state_dict.pth; of rank-R.pth for a DeepSpeedTrial. Changes take effect.
        """

    def on_checkpoint_write_end(self, checkpoint_dir: str) -> None:
        """Run when the files of a checkpoint are written but not yet committed: on rank 0, with a DeepSpeedTrial on
        every rank.

        If any rank overrides this hook, checkpoints are not written asynchronously: training waits for the commit.

        Args:
            checkpoint_dir: Path of the checkpoint's folder. Files added to it become part of the checkpoint.
        """

    def on_checkpoint_upload_end(self, uuid: str) -> None:
        """Run after a checkpoint is committed, at the next boundary of reports, validations or saves.

        Args:
            uuid: UUID of the checkpoint, which is also the name of its folder.
        """

    def on_trial_shutdown(self) -> None:
        """Run when the training loop of this process ends: when it is finished, stopped, or failed."""


HOOKS = [name for name in vars(PyTorchCallback) if name.startswith("on_")]

FORMER_NAMES = {
    "on_checkpoint_end": "on_checkpoint_write_end",
    "on_validation_step_start": "on_validation_start",
    "on_validation_step_end": "on_validation_end",
}
"""Determined's names of hooks before its release 0.17, each with the name used today."""


class Callbacks:
    """All callbacks of a trial. Calling a hook that no callback overrides costs almost nothing."""

    def __init__(self, callbacks: Mapping[str, PyTorchCallback], timed: Timed = untimed) -> None:
        """Store the callbacks by name; `timed` wraps each hook for profiling. Raises UsageError for other objects."""
        problems = [
            f"build_callbacks: '{name}' is {type(callback).__name__}, not a PyTorchCallback; derive it from that class"
            for name, callback in callbacks.items()
            if not isinstance(callback, PyTorchCallback)
        ]
        if problems:
            raise UsageError(problems)
        self._callbacks = callbacks
        # Resolved once: hooks that are not overridden have an empty list, so that the loop calls nothing for them.
        self._methods = {
            hook: [
                timed(f"{CALLBACKS}{type(callback).__name__}.{hook}", method)
                for callback in callbacks.values()
                for method in _methods(callback, hook)
            ]
            for hook in HOOKS
        }

    def call(self, hook: str, *arguments: Any) -> None:
        """Call this hook of each callback that overrides it, in the order of `build_callbacks()`."""
        for method in self._methods[hook]:
            method(*arguments)

    def overrides(self, *hooks: str) -> bool:
        """Return whether any callback overrides any of the hooks, also under a former name."""
        return any(self._methods[hook] for hook in hooks)

    def state(self) -> dict[str, Any]:
        """Return the `state_dict()` of each callback by its name."""
        return {name: callback.state_dict() for name, callback in self._callbacks.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Load the value of each callback in `state`; warn about a callback that can load state but has none there."""
        for name, callback in self._callbacks.items():
            if name in state:
                callback.load_state_dict(state[name])
            elif _overrides(callback, "load_state_dict"):  # others have no state to miss
                warnings.warn(
                    f"callback '{name}' has no state in the checkpoint and keeps its initial state", stacklevel=2
                )


def _methods(callback: PyTorchCallback, hook: str) -> list[Callable[..., None]]:
    """Return the methods of `callback` that run at `hook`: its override, and one under a former name."""
    methods = [getattr(callback, hook)] if _overrides(callback, hook) else []
    # Determined once called on_training_epoch_start without arguments; callbacks written for that still work.
    if hook == "on_training_epoch_start" and methods and not inspect.signature(methods[0]).parameters:
        warnings.warn(f"{type(callback).__name__}.{hook} should take epoch_idx", DeprecationWarning, stacklevel=4)
        methods = [_without_arguments(methods[0])]
    for former, name in FORMER_NAMES.items():
        if name == hook and hasattr(callback, former):
            warnings.warn(f"{type(callback).__name__}.{former} is now called {name}", DeprecationWarning, stacklevel=4)
            methods.append(getattr(callback, former))
    return methods


def _overrides(callback: PyTorchCallback, name: str) -> bool:
    """Return whether the class of `callback` overrides the method, or the instance has an attribute of that name."""
    return getattr(type(callback), name) is not getattr(PyTorchCallback, name) or name in vars(callback)


def _without_arguments(method: Callable[..., None]) -> Callable[..., None]:
    """Return a function that accepts any arguments and calls `method` without any."""
    return lambda *arguments: method()
