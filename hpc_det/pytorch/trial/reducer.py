"""Metrics of a trial's own making: collected on every rank, reduced on rank 0, known to all."""

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
    """A metric over many batches and all ranks, such as the area under a curve. Wrap an instance in `wrap_reducer`.

    The trial feeds it by a method of its own, `update` by custom. Tensors go from rank to rank on the CPU.
    """

    @abstractmethod
    def reset(self) -> None:
        """Forget all updates: before each stretch of training that is reported, and before each validation."""

    @abstractmethod
    def per_slot_reduce(self) -> Any:
        """What `cross_slot_reduce` needs of this rank: anything that pickle takes."""

    @abstractmethod
    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> Any:
        """On rank 0: the metric, or a dict of metrics where no name was given, from all ranks' parts in rank order."""

    def state_dict(self) -> dict[str, Any]:
        """The updates so far: the attributes of this object, as far as a checkpoint can hold them."""
        return _held({name: _plain_container(value) for name, value in vars(self).items()}, type(self).__name__)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, value in state_dict.items():
            setattr(self, name, _like(getattr(self, name, None), value))


class FunctionReducer(MetricReducer):
    """The form for a plain function: it gets the list of all updates, as if one rank had seen all batches in order."""

    def __init__(self, function: Callable[[list[Any]], Any]) -> None:
        self._function = function
        self._updates: list[Any] = []

    def update(self, value: Any) -> None:
        """Once a batch, on every rank."""
        self._updates.append(_detached(value))

    def reset(self) -> None:
        self._updates = []

    def per_slot_reduce(self) -> list[Any]:
        return self._updates

    def cross_slot_reduce(self, per_slot_metrics: list[list[Any]]) -> Any:
        nothing = object()
        rounds = zip_longest(*per_slot_metrics, fillvalue=nothing)
        return self._function([update for each in rounds for update in each if update is not nothing])

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self._updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._updates = list(state_dict["updates"])


class Reducers:
    """The wrapped reducers of a trial, in that order."""

    def __init__(self) -> None:
        self._wrapped: list[_Wrapped] = []

    def wrap(
        self,
        reducer: MetricReducer | Callable[[list[Any]], Any],
        name: str | None = None,
        for_training: bool = True,
        for_validation: bool = True,
    ) -> MetricReducer:
        """The reducer, made from the function if it is one.

        Raises UsageError for what is neither, what is wrapped already, and what serves nothing.
        """
        if inspect.isclass(reducer) or not (isinstance(reducer, MetricReducer) or callable(reducer)):
            raise UsageError(
                f"wrap_reducer: {reducer!r} is neither a function nor an instance of a subclass of MetricReducer; "
                f"give one of those"
            )
        if any(reducer is known.reducer for known in self._wrapped):
            raise UsageError(f"wrap_reducer: this {type(reducer).__name__} is wrapped already; wrap it once")
        if not for_training and not for_validation:
            raise UsageError(
                f"wrap_reducer: {_called(reducer, name)} is neither for training nor for validation; leave out "
                f"for_training=False or for_validation=False"
            )
        self._check_name(name, for_training, for_validation)
        made = reducer if isinstance(reducer, MetricReducer) else FunctionReducer(reducer)
        self._wrapped.append(_Wrapped(made, name, for_training, for_validation, _called(reducer, name)))
        return made

    def _check_name(self, name: str | None, for_training: bool, for_validation: bool) -> None:
        for known in self._wrapped:
            meet = (known.for_training and for_training) or (known.for_validation and for_validation)
            if name is not None and name == known.name and meet:
                raise UsageError(
                    f"wrap_reducer: the metric {name!r} is that of another reducer already ({known.called}); give each "
                    f"a name of its own"
                )

    @property
    def wrapped(self) -> list[MetricReducer]:
        return [each.reducer for each in self._wrapped]

    def reset(self, *, training: bool) -> None:
        for each in self._serving(training=training):
            each.reducer.reset()
            if training:
                each.carried = []

    def reduce(self, distributed: Distributed, *, training: bool) -> dict[str, Any]:
        """Collective, unless there are none: metrics by name, the same on every rank; numbers are floats.

        What a reducer raises on one rank is raised there, and an HpcDetError with its words on all others.
        """
        serving = self._serving(training=training)
        if not serving:
            return {}
        slots, failure = _attempt(lambda: [each.slots(training=training) for each in serving])
        gathered = distributed.gather((slots, _for_others(failure, distributed.rank)))
        metrics, failed = None, None
        if gathered is not None:
            failed = next((failed for _, failed in gathered if failed), None)
            if failed is None:
                metrics, failure = _attempt(lambda: _metrics(serving, [slots for slots, _ in gathered]))
                failed = _for_others(failure, distributed.rank)
        metrics, failed = distributed.broadcast((metrics, failed))
        if failed:
            raise failure or failed
        return metrics  # type: ignore[no-any-return]

    def state(self) -> list[dict[str, Any]]:
        """The open stretch of training."""
        return [each.state() for each in self._serving(training=True)]

    def restore(self, *states: Sequence[Mapping[str, Any]]) -> None:
        """As saved by this rank; or by several, of a gang of another size: each then counts as one more slot.

        Raises HpcDetError where the trial wraps another number of reducers than it did.
        """
        serving = self._serving(training=True)
        for state in states:
            if len(state) != len(serving):
                raise HpcDetError(
                    f"the checkpoint holds {len(state)} reducers for training, the trial wraps {len(serving)}"
                )
            for each, own in zip(serving, state, strict=True):
                each.restore(own)
                if len(states) > 1:
                    each.carry()

    @contextlib.contextmanager
    def set_aside(self, shared: Iterable[object] = (), *, in_training_only: bool = True) -> Iterator[None]:
        """For a validation in the middle of training: what reducers that serve both have of training comes back.

        `shared`: what reducers may hold and training goes on to change, such as models. `in_training_only=False`: also
        what those that serve validation alone have of it.
        """
        serving = (each for each in self._wrapped if each.for_validation)
        both = [each.reducer for each in serving if each.for_training or not in_training_only]
        known = {id(each): each for each in shared}
        attributes = [{name: _copied(value, known) for name, value in vars(reducer).items()} for reducer in both]
        try:
            yield
        finally:
            for reducer, former in zip(both, attributes, strict=True):
                vars(reducer).clear()
                vars(reducer).update(former)

    def _serving(self, *, training: bool) -> list[_Wrapped]:
        return [each for each in self._wrapped if (each.for_training if training else each.for_validation)]


