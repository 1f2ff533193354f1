"""Hyperparameters that functions draw: those of sample_from, and the mutations of pbt."""

from __future__ import annotations

import inspect
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

from hpc_det.config.checks import space_problems
from hpc_det.errors import UsageError, shown
from hpc_det.search.population import DRAWN
from hpc_det.search.sample import is_nested

Tree = dict[str, Any]

MUTATION_DRAWS = 1000
"""Number of values that are drawn with a function of `pbt(mutations=...)`, for the whole search."""


@dataclass(frozen=True)
class Drawn:
    """A hyperparameter whose values a function draws; `sample_from` returns it."""

    function: Callable[..., Any]
    """Called with nothing, or with the trial's `Spec` if it has a parameter without a default."""

    def value(self, config: Mapping[str, Any]) -> Any:
        """Return a value for a trial whose other hyperparameters are `config`."""
        return self.function(Spec(config=Spec(config))) if _takes_one(self.function) else self.function()


def _takes_one(function: Callable[..., Any]) -> bool:
    """Return whether the function has a parameter without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # functions of C extensions, such as numpy.random.uniform, may have no signature
        return False
    named = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return any(each.default is Parameter.empty and each.kind in named for each in parameters)


class Spec(dict[str, Any]):
    """A dict whose entries are attributes as well, as in `sample_from(lambda spec: spec.config.lr * 2)`."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"no hyperparameter {name!r} has a value yet; known: {', '.join(map(repr, self))}")
        value = self[name]
        return Spec(value) if type(value) is dict else value


def sample_from(function: Callable[..., Any]) -> Drawn:
    """Return a hyperparameter whose values a function draws, one for each trial, in the process of `tune_run`.

    Args:
        function: Returns a number, a text or another value that JSON can represent. It is called with nothing, or, if
            it has a parameter without a default, with an object whose attribute `config` has the trial's other
            hyperparameters: fixed ones, those with ranges, and those of functions before this one. It should draw with
            the modules `random` or `numpy.random`, which `tune_run` seeds.
    """
    return Drawn(function)


def drawn_by(functions: Tree, config: Tree, path: str = "config") -> Tree:
    """Return the values that functions draw for one trial with these other hyperparameters.

    A function of a nested part of the config sees that part as `spec.config`. Raises UsageError for a value that JSON
    cannot represent.
    """
    known, values = deepcopy(config), {}
    for name, function in functions.items():
        is_drawn = isinstance(function, Drawn)
        value = function.value(known) if is_drawn else drawn_by(function, known.get(name, {}), f"{path}.{name}")
        value = value.item() if hasattr(value, "item") else value  # a number of numpy or a tensor
        if is_drawn and not is_plain(value):
            raise UsageError(
                f"{path}.{name}: its function returned {shown(value)}, which cannot be represented in JSON; return a "
                f"number or a text"
            )
        known[name] = values[name] = value
    return values


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed `random` and `numpy.random`, if it is imported, in the `with` block, and restore their states after it."""
    numpy: Any = sys.modules.get("numpy")
    states = random.getstate(), numpy and numpy.random.get_state()
    random.seed(seed)
    if numpy:
        numpy.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(states[0])
        if numpy:
            numpy.random.set_state(states[1])


def mutations_of(given: Mapping[str, Any], seed: int) -> Tree:
    """Return the space of the argument `mutations` of pbt. Raises UsageError with every problem in it."""
    with seeded(seed):
        space = {name: _mutation(value) for name, value in given.items()}
    ranges = {name: spec for name, spec in space.items() if is_nested(spec) or spec["type"] != DRAWN}
    if problems := list(space_problems(ranges, "random", "mutations")):
        raise UsageError([f"{problem.path}: {problem.what}; {problem.remedy}" for problem in problems])
    return space


def _mutation(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return {"type": "categorical", "vals": list(value)}
    if isinstance(value, Mapping):
        return dict(value) if "type" in value else {name: _mutation(inner) for name, inner in value.items()}
    function = value if isinstance(value, Drawn) else Drawn(value) if callable(value) else None
    if function is None:
        raise UsageError(f"mutations: got {shown(value)}; expected a range, a list or a function without arguments")
    return {"type": DRAWN, "vals": [drawn_by({"": function}, {}, "mutations")[""] for _ in range(MUTATION_DRAWS)]}


def is_plain(value: Any) -> bool:
    """Return whether the value is the same after it was written to JSON and read again."""
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError):
        return False
