"""`ray.tune.sample`: ranges of hyperparameters, with the names of Ray's arguments."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from typing import Any

from hpc_det.errors import UsageError
from hpc_det.sgd import tune
from hpc_det.sgd.tune.draws import Drawn, Tree

sample_from = tune.sample_from
"""A value that a function draws for each trial."""


def function(func: Callable[..., Any]) -> Drawn:
    """Return `sample_from(func)`; an older name for it."""
    return sample_from(func)


def grid_search(values: Iterable[Any]) -> Tree:
    """Return a grid: each value is tried in combination with each value of all other grids."""
    return tune.grid_search(values)


def choice(categories: Iterable[Any]) -> Tree:
    """Return a range from which one of the values is drawn."""
    return tune.choice(categories)


def uniform(lower: float, upper: float) -> Tree:
    """Return a range from which a float is drawn uniformly."""
    return tune.uniform(lower, upper)


def loguniform(lower: float, upper: float, base: float = 10) -> Tree:
    """Return a range from which a float is drawn whose logarithm is uniform."""
    return tune.loguniform(lower, upper, base)


def randint(lower: int, upper: int) -> Tree:
    """Return a range from which an integer from `lower` to below `upper` is drawn."""
    return tune.randint(lower, upper)


def quniform(lower: float, upper: float, q: float) -> Drawn:
    """Return a float between the bounds that is rounded to a multiple of `q`, drawn uniformly.

    Raises UsageError unless the bounds are multiples of `q`.
    """
    low, high = _multiples("quniform", lower, upper, q)
    return sample_from(lambda: _rounded(random.uniform(lower, upper), q, low, high))


def qloguniform(lower: float, upper: float, q: float, base: float = 10) -> Drawn:
    """Return a float between the bounds that is rounded to a multiple of `q`, whose logarithm is uniform.

    Raises UsageError unless the bounds are above 0 and multiples of `q`.
    """
    low, high = _multiples("qloguniform", lower, upper, q, is_log=True)
    return sample_from(lambda: _rounded(_log_drawn(lower, upper), q, low, high))


def lograndint(lower: int, upper: int, base: float = 10) -> Drawn:
    """Return an integer from `lower` to below `upper` whose logarithm is uniform.

    Raises UsageError unless 0 < lower < upper.
    """
    _check("lograndint", lower, upper - 1, is_log=True)
    return sample_from(lambda: min(max(int(_log_drawn(lower, upper)), lower), upper - 1))


def qrandint(lower: int, upper: int, q: int = 1) -> Drawn:
    """Return an integer between the bounds, the upper one included, that is rounded to a multiple of `q`.

    Raises UsageError unless there is a multiple of `q` between the bounds.
    """
    low, high = _multiples("qrandint", lower, upper, q, are_bounds=False)
    return sample_from(lambda: int(_rounded(random.randint(lower, upper), q, low, high)))


def qlograndint(lower: int, upper: int, q: int, base: float = 10) -> Drawn:
    """Return an integer between the bounds that is rounded to a multiple of `q`, whose logarithm is uniform.

    Raises UsageError unless the bounds are above 0, with a multiple of `q` between them.
    """
    low, high = _multiples("qlograndint", lower, upper, q, is_log=True, are_bounds=False)
    return sample_from(lambda: int(_rounded(_log_drawn(lower, upper), q, low, high)))


def randn(mean: float = 0.0, sd: float = 1.0) -> Drawn:
    """Return a float that is drawn from a normal distribution."""
    return sample_from(lambda: random.gauss(mean, sd))


def qrandn(mean: float, sd: float, q: float) -> Drawn:
    """Return a float that is drawn from a normal distribution, and rounded to a multiple of `q`.

    Raises UsageError unless `q` is above 0.
    """
    _check_step("qrandn", q)
    return sample_from(lambda: _rounded(random.gauss(mean, sd), q))


def _multiples(
    name: str, lower: float, upper: float, q: float, *, is_log: bool = False, are_bounds: bool = True
) -> tuple[float, float]:
    """Return the smallest and the largest multiple of `q` between the bounds.

    `are_bounds`: the bounds must be multiples themselves, as in Ray, which checks this for floats only.
    """
    _check(name, lower, upper, is_log=is_log)
    _check_step(name, q)
    for argument, bound in {"lower": lower, "upper": upper}.items() if are_bounds else ():
        if not math.isclose(bound / q, round(bound / q)):
            raise UsageError(f"{name}: {argument} is {bound}; expected a multiple of q, which is {q}")
    low, high = (lower, upper) if are_bounds else (math.ceil(lower / q) * q, math.floor(upper / q) * q)
    if low > high:
        raise UsageError(f"{name}: no multiple of q, which is {q}, is between lower {lower} and upper {upper}")
    return low, high


def _check(name: str, lower: float, upper: float, *, is_log: bool) -> None:
    """Check the bounds, both of which are included. Raises UsageError."""
    if is_log and lower <= 0:
        raise UsageError(f"{name}: lower is {lower}; expected a value above 0, not its logarithm")
    if lower > upper:
        raise UsageError(f"{name}: no value is between lower {lower} and upper {upper}")


def _check_step(name: str, q: float) -> None:
    if q <= 0:
        raise UsageError(f"{name}: q is {q}; expected a value above 0")


def _rounded(value: float, q: float, low: float = -math.inf, high: float = math.inf) -> float:
    return min(max(round(value / q) * q, low), high)


def _log_drawn(lower: float, upper: float) -> float:
    # the base does not change the distribution
    return math.exp(random.uniform(math.log(lower), math.log(upper)))