@dataclass
class _Wrapped:
    reducer: MetricReducer
    name: str | None
    for_training: bool
    for_validation: bool
    called: str
    carried: list[Any] = field(default_factory=list)
    """Parts of ranks that this gang no longer has, of the open stretch of training."""

    def slots(self, *, training: bool) -> list[Any]:
        own = _detached(self.reducer.per_slot_reduce(), torch.device("cpu"))
        return [*self.carried, own] if training else [own]

    def metrics(self, slots: list[Any]) -> dict[str, Any]:
        result = self.reducer.cross_slot_reduce(slots)
        if self.name is None:
            if not isinstance(result, Mapping):
                raise UsageError(
                    f"{self.called}: has no name and returned {type(result).__name__}; return a dict of metrics, or "
                    f"call wrap_reducer with name=..."
                )
            return {name: plain(value) for name, value in result.items()}
        if isinstance(result, Mapping):
            raise UsageError(
                f"{self.called}: has a name and returned a dict of {sorted(map(str, result))}; return one metric, or "
                f"call wrap_reducer without a name"
            )
        return {self.name: plain(result)}

    def state(self) -> dict[str, Any]:
        return _held({"updates": _detached(self.reducer.state_dict()), "carried": self.carried}, self.called)

    def restore(self, state: Mapping[str, Any]) -> None:
        if "updates" in state:
            self.reducer.load_state_dict(state["updates"])
        self.carried += state.get("carried", [])

    def carry(self) -> None:
        """A copy: `reset` may clear what the reducer has handed out."""
        self.carried.append(copy.deepcopy(_detached(self.reducer.per_slot_reduce(), torch.device("cpu"))))
        self.reducer.reset()


def _metrics(wrapped: list[_Wrapped], by_rank: list[list[list[Any]]]) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    for each, slots in zip(wrapped, zip(*by_rank, strict=True), strict=True):
        metrics = joined(metrics, each.metrics([slot for rank in slots for slot in rank]), "another reducer")
    return metrics


def joined(metrics: Mapping[str, Any], of_reducers: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Raises UsageError for a name that both have. `source`: of `metrics`."""
    if both := sorted(metrics.keys() & of_reducers.keys()):
        raise UsageError(
            f"wrap_reducer: {source} and a reducer both return the metric {', '.join(map(repr, both))}; rename one of "
            f"them, or leave one out"
        )
    return {**metrics, **of_reducers}


def _called(reducer: Any, name: str | None) -> str:
    kind = type(reducer).__name__ if isinstance(reducer, MetricReducer) else getattr(reducer, "__name__", "function")
    return f"reducer {kind}" if name is None else f"reducer {kind} for metric '{name}'"


# --- failures


def _attempt(function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """All ranks learn of a failure together: none waits for one that is gone."""
    try:
        return function(), None
    except Exception as failure:
        return None, failure


def _for_others(failure: Exception | None, rank: int) -> HpcDetError | None:
    """Words alone: an exception of the user's may not go through pickle."""
    if failure is None or isinstance(failure, HpcDetError):
        return failure
    return HpcDetError(f"a metric reducer failed on rank {rank}: {type(failure).__name__}: {failure}")


# --- values


def _plain_container(value: Any) -> Any:
    """As a checkpoint holds it; `_like` reverses it."""
    return list(value) if isinstance(value, deque) else dict(value) if isinstance(value, defaultdict) else value


def _like(known: Any, value: Any) -> Any:
    """`value` on the device, or in the kind of container, of what it replaces."""
    if isinstance(known, torch.Tensor) and isinstance(value, torch.Tensor):
        return value.to(known.device)
    if isinstance(known, deque):
        return deque(value, known.maxlen)
    if isinstance(known, defaultdict):
        return defaultdict(known.default_factory, value)
    return value


def _detached(value: Any, device: torch.device | None = None) -> Any:
    """With the tensors in dicts, lists and tuples cut from their graphs, and on `device` if given."""
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
    """Deep, but for what is `known` by its id(), so that `reset` may clear the original; what cannot be copied is not
    cleared by any.
    """
    try:
        return copy.deepcopy(value if id(value) in known else _detached(value), {**known})
    except Exception:
        return value


def _held(state: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """The part of `state` that a checkpoint can hold, with a warning that names the rest."""
    held = {name: value for name, value in state.items() if not any(not_loadable(value, name))}
    if left_out := sorted(state.keys() - held.keys()):
        warnings.warn(
            f"{owner}: a checkpoint cannot hold its {', '.join(left_out)}, so a resume in the middle starts without; "
            f"keep updates as tensors, arrays, numbers, texts, lists and dicts, or implement state_dict and "
            f"load_state_dict with such",
            stacklevel=2,
        )
    return held
