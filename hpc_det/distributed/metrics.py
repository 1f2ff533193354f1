"""Metrics: summed on their device between reports, reduced over batches and ranks, written by rank 0 as JSON lines."""

from __future__ import annotations

import enum
import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import UsageError
from hpc_det.node.files import flush_file
from hpc_det.node.json_files import append_lines
from hpc_det.store.folders import TrialFolder
from hpc_det.store.journal import Journal
from hpc_det.store.metrics import BEGINS, as_written, validations


class Reducer(enum.Enum):
    """The reduction of a validation metric's values, one per batch; AVG weights all batches of all ranks equally."""

    AVG = 1
    SUM = 2
    MAX = 3
    MIN = 4


Total = float | torch.Tensor | None
"""The value of a metric over the batches so far: a float, or a 0-dim float64 tensor on the metric's device.

None once a value was neither a number nor a one-element tensor.
"""


class MetricWindow:
    """The metrics of the batches between two reports, added without synchronizing with the GPU.

    A metric is a number or a one-element tensor. Any other value makes the metric None (upstream's rule). With
    `is_validation`, only a tensor or an array does, and any other value raises UsageError. `keep_batches` also keeps
    the values of each batch.
    """

    def __init__(
        self,
        reducer: Reducer | Mapping[str, Reducer] = Reducer.AVG,
        *,
        keep_batches: bool = False,
        is_validation: bool = False,
    ) -> None:
        """Raises UsageError if a value of `reducer` is not a Reducer."""
        self._reducer = _checked(reducer)
        self._is_validation = is_validation
        self._only_sums = reducer in (Reducer.AVG, Reducer.SUM)
        self._kept: list[MetricWindow] | None = [] if keep_batches else None
        self._totals: dict[str, Total] = {}
        self._folds: dict[str, Fold] = {}
        self.batches = 0

    def add(self, metrics: Mapping[str, Any] | torch.Tensor) -> None:
        """Add one batch: metrics by name, or a loss. Raises UsageError if names differ from the previous batch."""
        if type(metrics) is not dict:
            metrics = named(metrics)
        totals = self._totals
        if len(metrics) != len(totals):
            self._begin(metrics)
        for name, value in metrics.items():
            if name not in totals:
                self._begin(metrics)
            total = totals[name]
            # The sum of a loss on the CPU, the usual case, in few steps: each takes time in every batch.
            if (
                self._only_sums
                and type(total) is float
                and type(value) is Tensor
                and value.is_cpu
                and not value.ndim
                and type(loss := value.item()) is float
            ):
                totals[name] = total + loss
            else:
                totals[name] = self._folded_in(name, value)
        self.batches += 1
        if self._kept is not None:
            self._kept.append(_window_of(metrics))

    def reduce(self, distributed: Distributed) -> dict[str, float | None]:
        """Return the metrics reduced over all ranks. Collective; a rank without batches contributes nothing.

        Raises UsageError, on every rank, if names differ between ranks or from those of the reducers.
        """
        return self.reduced(distributed.gather_json(self.sums()))

    def sums(self) -> dict[str, Any]:
        """Return this rank's batch count and totals, in a form that JSON can hold."""
        totals = {name: None if total is None else float(total) for name, total in self._totals.items()}
        return {"batches": self.batches, "totals": totals}

    def kept_sums(self) -> list[dict[str, Any]]:
        """Return this rank's `sums` of each batch that was kept."""
        assert self._kept is not None, "a window without keep_batches"
        return [batch.sums() for batch in self._kept]

    def reduced(self, sums: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
        """Reduce the `sums` of several ranks, given in rank order. Raises UsageError as `reduce` does."""
        self._check_names(sums)
        batches, totals = self._merged(sums)
        averaged = {name for name in totals if self._reducer_of(name) is Reducer.AVG}
        return {
            name: None if total is None else float(total) / batches if name in averaged else float(total)
            for name, total in totals.items()
        }

    def reduced_batches(self, by_rank: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, float | None]]:
        """Reduce the `kept_sums` of several ranks; return one dict per batch."""
        return [self.reduced(batch) for batch in _aligned(by_rank)]

    def reset(self) -> None:
        """Remove all batches; the next ones may have other names."""
        # self._folds may keep old names: `_begin` sets the folds of the names that come next
        self.batches = 0
        self._totals.clear()
        if self._kept is not None:
            self._kept.clear()

    def state(self) -> dict[str, Any]:
        """Return the window's exact content, as numbers only, for `restore`."""
        return {**self.sums(), "kept": [batch.sums() for batch in self._kept or []]}

    def restore(self, *states: Mapping[str, Any]) -> None:
        """Restore the `state` of one rank, or the sum of several ranks' states after a change of the world size."""
        self.batches, self._totals = self._merged(states)
        self._folds = {name: self._fold(name) for name in self._totals}
        if self._kept is not None:
            self._kept = [_window_restored(batch) for batch in _aligned([state["kept"] for state in states])]

    def _folded_in(self, name: str, value: Any) -> Total:
        number, total = number_of(value), self._totals[name]
        if number is None and self._is_validation and not isinstance(value, (torch.Tensor, np.ndarray)):
            raise UsageError(_no_number(name, value))
        return None if number is None or total is None else self._folds[name](total, number)

    def _begin(self, metrics: Mapping[str, Any]) -> None:
        if self.batches:
            raise UsageError(
                f"metric names changed between batches: {_listed(self._totals)} before, {_listed(metrics)} now; "
                f"return the same names every time"
            )
        for name in metrics:
            if not isinstance(name, str):
                raise UsageError(
                    f"metric {name!r}: a name is a str, not {type(name).__name__}; return a dict with str keys"
                )
            self._folds[name] = self._fold(name)
            self._totals[name] = _START[self._reducer_of(name)]

    def _reducer_of(self, name: str) -> Reducer:
        """Return the reducer of a metric; AVG for a name without one."""
        # A missing reducer is an error, but `reduce` raises it: there every rank gets the same error.
        return self._reducer if isinstance(self._reducer, Reducer) else self._reducer.get(name, Reducer.AVG)

    def _fold(self, name: str) -> Fold:
        return _FOLDS[self._reducer_of(name)]

    def _merged(self, sums: Sequence[Mapping[str, Any]]) -> tuple[int, dict[str, Total]]:
        """Add up the batches and totals of several ranks."""
        # Always in the order given: floating-point sums depend on it, and every rank must get the same result.
        parts = [part["totals"] for part in sums if part["batches"]]
        totals = {name: self._folded(name, [part[name] for part in parts]) for name in (parts[0] if parts else ())}
        return sum(part["batches"] for part in sums), totals

    def _folded(self, name: str, totals: list[Total]) -> Total:
        return None if None in totals else functools.reduce(self._fold(name), totals)  # type: ignore[arg-type]

    def _check_names(self, sums: Sequence[Mapping[str, Any]]) -> None:
        by_rank = {rank: part["totals"] for rank, part in enumerate(sums) if part["batches"]}
        if not by_rank:
            return
        first, known = next(iter(by_rank.items()))
        for rank, names in by_rank.items():
            if names.keys() != known.keys():
                raise UsageError(
                    f"metric names differ between ranks: rank {first} has {_listed(known)}, rank {rank} "
                    f"{_listed(names)}; return the same names on every rank"
                )
        if not isinstance(self._reducer, Reducer) and self._reducer.keys() != known.keys():
            raise UsageError(
                f"evaluation_reducer names {_listed(self._reducer)}, evaluate_batch returns {_listed(known)}; "
                f"give a reducer for each of those names and no other, or one Reducer for all"
            )


