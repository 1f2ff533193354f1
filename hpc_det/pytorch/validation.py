"""One validation: all ranks together, each at its own pace, or rank 0 alone over the full dataset."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from hpc_det.core.metrics import MetricWindow, plain
from hpc_det.core.preempt import StopAgreement
from hpc_det.core.rng import unchanged_generators
from hpc_det.errors import UsageError
from hpc_det.pytorch.callback import Callbacks
from hpc_det.pytorch.context import PyTorchTrialContext
from hpc_det.pytorch.data import ValidationData
from hpc_det.pytorch.ddp import DataParallel, share_buffers
from hpc_det.pytorch.trial import PyTorchTrial, evaluation_of, implements


class Validation:
    def __init__(
        self,
        trial: PyTorchTrial,
        context: PyTorchTrialContext,
        callbacks: Callbacks,
        data: ValidationData,
        stop: StopAgreement,
        limit: int | None,
    ) -> None:
        """`limit`: batches of each rank, at most."""
        self._trial = trial
        self._context = context
        self._callbacks = callbacks
        self._data = data
        self._stop = stop
        self._limit = limit
        self._ticks = min(context.distributed.gather_json(data.length or 0))
        """Batches that every rank has, as far as anybody knows."""
        self._evaluate_batch = evaluation_of(trial)
        self._in_full = implements(type(trial), "evaluate_full_dataset")
        self._keeps_outputs = callbacks.overrides("on_validation_epoch_end")

    def run(self) -> dict[str, Any] | None:
        """Collective: the metrics, the same on every rank; None when all ranks left it together for a stop.

        Random generators are put back afterwards, so that validating more or less often changes no weight. What was
        left leaves no trace either: it is done again after the resume.
        """
        before = self._what_callbacks_may_change()
        with unchanged_generators(), self._context.reducers.set_aside(self._what_training_changes()):
            metrics = self._evaluated()
        self._set_training_mode(True)
        if metrics is None:
            self._put_back(before)
            return None
        self._callbacks.call("on_validation_end", metrics)
        return metrics

    def _evaluated(self) -> dict[str, Any] | None:
        self._context.reducers.reset(training=False)
        self._callbacks.call("on_validation_start")
        share_buffers(self._context.wrapped_models)
        self._set_training_mode(False)
        with torch.no_grad():
            metrics = self._full_dataset() if self._in_full else self._batches()
        if metrics is None:
            return None
        return {**metrics, **self._context.reducers.reduce(self._context.distributed, training=False)}

    # --- batches

    def _batches(self) -> dict[str, Any] | None:
        """All ranks ask for a stop as often as the rank with the fewest batches can, so they leave at the same one."""
        self._callbacks.call("on_validation_epoch_start")
        window = MetricWindow(self._trial.evaluation_reducer(), numbers_only=True)
        outputs: list[Any] = []
        batches = self._context.on_device(self._data.batches(), loaded_in_workers=self._data.loads_in_workers)
        with self._stop.steps("validation"):
            for number, batch in enumerate(islice(batches, self._limit)):
                if number < self._ticks and self._stop.should_stop():
                    return None
                metrics = self._evaluate(batch, number)
                self._stop.step()
                window.add(metrics)
                if self._keeps_outputs:
                    outputs.append(metrics)
        self._callbacks.call("on_validation_epoch_end", outputs)
        return self._reduced(window)

    def _evaluate(self, batch: Any, number: int) -> dict[str, Any]:
        metrics = self._evaluate_batch(batch, number)
        if not isinstance(metrics, dict):
            raise UsageError(f"evaluate_batch returned {type(metrics).__name__}; return a dict of metrics")
        return metrics

    def _reduced(self, window: MetricWindow) -> dict[str, Any]:
        sums = self._context.distributed.gather_json(window.sums())
        if not any(rank["batches"] for rank in sums):
            raise UsageError("build_validation_data_loader: the loader gave no batch on any rank; give it records")
        return dict(window.reduced(sums))

    # --- full dataset

    def _full_dataset(self) -> dict[str, Any] | None:
        """Rank 0 leaves as soon as it knows of a stop; the others wait for what it says."""
        distributed = self._context.distributed
        metrics = self._on_rank_0() if distributed.is_chief else None
        distributed.wait_for_rank_0()
        metrics = distributed.broadcast(metrics)
        if isinstance(metrics, dict):
            return metrics
        if metrics is Abandoned:
            return None
        raise UsageError(f"evaluate_full_dataset returned {metrics!r}; return a dict of metrics")

    def _on_rank_0(self) -> Any:
        try:
            metrics = self._trial.evaluate_full_dataset(_Whole(self._data.whole(), self._stop, self._limit))
        except Abandoned:
            return Abandoned
        return {name: plain(value) for name, value in metrics.items()} if isinstance(metrics, dict) else metrics

    # --- before and after

    def _set_training_mode(self, training: bool) -> None:
        for model in self._context.wrapped_models:
            model.train(training)
            if isinstance(model, DataParallel):
                model.alone = not training

    def _what_training_changes(self) -> Iterator[object]:
        context = self._context
        yield from (self._trial, context, *context.optimizers, *context.lr_schedulers)
        for model in (*context.models, *context.wrapped_models):
            yield from (*model.modules(), *model.parameters(), *model.buffers())

    def _what_callbacks_may_change(self) -> dict[str, Any] | None:
        """A copy, where any acts before the validation is sure to come to its end: one that swaps weights, say."""
        if not self._callbacks.overrides("on_validation_start", "on_validation_epoch_start"):
            return None
        models = [
            {name: value.to("cpu", copy=True) if isinstance(value, torch.Tensor) else value for name, value in state}
            for state in (model.state_dict().items() for model in self._context.models)
        ]
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for optimizer in self._context.optimizers
            for group in optimizer.param_groups
        ]
        schedulers = [scheduler.state_dict() for scheduler in self._context.lr_schedulers]
        others = {"groups": groups, "schedulers": schedulers, "callbacks": self._callbacks.state()}
        return {"models": models, **copy.deepcopy(others)}

    def _put_back(self, before: dict[str, Any] | None) -> None:
        if before is None:
            return
        for model, state in zip(self._context.models, before["models"], strict=True):
            model.load_state_dict(state)
        groups = (group for optimizer in self._context.optimizers for group in optimizer.param_groups)
        for group, former in zip(groups, before["groups"], strict=True):
            group.update(former)
        for scheduler, state in zip(self._context.lr_schedulers, before["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        self._callbacks.restore(before["callbacks"])


class Abandoned(BaseException):
    """Rank 0 knows of a stop. No Exception, so that no handler of the trial's takes it for an error."""


class _Whole:
    """All validation data, as `evaluate_full_dataset` gets it: the loader, but for stops."""

    def __init__(self, loader: Any, stop: StopAgreement, limit: int | None) -> None:
        self._loader = loader
        self._stop = stop
        self._limit = limit

    def __iter__(self) -> Iterator[Any]:
        for batch in islice(self._loader, self._limit):
            if self._stop.noticed:
                raise Abandoned
            yield batch

    def __len__(self) -> int:
        length = len(self._loader)
        return length if self._limit is None else min(length, self._limit)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
