"""Metrics that are not means over batches: collected on every rank, reduced on rank 0, sent to all ranks."""

from __future__ import annotations

import contextlib
import copy
import inspect
import warnings
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch

from hpc_det.checkpoint.content import not_loadable
from hpc_det.distributed.collectives import Distributed
from hpc_det.distributed.metrics import plain
from hpc_det.errors import HpcDetError, UsageError


class MetricReducer(ABC):
    """The base class of metrics that are computed from many batches of all ranks, such as the area under a curve.

    Subclass it and pass an instance to `context.wrap_reducer`. The subclass also defines the method by which the trial
    adds values on each rank, called `update` by convention.
    """

    @abstractmethod
    def reset(self) -> None:
        """Delete all collected values. Called at the start, after each training report and before each validation."""

    @abstractmethod
    def per_slot_reduce(self) -> Any:
        """Return this rank's contribution to `cross_slot_reduce`: any object that can be pickled.

        Tensors in nested dicts, lists and tuples are detached and moved to the CPU before they are sent to rank 0.
        """

    @abstractmethod
    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> Any:
        """Return the metric, or a dict of metrics if `wrap_reducer` was called without a name. Called on rank 0 only.

        Scalars (numbers, and tensors or arrays of one element) are reported as floats, other values as they are.

        Args:
            per_slot_metrics: The return values of `per_slot_reduce` of all ranks, in rank order. After a resume on
                another number of ranks, the first training report has further entries: one for each rank of the gang
                that saved the checkpoint, with the values that it had collected since its last report.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the collected values for a checkpoint; by default all attributes of this object.

        The default leaves out attributes that a checkpoint cannot contain, and warns about them.
        """
        return _held({name: _plain_container(value) for name, value in vars(self).items()}, type(self).__name__)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a value that `state_dict` returned; by default, set the attributes of this object.

        Args:
            state_dict: The return value of `state_dict`.
        """
        for name, value in state_dict.items():
            setattr(self, name, _like(getattr(self, name, None), value))


class FunctionReducer(MetricReducer):
    """A reducer that passes the list of all updates to a function, as if one rank had seen all batches in order."""

    def __init__(self, function: Callable[[list[Any]], Any]) -> None:
        """Store the function, which returns the metric for the list of all updates."""
        self._function = function
        self._updates: list[Any] = []

    def update(self, value: Any) -> None:
        """Add the value of one batch; call it once per batch on every rank. Tensors in it are detached.

        Args:
            value: Any object that can be pickled.
        """
        self._updates.append(_detached(value))

    def reset(self) -> None:
        self._updates = []

    def per_slot_reduce(self) -> list[Any]:
        return self._updates

    def cross_slot_reduce(self, per_slot_metrics: list[list[Any]]) -> Any:
        # The n-th updates of all ranks belong to the n-th global batch: so round by round is the order of the data.
        # In a validation some ranks may have one batch less.
        nothing = object()
        rounds = zip_longest(*per_slot_metrics, fillvalue=nothing)
        return self._function([update for each in rounds for update in each if update is not nothing])

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self._updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._updates = list(state_dict["updates"])


class Reducers:
    """The wrapped reducers of a trial, in the order of wrapping."""

    def __init__(self) -> None:
        self._wrapped: list[_Wrapped] = []

    def wrap(
        self,
        reducer: MetricReducer | Callable[[list[Any]], Any],
        name: str | None = None,
        for_training: bool = True,
        for_validation: bool = True,
    ) -> MetricReducer:
        """Register a reducer and return it; a function is wrapped in a FunctionReducer.

        Raises UsageError for any other object, for a reducer that is wrapped already, for a name that another reducer
        of training or of validation has, and if both `for_training` and `for_validation` are False.
        """
        if inspect.isclass(reducer) or not (isinstance(reducer, MetricReducer) or callable(reducer)):
            raise UsageError(
                f"wrap_reducer: {reducer!r} is neither a function nor an instance of a subclass of MetricReducer; "
                f"pass one of these"
            )
        if any(reducer is known.reducer for known in self._wrapped):
            raise UsageError(f"wrap_reducer: this {type(reducer).__name__} is wrapped already; wrap it once")
        if not for_training and not for_validation:
            raise UsageError(
                f"wrap_reducer: {_called(reducer, name)} is used neither for training nor for validation; leave out "
                f"for_training=False or for_validation=False"
            )
        self._check_name(name, for_training, for_validation)
        made = reducer if isinstance(reducer, MetricReducer) else FunctionReducer(reducer)
        self._wrapped.append(_Wrapped(made, name, for_training, for_validation, _called(reducer, name)))
        return made

    def _check_name(self, name: str | None, for_training: bool, for_validation: bool) -> None:
        """Raise UsageError if another reducer reports the metric `name` in training or in validation."""
        for known in self._wrapped:
            meet = (known.for_training and for_training) or (known.for_validation and for_validation)
            if name is not None and name == known.name and meet:
                raise UsageError(
                    f"wrap_reducer: the name {name!r} is already used by another reducer ({known.called}); give each "
                    f"reducer a different name"
                )

    @property
    def wrapped(self) -> list[MetricReducer]:
        """The reducers, in the order of wrapping."""
        return [each.reducer for each in self._wrapped]

    def reset(self, *, training: bool) -> None:
        """Reset the reducers of training, or those of validation."""
        for each in self._serving(training=training):
            each.reducer.reset()
            if training:
                each.carried = []

    def reduce(self, distributed: Distributed, *, training: bool) -> dict[str, Any]:
        """Return the metrics of the reducers by name, the same on every rank; scalars are floats.

        Collective, unless no reducers are wrapped for this. If a reducer raises an exception on one rank, that rank
        raises the same exception, and all other ranks raise an HpcDetError with its text.
        """
        serving = self._serving(training=training)
        if not serving:
            return {}
        # Failures travel with the values: a rank that raised before the gather would leave the others blocked in it.
        slots, failure = _attempt(lambda: [each.slots(training=training) for each in serving])
        gathered = distributed.gather((slots, _for_others(failure, distributed.rank)))
        metrics, failed = None, None
        if gathered is not None:
            # All ranks raise the failure of the lowest rank, so that their logs agree.
            failed = next((failed for _, failed in gathered if failed), None)
            if failed is None:
                metrics, failure = _attempt(lambda: _metrics(serving, [slots for slots, _ in gathered]))
                failed = _for_others(failure, distributed.rank)
        metrics, failed = distributed.broadcast((metrics, failed))
        if failed:
            raise failure or failed
        return metrics  # type: ignore[no-any-return]

    def state(self) -> list[dict[str, Any]]:
        """Return the state of each reducer of training: the values collected since the last report."""
        return [each.state() for each in self._serving(training=True)]

    def restore(self, *states: Sequence[Mapping[str, Any]]) -> None:
        """Restore return values of `state`: that of this rank, or those of all ranks of a gang of another size.

        In the second case the values of each of those ranks are kept aside, and added to the next training report as if
        they came from additional ranks. Raises HpcDetError if the number of reducers differs from that of the trial.
        """
        serving = self._serving(training=True)
        for state in states:
            if len(state) != len(serving):
                raise HpcDetError(
                    f"the checkpoint contains {len(state)} reducers for training, but the trial wraps {len(serving)}"
                )
            # Each reducer loads the ranks' states in turn, and their values are moved to `carried` in between: there is
            # no general way to merge the states themselves.
            for each, own in zip(serving, state, strict=True):
                each.restore(own)
                if len(states) > 1:
                    each.carry()

    @contextlib.contextmanager
    def set_aside(self, shared: Iterable[object] = (), *, in_training_only: bool = True) -> Iterator[None]:
        """Restore the reducers of both training and validation after the block, so that a validation in the middle of
        training does not change the values that they have collected from training batches.

        `shared` are objects that reducers may refer to and that must not be copied, such as models. With
        `in_training_only=False` the reducers of validation alone are restored, too.
        """
        serving = (each for each in self._wrapped if each.for_validation)
        both = [each.reducer for each in serving if each.for_training or not in_training_only]
        known = {id(each): each for each in shared}
        attributes = [{name: _copied(value, known) for name, value in vars(reducer).items()} for reducer in both]
        try:
            yield
        finally:
            for reducer, former in zip(both, attributes, strict=True):
                # Attributes that the validation added are deleted, too.
                vars(reducer).clear()
                vars(reducer).update(former)

    def _serving(self, *, training: bool) -> list[_Wrapped]:
        """Return the reducers of training, or those of validation."""
        return [each for each in self._wrapped if (each.for_training if training else each.for_validation)]


@dataclass
class _Wrapped:
    """A wrapped reducer with the arguments of `wrap_reducer`."""

    reducer: MetricReducer
    name: str | None
    for_training: bool
    for_validation: bool
    called: str
    """Text that names the reducer in messages."""
    carried: list[Any] = field(default_factory=list)
    """Contributions to the next training report of ranks of the gang that saved the checkpoint, if its size differs."""

    def slots(self, *, training: bool) -> list[Any]:
        """Return the contributions of this rank, in training after the carried ones."""
        own = _detached(self.reducer.per_slot_reduce(), torch.device("cpu"))
        return [*self.carried, own] if training else [own]

    def metrics(self, slots: list[Any]) -> dict[str, Any]:
        """Return the reduced metrics by name.

        Raises UsageError if the reducer has a name and returned a dict, or has no name and returned something else.
        """
        result = self.reducer.cross_slot_reduce(slots)
        if self.name is None:
            if not isinstance(result, Mapping):
                raise UsageError(
                    f"{self.called}: has no name, but cross_slot_reduce returned {type(result).__name__}; return a "
                    f"dict of metrics, or call wrap_reducer with name=..."
                )
            return {name: plain(value) for name, value in result.items()}
        if isinstance(result, Mapping):
            raise UsageError(
                f"{self.called}: has a name, and cross_slot_reduce returned a dict of {sorted(map(str, result))}; "
                f"return one metric, or call wrap_reducer without a name"
            )
        return {self.name: plain(result)}

    def state(self) -> dict[str, Any]:
        return _held({"updates": _detached(self.reducer.state_dict()), "carried": self.carried}, self.called)

    def restore(self, state: Mapping[str, Any]) -> None:
        if "updates" in state:
            self.reducer.load_state_dict(state["updates"])
        self.carried += state.get("carried", [])

    def carry(self) -> None:
        """Move the restored values of a rank from the reducer to `carried`."""
        # A copy, since `reset` may clear the same object in place.
        self.carried.append(copy.deepcopy(_detached(self.reducer.per_slot_reduce(), torch.device("cpu"))))
        self.reducer.reset()


def _metrics(wrapped: list[_Wrapped], by_rank: list[list[list[Any]]]) -> dict[str, Any]:
    """Return the metrics of all reducers from the contributions by rank, reducer and slot."""
    metrics: dict[str, Any] = {}
    for each, slots in zip(wrapped, zip(*by_rank, strict=True), strict=True):
        metrics = joined(metrics, each.metrics([slot for rank in slots for slot in rank]), "another reducer")
    return metrics


def joined(metrics: Mapping[str, Any], of_reducers: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return both dicts merged. Raises UsageError for names in both; `source` names the origin of `metrics`."""
    if both := sorted(metrics.keys() & of_reducers.keys()):
        raise UsageError(
            f"wrap_reducer: {source} and a reducer both return the metric {', '.join(map(repr, both))}; rename one of "
            f"them, or leave one out"
        )
    return {**metrics, **of_reducers}