def _window_of(metrics: Mapping[str, Any]) -> MetricWindow:
    window = MetricWindow()
    window.add(metrics)
    return window


def _window_restored(states: Sequence[Mapping[str, Any]]) -> MetricWindow:
    window = MetricWindow()
    window.restore(*states)
    return window


def _aligned(by_rank: Sequence[Sequence[Mapping[str, Any]]]) -> list[tuple[Mapping[str, Any], ...]]:
    """Return one tuple per batch with the part of each rank, the ranks' newest batches aligned."""
    # A rank that a resume has added has no older batches, so missing parts are at the beginning.
    newest_first = zip_longest(*map(reversed, by_rank), fillvalue=MetricWindow().sums())
    return list(newest_first)[::-1]


# --- one value


def named(metrics: Any) -> dict[str, Any]:
    """Return the result of `train_batch` as a dict. Raises UsageError unless it is a dict or a tensor."""
    if isinstance(metrics, dict):
        return metrics
    if not isinstance(metrics, torch.Tensor):
        raise UsageError(f"train_batch returned {type(metrics).__name__}; return the loss or a dict of metrics")
    return {"loss": metrics}


def scalar(value: Any) -> float | None:
    """Return a number, or a tensor or array of one element, as a float; None for any other value."""
    number = number_of(value)
    return None if number is None else float(number)


