"""One validation: all ranks together, each at its own pace, or rank 0 alone over the full dataset."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch

from hpc_det.core.metrics import MetricWindow
from hpc_det.core.preempt import StopAgreement
from hpc_det.core.rng import restore_rng, rng_state
from hpc_det.errors import UsageError
from hpc_det.pytorch.callback import Callbacks
from hpc_det.pytorch.context import PyTorchTrialContext
from hpc_det.pytorch.data import ValidationData
from hpc_det.pytorch.ddp import share_buffers
from hpc_det.pytorch.trial import PyTorchTrial, implements, takes_batch_idx


class Abandoned(BaseException):
    """This rank knows of a stop. No Exception, so that no handler of the trial's takes it for an error."""


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
        self._with_index = takes_batch_idx(trial)
        self._in_full = implements(type(trial), "evaluate_full_dataset")
        self._keeps_outputs = callbacks.overrides("on_validation_epoch_end")

    def run(self) -> dict[str, Any] | None:
        """Collective: the metrics, the same on every rank; None when it was abandoned for a stop.

        Random generators are put back afterwards, so that validating more or less often changes no weight. What was
        abandoned leaves no trace either: it is done again after the resume.
        """
        generators = rng_state()
        before = self._what_callbacks_may_change()
        with self._context.reducers.set_aside():
            metrics = self._evaluated()
        restore_rng(generators)
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
        self._callbacks.call("on_validation_epoch_start")
        window = MetricWindow(self._trial.evaluation_reducer(), numbers_only=True)
        outputs: list[Any] = []
        try:
            for number, batch in enumerate(self._heeding_stops(self._on_device())):
                metrics = self._evaluate(batch, number)
                window.add(metrics)
                if self._keeps_outputs:
                    outputs.append(metrics)
            whole = True
        except Abandoned:
            whole = False
        by_rank = self._context.distributed.gather_json({"whole": whole, "batches": window.batches})
        if not all(rank["whole"] for rank in by_rank):
            return None
        if not any(rank["batches"] for rank in by_rank):
            raise UsageError("build_validation_data_loader: the loader gave no batch on any rank; give it records")
        self._callbacks.call("on_validation_epoch_end", outputs)
        return dict(window.reduce(self._context.distributed))

    def _evaluate(self, batch: Any, number: int) -> dict[str, Any]:
        metrics = self._trial.evaluate_batch(batch, number) if self._with_index else self._trial.evaluate_batch(batch)
        if not isinstance(metrics, dict):
            raise UsageError(f"evaluate_batch returned {type(metrics).__name__}; return a dict of metrics")
        return metrics

    def _on_device(self) -> Iterator[Any]:
        return self._context.on_device(self._data.batches(), loaded_in_workers=self._data.loads_in_workers)

    def _heeding_stops(self, batches: Iterable[Any]) -> Iterator[Any]:
        for batch in islice(batches, self._limit):
            if self._stop.noticed:
                raise Abandoned
            yield batch

    # --- full dataset

    def _full_dataset(self) -> dict[str, Any] | None:
        metrics = self._on_rank_0() if self._context.distributed.is_chief else None
        metrics = self._context.distributed.broadcast(metrics)
        if isinstance(metrics, dict):
            return metrics
        if metrics is Abandoned:
            return None
        raise UsageError(f"evaluate_full_dataset returned {metrics!r}; return a dict of metrics")

    def _on_rank_0(self) -> Any:
        try:
            return self._trial.evaluate_full_dataset(_Whole(self))
        except Abandoned:
            return Abandoned

    # --- before and after

    def _set_training_mode(self, training: bool) -> None:
        for model in self._context.wrapped_models:
            model.train(training)

    def _what_callbacks_may_change(self) -> dict[str, Any] | None:
        """A copy, where any acts before the validation is sure to come to its end: one that swaps weights, say."""
        if not self._callbacks.overrides("on_validation_start", "on_validation_epoch_start"):
            return None
        models = [model.state_dict() for model in self._context.models]
        return copy.deepcopy({"models": models, "callbacks": self._callbacks.state()})

    def _put_back(self, before: dict[str, Any] | None) -> None:
        if before is None:
            return
        for model, state in zip(self._context.models, before["models"], strict=True):
            model.load_state_dict(state)
        self._callbacks.restore(before["callbacks"])


class _Whole:
    """All validation data, as `evaluate_full_dataset` gets it."""

    def __init__(self, validation: Validation) -> None:
        self._validation = validation

    def __iter__(self) -> Iterator[Any]:
        return self._validation._heeding_stops(self._validation._data.whole())

    def __len__(self) -> int:
        whole: Any = self._validation._data.whole()
        return len(whole)
