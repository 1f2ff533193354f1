"""The callback that connects a Trainer with hpc_det.core."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hpc_det.core import Core, Operation, Stop
from hpc_det.errors import UsageError
from hpc_det.integrations.transformers.arguments import length_of, note_inexact, problems_of
from hpc_det.integrations.transformers.checkpoint_files import best_checkpoint, clear_leftovers, place

_DROPPED = ("epoch", "total_flos")
_DROPPED_ENDINGS = ("_runtime", "_per_second", "_preparation_time")


class HpcDetCallback(TrainerCallback):  # type: ignore[misc]  # the library is optional
    """Connects a Trainer with hpc_det. List it last: its `on_save` removes the Trainer's copy of the checkpoint.

    Every rank creates one. It asks whether to stop after each optimizer step, and after the evaluation of that step if
    one is due, so that a resumed run does not lack it.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._metric: str | None = core.config.get("searcher", {}).get("metric")
        self._resumed_at = core.step
        self._operations: Iterator[Operation] | None = None
        self._operation: Operation | None = None
        """The length that the search requests; None without one."""
        self._evaluation: dict[str, Any] = {}
        """What the Trainer logged of the evaluation whose `on_evaluate` follows; TRL adds metrics there only."""
        self._asked_at = self._evaluated_at = self._saved_at = -1
        """Optimizer steps of the latest question whether to stop, evaluation of this training, and checkpoint."""
        self._is_stopping = False

    # --- hooks of the Trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Raises UsageError for arguments with which a stop or a resume would fail.

        Raises SystemExit with code 0 for a stop before the first step, for a trial that its search has stopped, and for
        a complete training whose last step was in the middle of a pass: the Trainer would train another step.
        """
        core = self._core
        if problems := problems_of(core, args, state, self._resumed_at):
            raise UsageError(problems)
        if core.distributed.is_chief:
            note_inexact(core, args, state, kwargs.get("train_dataloader"))
        if core.distributed.local_rank == 0:
            clear_leftovers(Path(args.output_dir), core.info.folder)
        self._restore_best(state)
        if length_of(core):
            self._operations = core.search
            self._operation = next(self._operations, None)
        self._asked_at = state.global_step
        is_complete = state.global_step >= state.max_steps and not _ends_pass(state, kwargs.get("train_dataloader"))
        stop = core.should_stop()
        if stop or is_complete:
            if core.distributed.is_chief:
                print(f"hpc-det: {_why_it_ends(state.global_step, stop)}", flush=True)
            raise SystemExit(0)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        step = state.global_step
        self._core.epoch = int(state.epoch)
        if self._is_reached(state) and (step < state.max_steps or args.eval_strategy != "no"):
            control.should_evaluate = True
        is_asked_later = control.should_evaluate or float(state.epoch).is_integer()
        if not (is_asked_later and self._asked_at == step - 1):
            self._ask(state, control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        step = state.global_step
        if self._is_stopping:
            # the strategies "epoch" request these at the end of an interrupted pass, too
            control.should_evaluate = control.should_save = False
            control.should_log = control.should_log and float(state.epoch).is_integer()
            state.best_model_checkpoint = None  # the Trainer would load it now; the saved state has it
            return
        if self._evaluated_at == step:
            control.should_evaluate = False
        if not control.should_evaluate and self._asked_at < step:
            self._ask(state, control)
        if self._saved_at == step:
            control.should_save = False

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any],
        **kwargs: Any,
    ) -> None:
        if "train_runtime" in logs:  # the summary of this call of `train`, which a resumed run would not repeat
            return
        if _prefix(logs):
            self._evaluation = dict(logs)
        elif metrics := _kept(logs):
            self._core.report(state.global_step, metrics)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, Any],
        **kwargs: Any,
    ) -> None:
        prefix = _prefix(metrics)
        logged, self._evaluation = self._evaluation, {}
        metrics = _kept({**logged, **metrics} if _prefix(logged) == prefix else metrics)
        # of several evaluation data sets, the one with the searcher's metric is the validation
        is_validation = prefix == "eval" or self._metric is None or self._metric in metrics
        is_reached = self._is_reached(state)
        self._core.report(state.global_step, metrics, group="validation" if is_validation else prefix)
        if not is_validation:
            return
        self._evaluated_at = state.global_step
        if is_reached and self._operations:
            self._operation = next(self._operations, None)
        self._ask(state, control)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Commit the checkpoint that the Trainer has written. Collective: some ranks may still be writing."""
        step, core = state.global_step, self._core
        source = Path(args.output_dir) / f"checkpoint-{step}"
        if self._saved_at != step:
            with core.checkpoint(step) as folder:
                if core.distributed.rank == 0:
                    place(source, folder)
                if core.distributed.nodes > 1:
                    core.distributed.barrier()
                    if core.distributed.rank and core.distributed.local_rank == 0:
                        place(source, folder)  # what only this node has
            self._saved_at = step
            if state.best_global_step == step and core.latest_checkpoint:
                state.best_model_checkpoint = str(core.latest_checkpoint)
        if core.distributed.local_rank == 0:
            shutil.rmtree(source, ignore_errors=True)

    # --- helpers

    def _ask(self, state: TrainerState, control: TrainerControl) -> None:
        """Stop after a checkpoint of this step if all ranks have agreed on a stop. The last step completes anyway."""
        self._asked_at = state.global_step
        if state.global_step < state.max_steps and self._core.should_stop():
            control.should_training_stop = True
            control.should_save = self._saved_at != state.global_step
            self._is_stopping = True

    def _is_reached(self, state: TrainerState) -> bool:
        if self._operation is None:
            return False
        done = state.epoch if self._operation.unit == "epochs" else state.global_step
        return bool(done >= self._operation.until.length)

    def _restore_best(self, state: TrainerState) -> None:
        """Let the Trainer find its best checkpoint: it has saved the path that the checkpoint had before the commit."""
        latest = self._core.latest_checkpoint
        if latest and state.best_global_step and not state.best_model_checkpoint:
            best = best_checkpoint(latest.parent, state.best_global_step)
            state.best_model_checkpoint = str(best) if best else None


def _why_it_ends(step: int, stop: Stop) -> str:
    """Return why an attempt trains no step."""
    if stop and stop.reason != "search":
        return f"stopped after step {step}, before the first step of this attempt: {stop.reason}"
    return f"nothing to train after step {step}"


def _ends_pass(state: TrainerState, loader: Any) -> bool:
    """Return whether the last step was the end of a pass over a data set with a length."""
    return float(state.epoch).is_integer() and not isinstance(getattr(loader, "dataset", None), IterableDataset)


def _prefix(logs: Mapping[str, Any]) -> str:
    """Return the prefix of the metrics of an evaluation, such as eval; "" for other logs."""
    return next((name.removesuffix("_runtime") for name in logs if name.endswith("_runtime")), "")


def _kept(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics without the epoch and speeds."""
    return {name: each for name, each in logs.items() if name not in _DROPPED and not name.endswith(_DROPPED_ENDINGS)}