def plain(value: Any) -> Any:
    """Return a scalar as a float, and any other value unchanged."""
    number = scalar(value)
    return value if number is None else number


def number_of(value: Any) -> float | torch.Tensor | None:
    """Return what `scalar` returns; a tensor on another device stays there, as a detached 0-dim tensor."""
    # It stays there because float() would wait for the GPU in every batch.
    if isinstance(value, torch.Tensor):
        if value.is_cpu and not value.ndim:  # the usual case, with one check less per batch
            number = value.item()
            return None if type(number) is complex else float(number)
        if value.numel() != 1 or value.is_complex():
            return None
        if value.is_cpu:
            return float(value.item())
        return value.detach().reshape(()) if value.ndim else value.detach()  # reshape only if needed: it costs time
    if isinstance(value, (float, int)):
        return float(value)
    if isinstance(value, (np.generic, np.ndarray)) and value.size == 1 and value.dtype.kind in "biuf":
        return float(value.item())
    return None


def _no_number(name: str, value: Any) -> str:
    kind = "None" if value is None else type(value).__name__
    return (
        f"evaluate_batch: metric '{name}' is {kind}, not a number; return a number or a tensor (for anything else use "
        f"context.wrap_reducer)"
    )


# --- two values

Fold = Callable[[float | torch.Tensor, float | torch.Tensor], float | torch.Tensor]


def _sum(total: float | torch.Tensor, value: float | torch.Tensor) -> float | torch.Tensor:
    if isinstance(total, torch.Tensor):
        return total.add_(value)  # in place: no allocation
    return _precise(value) + total if isinstance(value, torch.Tensor) else total + value


def _extreme(
    of_tensors: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    of_numbers: Callable[[float, float], float],
    total: float | torch.Tensor,
    value: float | torch.Tensor,
) -> float | torch.Tensor:
    """Return the larger or smaller value; NaN if either is NaN, unlike Python's max and min."""
    if isinstance(value, torch.Tensor):
        known = total if isinstance(total, torch.Tensor) else torch.full_like(_precise(value), total)
        return of_tensors(known, value)
    if isinstance(total, torch.Tensor):
        return of_tensors(total, torch.full_like(total, value))
    return math.nan if math.isnan(total) or math.isnan(value) else of_numbers(total, value)


_FOLDS: dict[Reducer, Fold] = {
    Reducer.AVG: _sum,
    Reducer.SUM: _sum,
    Reducer.MAX: functools.partial(_extreme, torch.maximum, max),
    Reducer.MIN: functools.partial(_extreme, torch.minimum, min),
}
_START = {Reducer.AVG: 0.0, Reducer.SUM: 0.0, Reducer.MAX: -math.inf, Reducer.MIN: math.inf}