def _called(reducer: Any, name: str | None) -> str:
    """Return the text that names a reducer in messages."""
    kind = type(reducer).__name__ if isinstance(reducer, MetricReducer) else getattr(reducer, "__name__", "function")
    return f"reducer {kind}" if name is None else f"reducer {kind} for metric '{name}'"


# --- failures


def _attempt(function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Return the function's result and None, or None and the exception that it raised."""
    try:
        return function(), None
    except Exception as failure:
        return None, failure


def _for_others(failure: Exception | None, rank: int) -> HpcDetError | None:
    """Return the failure as an HpcDetError that can be sent to the other ranks, or None if there is none."""
    # Only the text is sent, since a user's exception may not be picklable.
    if failure is None or isinstance(failure, HpcDetError):
        return failure
    return HpcDetError(f"a metric reducer failed on rank {rank}: {type(failure).__name__}: {failure}")


# --- values


def _plain_container(value: Any) -> Any:
    """Return a deque as a list and a defaultdict as a dict, for a checkpoint; `_like` reverses it."""
    return list(value) if isinstance(value, deque) else dict(value) if isinstance(value, defaultdict) else value


def _like(known: Any, value: Any) -> Any:
    """Return `value` on the device, or in the container type, of the value `known` that it replaces."""
    if isinstance(known, torch.Tensor) and isinstance(value, torch.Tensor):
        return value.to(known.device)
    if isinstance(known, deque):
        return deque(value, known.maxlen)
    if isinstance(known, defaultdict):
        return defaultdict(known.default_factory, value)
    return value


def _detached(value: Any, device: torch.device | None = None) -> Any:
    """Return `value` with all tensors in dicts, lists and tuples detached, and moved to `device` if given."""
    if isinstance(value, torch.Tensor):
        return value.detach() if device is None else value.detach().to(device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_detached(each, device) for each in value))
    if type(value) in (list, tuple):
        return type(value)(_detached(each, device) for each in value)
    if type(value) is dict:
        return {key: _detached(each, device) for key, each in value.items()}
    return value


def _copied(value: Any, known: Mapping[int, object]) -> Any:
    """Return a deep copy of `value`, in which the `known` objects (by their id()) are shared, not copied.

    Return `value` itself if it cannot be copied.
    """
    try:
        # The memo of deepcopy maps ids to copies: known objects are entered as copies of themselves.
        return copy.deepcopy(value if id(value) in known else _detached(value), {**known})
    except Exception:
        return value  # such as a generator or a lock: then `reset` and updates change the original


def _held(state: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """Return the entries of `state` that a checkpoint can contain; warn about the others."""
    held = {name: value for name, value in state.items() if not any(not_loadable(value, name))}
    if left_out := sorted(state.keys() - held.keys()):
        warnings.warn(
            f"{owner}: a checkpoint cannot contain its {', '.join(left_out)}, so a resume between two reports starts "
            f"without these values; use tensors, arrays, numbers, strings, lists and dicts, or implement state_dict "
            f"and load_state_dict with values of these types",
            stacklevel=2,
        )
    return held
