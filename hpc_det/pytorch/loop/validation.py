"""One validation: by all ranks, each evaluating its share, or by rank 0 alone over the full dataset."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch

from hpc_det.distributed.metrics import MetricWindow, plain
from hpc_det.distributed.preempt import StopAgreement
from hpc_det.distributed.rng import unchanged_generators
from hpc_det.errors import UsageError
from hpc_det.pytorch.trial.callback import Callbacks
from hpc_det.pytorch.trial.reducer import joined
from hpc_det.pytorch.trial.trial import BuiltTrial, implements
from hpc_det.pytorch.trial.trial_data import TrialData


class Validation:
    """The validations of one rank."""

    def __init__(
        self,
        built: BuiltTrial,
        callbacks: Callbacks,
        data: TrialData,
        stop: StopAgreement,
        *,
        reporting: Sequence[int],
        limit: int | None,
    ) -> None:
        """`reporting`: the ranks whose metrics count. `limit`: largest number of rounds, or None."""
        self._trial, self._context, self._strategy = built.trial, built.context, built.strategy
        self._callbacks = callbacks
        self._data = data
        self._stop = stop
        self._reporting = reporting
        self._reports = self._context.distributed.rank in reporting
        self._limit = limit
        self._common_rounds = min(self._context.distributed.gather_json(data.validation.length or 0))
        """Number of rounds that every rank takes: the length of the shortest loader; 0 if one has no length."""
        self._may_change = callbacks.overrides("on_validation_start", "on_validation_epoch_start")
        self._in_full = implements(type(built.trial), "evaluate_full_dataset")
        self._keeps_outputs = callbacks.overrides("on_validation_epoch_end")
        self._mentioned: set[str] = set()

    def run(self) -> dict[str, Any] | None:
        """Return the metrics, the same on every rank; None if all ranks left together for a stop.

        Collective. Random generators are restored afterwards, so that the number of validations does not affect the
        weights. An interrupted validation has no effect, and is repeated after the resume.
        """
        put_back = self._strategy.snapshot(self._callbacks) if self._may_change else None
        self._may_leave = put_back is not None or not self._may_change
        with unchanged_generators(), self._context.reducers.set_aside(self._strategy.owned()):
            metrics = self._evaluated()
        if metrics is None:
            if put_back:
                put_back()
            return None
        self._callbacks.call("on_validation_end", metrics)
        return metrics

    def _evaluated(self) -> dict[str, Any] | None:
        self._context.reducers.reset(training=False)
        self._callbacks.call("on_validation_start")
        with self._strategy.evaluating():
            with torch.no_grad():
                metrics = self._full_dataset() if self._in_full else self._batches()
            if metrics is None:
                return None
            reduced = self._context.reducers.reduce(self._context.distributed, training=False)
            return joined(metrics, reduced, "evaluate_full_dataset" if self._in_full else "evaluate_batch")

    # --- batches

    def _batches(self) -> dict[str, Any] | None:
        """Evaluate this rank's batches and reduce the metrics; None after an agreed stop.

        All ranks check for a stop as often as the rank with the fewest batches, so they leave at the same one.
        """
        self._callbacks.call("on_validation_epoch_start")
        window = MetricWindow(self._trial.evaluation_reducer(), is_validation=True)
        outputs: list[Any] = []
        with self._stop.steps("validation"):
            rounds = self._data.validation.rounds(self._data.validation_batches())
            for number, (batches, counts) in enumerate(islice(rounds, self._limit)):
                if self._may_leave and number < self._common_rounds and self._stop.should_stop():
                    return None
                if counts:
                    metrics = self._strategy.evaluate(batches, number)
                    if self._reports:
                        window.add(_checked(metrics))
                    if self._keeps_outputs:
                        outputs.append(metrics)
                else:
                    self._evaluate_for_others(batches, number)
                self._stop.step()
        self._callbacks.call("on_validation_epoch_end", outputs)
        metrics = self._reduced(window)
        self._mention(name for name, value in metrics.items() if value is None)
        return metrics

    def _mention(self, no_numbers: Iterable[str]) -> None:
        """Print once per name that a tensor is not reported as a metric."""
        new = sorted({*no_numbers} - self._mentioned)
        self._mentioned.update(new)
        if new and self._context.distributed.is_chief:
            print(
                f"hpc-det: note: evaluate_batch: {', '.join(new)}: tensors of several elements are reported as null; "
                f"on_validation_epoch_end of callbacks receives them",
                flush=True,
            )

    def _evaluate_for_others(self, batches: Any, number: int) -> None:
        """Take part in an evaluation that other ranks need this rank for; its result does not count."""
        with self._context.reducers.set_aside(self._strategy.owned(), in_training_only=False):
            self._strategy.evaluate(batches, number)

    def _reduced(self, window: MetricWindow) -> dict[str, Any]:
        by_rank = self._context.distributed.gather_json(window.sums())
        sums = [by_rank[rank] for rank in self._reporting]
        if not any(rank["batches"] for rank in sums):
            raise UsageError("build_validation_data_loader: the loader gave no batch on any rank; give it records")
        return dict(window.reduced(sums))

    # --- full dataset

    def _full_dataset(self) -> dict[str, Any] | None:
        """Evaluate on rank 0 while the other ranks wait for the result; None after a stop request.

        Rank 0 can leave as soon as it has received the request, since no other rank evaluates.
        """
        distributed = self._context.distributed
        metrics = self._on_rank_0() if distributed.is_chief else None
        distributed.wait_for_rank_0()
        metrics = distributed.broadcast(metrics)
        if isinstance(metrics, dict):
            return metrics
        if metrics is Abandoned:
            return None
        raise UsageError(f"evaluate_full_dataset returned {metrics!r}; return a dict of metrics")

    def _whole(self) -> Iterable[Any]:
        stop = self._stop if self._may_leave else None
        return _Whole(self._data.validation.whole(), stop, self._limit)

    def _on_rank_0(self) -> Any:
        try:
            metrics = self._trial.evaluate_full_dataset(self._whole())
        except Abandoned:
            return Abandoned
        return {name: plain(value) for name, value in metrics.items()} if isinstance(metrics, dict) else metrics


def _checked(metrics: Any) -> dict[str, Any]:
    if not isinstance(metrics, dict):
        raise UsageError(f"evaluate_batch returned {type(metrics).__name__}; return a dict of metrics")
    return metrics


class Abandoned(BaseException):
    """Ends `evaluate_full_dataset` on rank 0 after a stop request.

    Derived from BaseException, so that no `except Exception` of a trial catches it.
    """


class _Whole:
    """The validation loader for `evaluate_full_dataset`, which ends early for a stop."""

    def __init__(self, loader: Any, stop: StopAgreement | None, limit: int | None) -> None:
        self._loader = loader
        self._stop = stop
        self._limit = limit

    def __iter__(self) -> Iterator[Any]:
        for batch in islice(self._loader, self._limit):
            if self._stop and self._stop.noticed:
                raise Abandoned
            yield batch

    def __len__(self) -> int:
        length = len(self._loader)
        return length if self._limit is None else min(length, self._limit)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
