"""`determined.transformers`: a callback that connects the Trainer of Hugging Face with the Core API.

Upstream's own (determined/transformers/_hf_callback.py, 0.38.1) cannot run with transformers 5.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers import trainer_utils

from hpc_det.compat.cluster_info import get_cluster_info
from hpc_det.compat.det_core import Context

__all__ = ["DetCallback"]

logger = logging.getLogger("determined.transformers")
_SPEED = ("_runtime", "_per_second", "_compilation_time")
"""Endings of the names of metrics that are not reported."""


class DetCallback(transformers.TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Reports metrics, commits the Trainer's checkpoints, and ends the training when the trial has to stop.

    The newest checkpoint is copied to `args.output_dir` and named by `args.resume_from_checkpoint`, which the script
    passes to `trainer.train`.
    """

    def __init__(
        self,
        core_context: Context,
        args: Any,
        filter_metrics: list[str] | None = None,
        user_data: dict[str, Any] | None = None,
    ) -> None:
        """`args`: the Trainer's TrainingArguments. `filter_metrics`: parts of the names of the metrics to report; None:
        all. `user_data`: content of my_data.json in each checkpoint.

        Raises RuntimeError without an experiment, ValueError if `args` and the searcher name different lengths.
        """
        super().__init__()
        info = get_cluster_info()
        if info is None:
            raise RuntimeError("det.transformers.DetCallback: this process does not belong to an experiment")
        self.core_context = core_context
        self.user_data = user_data
        self.info = info
        self.last_train_metrics = self.last_eval_metrics = self.last_save = -1
        self.searcher_metric: str | None = info.trial._config["searcher"].get("metric")
        self.filter_metrics = [*filter_metrics, *filter(None, [self.searcher_metric])] if filter_metrics else None
        self._is_stopping = False
        _check_length(info.trial._config["searcher"].get("max_length"), args)
        self.load_last_checkpoint(args)

    def load_last_checkpoint(self, args: Any) -> None:
        """Copy the newest checkpoint to `args.output_dir`, unless `args.overwrite_output_dir` is True."""
        newest = self.info.latest_checkpoint
        if newest is None or getattr(args, "overwrite_output_dir", False) is True:
            return
        self.core_context.checkpoint.download(newest, args.output_dir)
        args.resume_from_checkpoint = trainer_utils.get_last_checkpoint(args.output_dir)
        logger.info("resumes from %s", args.resume_from_checkpoint)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: object
    ) -> None:
        """Report the metrics of a log entry, once for each step and group."""
        if not logs:
            return
        group = _group_of(logs)
        last = self.last_train_metrics if group == "training" else self.last_eval_metrics
        if group is None or last == state.global_step:
            return
        if group == "training":
            self.last_train_metrics = state.global_step
        else:
            self.last_eval_metrics = state.global_step
        if state.is_world_process_zero:
            metrics = {"batches": state.global_step, "epochs": state.epoch, **self._wanted(logs)}
            self.core_context.train.report_metrics(group, state.global_step, metrics)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: object) -> None:
        """End the training if the trial has to stop; the checkpoint follows in `on_epoch_end`."""
        if state.is_world_process_zero and state.max_steps > 0:
            self.core_context.train.report_progress(min(state.global_step / state.max_steps, 1.0))
        if self.core_context.preempt.should_preempt():
            self._is_stopping = control.should_training_stop = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: object) -> None:
        """Before the training ends, save and, unless it was stopped, evaluate what has not been."""
        is_end = control.should_training_stop or state.global_step >= state.max_steps
        if not is_end:
            return
        if self._is_stopping:
            control.should_evaluate = False  # it would take the time that remains
        elif state.global_step > self.last_eval_metrics and args.eval_strategy != "no":
            control.should_evaluate = True
        control.should_save = state.global_step > self.last_save

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: object) -> None:
        """Commit the Trainer's checkpoint. Every rank calls this."""
        self.last_save = state.global_step
        folder = f"{trainer_utils.PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if self.user_data is not None and state.is_world_process_zero:
            text = json.dumps(self.user_data)
            (Path(args.output_dir) / folder / "my_data.json").write_text(text, encoding="utf-8")
        self.core_context.checkpoint.upload(
            args.output_dir,
            {"steps_completed": state.global_step, "trial_id": self.info.trial.trial_id},
            shard=True,
            selector=lambda name: name.startswith((f"{folder}/", "runs/")),
        )

    def _wanted(self, logs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the metrics to report."""
        return {
            name: value
            for name, value in logs.items()
            if name != "epoch"
            and not name.endswith(_SPEED)
            and (self.filter_metrics is None or any(part in name for part in self.filter_metrics))
        }


def _group_of(logs: Mapping[str, Any]) -> str | None:
    """Return the group of a log entry; None for that of a test."""
    if any(name.startswith("eval_") for name in logs):
        return "validation"
    return None if any(name.startswith("test_") for name in logs) else "training"


def _check_length(length: int | Mapping[str, int] | None, args: Any) -> None:
    """Raise ValueError unless the length of the configuration, if there is one, is that of the arguments."""
    if not length:
        return
    ((unit, amount),) = length.items() if isinstance(length, Mapping) else (("batches", length),)
    by_steps = args.max_steps > 0
    own = ("batches", args.max_steps) if by_steps else ("epochs", args.num_train_epochs)
    if (unit, amount) != own:
        option = "--max_steps" if by_steps else "--num_train_epochs"
        raise ValueError(
            f"searcher.max_length is {amount} {unit}, but {option} is {own[1]} {own[0]}; make them equal, or remove "
            f"searcher.max_length"
        )
