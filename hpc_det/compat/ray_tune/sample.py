"""`ray.tune.sample`: ranges of hyperparameters, with the names of Ray's arguments."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from typing import Any

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
    """Return a float between the bounds that is rounded to a multiple of `q`, drawn uniformly."""
    return sample_from(lambda: _rounded(random.uniform(lower, upper), q))


def qloguniform(lower: float, upper: float, q: float, base: float = 10) -> Drawn:
    """Return a float between the bounds that is rounded to a multiple of `q`, whose logarithm is uniform."""
    return sample_from(lambda: _rounded(_log_drawn(lower, upper), q))


def lograndint(lower: int, upper: int, base: float = 10) -> Drawn:
    """Return an integer from `lower` to below `upper` whose logarithm is uniform."""
    return sample_from(lambda: int(_log_drawn(lower, upper)))


def qrandint(lower: int, upper: int, q: int = 1) -> Drawn:
    """Return an integer between the bounds, the upper one included, that is rounded to a multiple of `q`."""
    return sample_from(lambda: int(_rounded(random.uniform(lower, upper), q)))


def qlograndint(lower: int, upper: int, q: int, base: float = 10) -> Drawn:
    """Return an integer between the bounds that is rounded to a multiple of `q`, whose logarithm is uniform."""
    return sample_from(lambda: int(_rounded(_log_drawn(lower, upper), q)))


def randn(mean: float = 0.0, sd: float = 1.0) -> Drawn:
    """Return a float that is drawn from a normal distribution."""
    return sample_from(lambda: random.gauss(mean, sd))


def qrandn(mean: float, sd: float, q: float) -> Drawn:
    """Return a float that is drawn from a normal distribution, and rounded to a multiple of `q`."""
    return sample_from(lambda: _rounded(random.gauss(mean, sd), q))


def _rounded(value: float, q: float) -> float:
    return round(value / q) * q


def _log_drawn(lower: float, upper: float) -> float:
    # the base does not change the distribution
    return math.exp(random.uniform(math.log(lower), math.log(upper)))