def _precise(value: torch.Tensor) -> torch.Tensor:
    try:
        return value.to(torch.float64)
    except TypeError:  # Apple's GPUs have no float64
        return value.to(torch.float32)


def _checked(reducer: Any) -> Reducer | Mapping[str, Reducer]:
    for given in reducer.values() if isinstance(reducer, Mapping) else [reducer]:
        if not isinstance(given, Reducer):
            raise UsageError(
                f"evaluation_reducer: {given!r} is not a Reducer; return one of {', '.join(map(str, Reducer))}, or a "
                f"dict with one for each metric (pass functions to context.wrap_reducer)"
            )
    return reducer  # type: ignore[no-any-return]


def _listed(names: Iterable[Any]) -> list[str]:
    return sorted(map(str, names))


class MetricsLog:
    """The trial's metrics file; rank 0 only.

    Writing raises Overtaken once a later attempt has begun, because that attempt's gang reports the same batches.
    """

    def __init__(self, trial: TrialFolder, attempt: int) -> None:
        self._path = trial.metrics
        self._groups = trial.groups
        self._attempt = attempt
        self._journal = Journal(trial.journal)
        self._journal_bytes = 0
        """The journal's size when it was last read; as it only grows, an equal size means no new entries."""

    def begin_at(self, *, trained: int, validated: int) -> None:
        """Record that training begins at a checkpoint: earlier reports beyond these batches become void."""
        self._append({"kind": BEGINS, "trained": trained, "validated": validated})

    def validations(self, metric: str) -> dict[int, float]:
        """Return the value of `metric` at each past validation, by the number of batches trained."""
        return validations(self._path, metric)

    def report(self, kind: str, steps: int, total: int | None, metrics: Mapping[str, Any], **facts: float) -> None:
        """Append a report. `kind`: training or validation; `total`: batches of the whole trial, None if unknown;
        `facts`: more fields.

        Values that JSON cannot represent become null.
        """
        self.report_all([{"kind": kind, "steps": steps, "total": total, "metrics": spelled(metrics), **facts}])

    def report_all(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Append reports with one write. Their metrics are as JSON can represent them; see `spelled`."""
        self._append(*records)

    def report_group(self, group: str, steps: int, metrics: Mapping[str, Any]) -> None:
        """Append a report of a group that is neither training nor validation, to a file of its own."""
        self._insist_on_last_attempt()
        record = {"group": group, "steps": steps, "metrics": spelled(metrics)}
        append_lines(self._groups, [self._stamped(record)], durable=False)

    def saved(self, steps: int, checkpoint: Path) -> None:
        """Take note of a committed checkpoint; does nothing here."""

    def end(self, kind: str, deadline: float | None = None) -> None:
        """Take note of the end of training; does nothing here."""

    def flush(self) -> None:
        """Flush the reports to disk. Call before a checkpoint is committed: a resumed run does not repeat them."""
        flush_file(self._path)

    def _append(self, *records: Mapping[str, Any]) -> None:
        self._insist_on_last_attempt()
        append_lines(self._path, [self._stamped(record) for record in records], durable=False)

    def _stamped(self, record: Mapping[str, Any]) -> dict[str, Any]:
        return {**record, "attempt": self._attempt, "time": record.get("time", time.time())}

    def _insist_on_last_attempt(self) -> None:
        # Without a job there is no journal, and no other attempt that could write.
        with suppress(FileNotFoundError):
            size = self._journal.path.stat().st_size
            if size != self._journal_bytes:
                self._journal.insist_on_last(self._attempt)
                self._journal_bytes = size


def spelled(value: Any) -> Any:
    """Return `value` for JSON: upstream's words for NaN and infinities, lists for arrays, None for other objects."""
    if isinstance(value, float):
        return as_written(float(value))
    if isinstance(value, (str, int, type(None))):
        return value
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return spelled(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): spelled(content) for key, content in value.items()}
    if isinstance(value, (list, tuple)):
        return [spelled(content) for content in value]
    return None
