"""What `register` takes: one object, or several in a tuple or list, which come back the way they went in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpc_det.errors import shown
from hpc_det.sgd.operator.errors import BadArgument, BadModel

_STATE = ("state_dict", "load_state_dict")
NEEDED_METHODS = {"optimizers": ("step", "zero_grad", *_STATE), "schedulers": ("step", *_STATE)}
"""Any object that has these: apex and others have optimizers that are no torch.optim.Optimizer."""


def as_list(given: Any) -> list[Any]:
    """Only tuples and lists are several: nn.Sequential, and an optimizer that can be iterated, are one object."""
    return list(given) if isinstance(given, (tuple, list)) else [given]


def shaped(handled: Sequence[Any], given: Any) -> Any:
    """As `given` was: alone, in a tuple or in a list."""
    if isinstance(given, (tuple, list)):
        return list(handled) if isinstance(given, list) else tuple(handled)
    return handled[0]


def unwrapped(model: nn.Module) -> nn.Module:
    """Of a DistributedDataParallel of the user's own."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def check(models: Any, optimizers: Any, schedulers: Any, scheduler_step_freq: str | None, **options: Any) -> None:
    """Raises BadModel, an AssertionError, for no nn.Module; BadArgument, a ValueError, for all else."""
    if wrong := [f"register: models has {shown(model)}; use nn.Module" for model in _no_modules(models)]:
        raise BadModel(wrong)
    problems = [*_lacks("optimizers", optimizers), *_lacks("schedulers", schedulers)]
    if schedulers is not None and scheduler_step_freq is None:
        problems.append(
            "register: schedulers are given, and scheduler_step_freq is None; "
            "give TorchTrainer scheduler_step_freq='batch', 'epoch' or 'manual'"
        )
    problems += [
        f"register: {name} is {shown(value)}; use a dict"
        for name, value in options.items()
        if not isinstance(value, (dict, type(None)))
    ]
    if problems:
        raise BadArgument(problems)


def _no_modules(models: Any) -> Iterable[Any]:
    return (model for model in as_list(models) if not isinstance(model, nn.Module))


def _lacks(name: str, given: Any) -> Iterable[str]:
    for one in as_list(given) if given is not None else ():
        if missing := [method for method in NEEDED_METHODS[name] if not callable(getattr(one, method, None))]:
            yield f"register: {name} has {shown(one)} without {', '.join(missing)}"
