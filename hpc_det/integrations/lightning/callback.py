"""The callback that saves, stops, resumes and reports a Trainer.

It acts at one place: when the next batch is fetched, before any hook of that batch. Then all hooks of the last
batch, its validation and its schedulers are done, so the checkpoint misses none of them, and no hook runs twice.
Lightning does not restore the rest of such a state: the callback restores the generators and two counters.
"""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import _TunerExitException

from hpc_det.core import Core
from hpc_det.core.ddp_buckets import settle_buckets_in
from hpc_det.errors import UsageError
from hpc_det.integrations.lightning.environment import check_ranks
from hpc_det.integrations.lightning.sampler import ENTRY, hide_warning_of_resume, resumable_batch_size

CHECKPOINT = "lightning.ckpt"
"""The file of a checkpoint that Lightning writes; a folder with strategies that save in parts."""


class HpcDetCallback(Callback):
    """Saves, stops, resumes and reports a `Trainer.fit`.

    Metrics of `self.log` are reported every `log_every_n_steps` batches and at the end of each pass, those of a
    validation with the group "validation". Steps are batches.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._saved = core.step if core.latest_checkpoint else 0
        """Batches in the newest checkpoint."""
        self._reported = core.step
        """Batches at the last report."""
        self._batch_size = 0
        """Batch size of a loader with a ResumableSampler."""
        self._handler: Any = signal.SIG_DFL
        """The handler of SIGTERM before Lightning's."""
        self._is_saving = False
        self._resumed: dict[str, Any] | None = None
        """Our entry in the checkpoint that Lightning has loaded, until the first batch."""
        self._before: dict[str, Any] = {}
        """All metrics at the start of a validation."""
        self._validated: set[str] = set()
        """Names of the metrics of validations."""

    @property
    def ckpt_path(self) -> Path | None:
        """The checkpoint to resume from, for `Trainer.fit(ckpt_path=...)`; None at the start of a trial.

        Raises UsageError if the newest checkpoint is not one of this callback.
        """
        folder = self._core.latest_checkpoint
        if folder and not (folder / CHECKPOINT).exists():
            raise UsageError(
                f"lightning: {folder} has no {CHECKPOINT}; do not use core.track, core.save or core.checkpoint beside "
                f"HpcDetCallback, since Lightning saves the model, its optimizers and callbacks"
            )
        return folder / CHECKPOINT if folder else None

    # --- hooks of Lightning: begin

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        check_ranks(trainer, self._core)
        trainer.callbacks.remove(self)
        trainer.callbacks.insert(0, self)  # first, so that no hook of the next batch has run when it saves

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._handler = signal.getsignal(signal.SIGTERM)
        if self.ckpt_path and (not trainer.ckpt_path or Path(trainer.ckpt_path) != self.ckpt_path):
            raise UsageError(
                f"lightning: fit was called with ckpt_path={trainer.ckpt_path!r}, but the trial resumes from "
                f"{self.ckpt_path}; pass ckpt_path=callback.ckpt_path"
            )
        weights = self._core.warm_start and self._core.warm_start / CHECKPOINT
        if weights and weights.is_file():
            pl_module.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True)["state_dict"])

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._take_signal_back()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._take_signal_back()
        settle_buckets_in(trainer.strategy.model)
        self._batch_size = resumable_batch_size(trainer, self._core)
        if self._resumed:
            trainer.callback_metrics.update(self._resumed["metrics"])  # for EarlyStopping and ReduceLROnPlateau
            self._validated.update(self._resumed["validated"])
            if self._batch_size:
                hide_warning_of_resume()

    def _take_signal_back(self) -> None:
        """Remove Lightning's handler of SIGTERM, which broadcasts at once and ends the process without a checkpoint."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._handler)

    # --- hooks of Lightning: training

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._resumed:
            self._continue(trainer, self._resumed)
        if batch_idx % trainer.accumulate_grad_batches:  # a checkpoint has no gradients
            return
        core, steps = self._core, _steps(trainer)
        self._report(trainer, is_border=batch_idx == 0)
        core.epoch = trainer.current_epoch
        is_due, stop = core.is_checkpoint_due(steps), core.should_stop()
        if is_due or stop:
            self._save(trainer, batch_idx)
        if stop:
            raise _TunerExitException  # fit returns, without a validation and hooks of an end that has not come

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._report(trainer, is_border=True)
        self._core.epoch = trainer.current_epoch
        self._save(trainer, 0)

    def _save(self, trainer: Trainer, batch_idx: int) -> None:
        """Save, unless that is done. Collective."""
        steps = _steps(trainer)
        if steps in (0, self._saved):
            return
        position = {"epoch": trainer.current_epoch, "records": batch_idx * self._batch_size}
        self._is_saving = True
        with self._core.checkpoint(steps, metadata={ENTRY: position}) as folder:
            trainer.save_checkpoint(folder / CHECKPOINT)
        self._is_saving = False
        self._saved = steps

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._is_saving:
            stepped = trainer.fit_loop.epoch_loop._batches_that_stepped
            metrics = dict(trainer.callback_metrics)
            checkpoint[ENTRY] = {"stepped": stepped, "metrics": metrics, "validated": sorted(self._validated)}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._resumed = checkpoint.get(ENTRY)

    def _continue(self, trainer: Trainer, resumed: dict[str, Any]) -> None:
        """Restore what Lightning does not; it has fetched the first batch."""
        loop = trainer.fit_loop.epoch_loop
        loop._batches_that_stepped = resumed["stepped"]  # Lightning has counted the batch that was not trained
        loop.batch_progress.total.ready = loop.batch_progress.total.completed + 1
        trainer.fit_loop._restarting = False  # otherwise ReduceLROnPlateau makes no step at the end of this pass
        self._core.restore_generators()
        self._resumed = None

    # --- hooks of Lightning: validation

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._before = dict(trainer.callback_metrics)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return
        now = trainer.callback_metrics
        metrics = {name: value for name, value in now.items() if value is not self._before.get(name)}
        self._validated |= metrics.keys()
        self._core.epoch = trainer.current_epoch + trainer.is_last_batch
        self._core.report(_steps(trainer), metrics, group="validation")

    def _report(self, trainer: Trainer, *, is_border: bool) -> None:
        steps, period = _steps(trainer), trainer.log_every_n_steps or 1
        if steps > self._reported and (is_border or steps // period > self._reported // period):
            now = trainer.callback_metrics
            if metrics := {name: value for name, value in now.items() if name not in self._validated}:
                self._core.report(steps, metrics)
            self._reported = steps


def _steps(trainer: Trainer) -> int:
    """Return the number of batches trained."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.total.completed)
