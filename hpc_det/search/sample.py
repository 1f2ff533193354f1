"""The hyperparameters and seeds of trials: drawn from ranges, taken from the points of a grid, or from a list."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import Any, Protocol

Space = Mapping[str, Any]
"""Hyperparameters by name: constants, ranges (mappings with a `type`) and nested mappings."""


@dataclass(frozen=True)
class Sample:
    """The hyperparameters, seed and source of one trial."""

    hparams: dict[str, Any]
    seed: int
    """Seed of the trial, 0 to 2**31 - 1."""
    source: int | None = None
    """The trial of the same search with whose latest weights this one starts; None: with its own initial weights."""


class Sampler(Protocol):
    """A source of samples. They depend only on the space and the experiment's seed."""

    @property
    def points(self) -> int | None:
        """The number of trials, if the space determines it, as a grid does; else None."""

    def sample(self, trial: int) -> Sample:
        """Return the sample of this trial, counted from 1: the same at each call, and a copy that the caller may
        change.
        """


def first_sample(hyperparameters: Space, experiment_seed: int) -> Sample:
    """Return the sample of the first or only trial."""
    return SpaceSampler(hyperparameters, experiment_seed).sample(1)


class _SeededSampler:
    """A sampler that draws the samples of trials in order from one stream of random numbers, and keeps them.

    The stream is that of Determined (master/pkg/searcher): the hyperparameters of a trial, 16 bytes for its id, its
    seed.
    """

    def __init__(self, experiment_seed: int) -> None:
        self._experiment_seed = experiment_seed
        self._samples: list[Sample] = []

    @cached_property
    def _draws(self) -> NumpyRandom:
        """The stream of random numbers."""
        # Created at the first sample only: seeding takes as long as everything else that a list of experiments needs.
        return NumpyRandom(self._experiment_seed)

    def sample(self, trial: int) -> Sample:
        assert trial >= 1, trial
        while len(self._samples) < trial:
            self._samples.append(self._next())
        return deepcopy(self._samples[trial - 1])

    def _next(self) -> Sample:
        hparams = self._hparams(len(self._samples) + 1)
        # Determined draws the 16 bytes of a trial's id here; skipping them keeps the stream identical.
        for _ in range(4):
            self._draws.uint32()
        return Sample(hparams, seed=self._draws.randrange(0, 2**31))

    def _hparams(self, trial: int) -> dict[str, Any]:
        """Return the hyperparameters of a trial. Called once per trial, in order, so it may draw random numbers."""
        raise NotImplementedError


class SpaceSampler(_SeededSampler):
    """A sampler that draws each value from its range."""

    points = None

    def __init__(self, hyperparameters: Space, experiment_seed: int) -> None:
        super().__init__(experiment_seed)
        self._space = hyperparameters

    def _hparams(self, trial: int) -> dict[str, Any]:
        return _drawn(self._space, self._draws)


class GridSampler(_SeededSampler):
    """A sampler whose trial k has the k-th point of the grid. Keys are sorted, and the last one changes fastest.

    Determined tries the points in the reverse order.
    """

    def __init__(self, hyperparameters: Space, experiment_seed: int) -> None:
        """Each int, double and log in `hyperparameters` must have a `count`."""
        super().__init__(experiment_seed)
        self._space = hyperparameters
        self._axes = [_count(spec) for spec in _leaves(hyperparameters)]
        self.points = math.prod(self._axes)

    def _hparams(self, trial: int) -> dict[str, Any]:
        assert trial <= self.points, (trial, self.points)
        rest, places = trial - 1, []
        for count in reversed(self._axes):
            rest, place = divmod(rest, count)
            places.append(place)
        return _at(self._space, reversed(places))


class PointsSampler(_SeededSampler):
    """A sampler whose trial k has the hyperparameters `points[k - 1]`, all of them constants."""

    def __init__(self, points: Sequence[Space], experiment_seed: int) -> None:
        super().__init__(experiment_seed)
        self._points = points
        self.points = len(points)

    def _hparams(self, trial: int) -> dict[str, Any]:
        return _at(self._points[trial - 1], repeat(0))


# --- random values


class _Draws(Protocol):
    """A source of random numbers; the range of `randrange` excludes `high`."""

    def uniform(self, low: float, high: float, /) -> float: ...
    def randrange(self, low: int, high: int, /) -> int: ...


def sample(hyperparameters: Space, draws: random.Random | None = None) -> dict[str, Any]:
    """Return one value for each hyperparameter, drawn in the order of the sorted keys; nested mappings stay nested.

    Ranges are those of Determined: `int` includes its `maxval`; `log` yields base ** exponent, and `minval` and
    `maxval` are bounds of the exponent. Raises ValueError for a type other than const, int, double, log and
    categorical.
    """
    return _drawn(hyperparameters, draws or random.Random())


def _drawn(space: Space, draws: _Draws) -> dict[str, Any]:
    return {
        name: _drawn(space[name], draws) if is_nested(space[name]) else _value(space[name], draws)
        for name in sorted(space)
    }


def _value(spec: Any, draws: _Draws) -> Any:
    match kind_of(spec):
        case "const":
            return constant(spec)
        case "categorical":
            return spec["vals"][draws.randrange(0, len(spec["vals"]))]
        case "int":
            return draws.randrange(spec["minval"], spec["maxval"] + 1)
        case "double":
            return draws.uniform(spec["minval"], spec["maxval"])
        case _:
            return base_of(spec) ** draws.uniform(spec["minval"], spec["maxval"])


# --- points of a grid


def _leaves(space: Space) -> Iterator[Any]:
    """Yield the hyperparameters at all depths that are not nested mappings, in the order of the sorted keys."""
    for name in sorted(space):
        yield from _leaves(space[name]) if is_nested(space[name]) else [space[name]]


def _at(space: Space, places: Iterator[int]) -> dict[str, Any]:
    """Return the values at the next index of each axis, in the order of `_leaves`."""
    return {
        name: _at(space[name], places) if is_nested(space[name]) else _point(space[name], next(places))
        for name in sorted(space)
    }


def _count(spec: Any) -> int:
    """Return the number of points of an axis."""
    match kind_of(spec):
        case "const":
            return 1
        case "categorical":
            return len(spec["vals"])
        case "int":
            return min(int(spec["count"]), int(spec["maxval"]) - int(spec["minval"]) + 1)
        case _:
            return int(spec["count"])


def _point(spec: Any, place: int) -> Any:
    """Return point number `place` (from 0) of an axis.

    The points of a range are evenly spaced from end to end; a single point is the middle.
    """
    kind = kind_of(spec)
    if kind == "const":
        return constant(spec)
    if kind == "categorical":
        return spec["vals"][place]
    count, low, width = _count(spec), spec["minval"], spec["maxval"] - spec["minval"]
    step, steps = (place, count - 1) if count > 1 else (1, 2)
    if kind == "int":
        return _rounded(low * steps + step * width, steps)
    point = low + step * width / steps
    return float(point) if kind == "double" else base_of(spec) ** point


def _rounded(numerator: int, denominator: int) -> int:
    """Return the integer that is nearest to the quotient; halves are rounded away from zero. `denominator` > 0."""
    # As math.Round of Go, in which Determined is written; Python's round() rounds halves to even numbers.
    size = (2 * abs(numerator) + denominator) // (2 * denominator)
    return size if numerator >= 0 else -size


# --- the form of a hyperparameter


def is_nested(spec: Any) -> bool:
    """Return whether `spec` is a nested mapping of hyperparameters."""
    return isinstance(spec, Mapping) and spec.get("type") is None


def kind_of(spec: Any) -> str:
    """Return the type of a hyperparameter: const, int, double, log or categorical.

    Raises ValueError for another type.
    """
    kind = spec["type"] if isinstance(spec, Mapping) else "const"
    if kind not in ("const", "int", "double", "log", "categorical"):
        raise ValueError(f"hyperparameter type {kind!r}: expected const, int, double, log or categorical")
    return str(kind)


def constant(spec: Any) -> Any:
    """Return the value of a constant, which may be written as {"type": "const", "val": value} or as the value."""
    return spec["val"] if isinstance(spec, Mapping) else spec


def base_of(spec: Mapping[str, Any]) -> float:
    """Return the base of a log range; 10 by default."""
    return float(spec.get("base") or 10)


# --- numpy's legacy `RandomState` with an integer seed, in pure Python: the same numbers without importing numpy
#
# Both `RandomState` and `random.Random` use the generator MT19937. They differ in how a seed initialises the state, and
# in how its words become integers of a range.

_WORDS = 624
"""Number of 32-bit words in the state of MT19937."""
_VERSION = 3
"""The version of the state that `random.Random.setstate` accepts."""


class NumpyRandom:
    """A generator that returns the same numbers as `numpy.random.RandomState(seed)`, call by call."""

    def __init__(self, seed: int) -> None:
        """`seed`: 0 to 2**32 - 1."""
        self._generator = random.Random()
        self._generator.setstate((_VERSION, (*_initial_words(seed), _WORDS), None))

    def random(self) -> float:
        """Return 0 <= x < 1 with 53 random bits, as `random_sample()` does."""
        return self._generator.random()

    def uniform(self, low: float, high: float, /) -> float:
        """Return low <= x < high, as `uniform(low, high)` does."""
        return low + (high - low) * self.random()

    def uint32(self) -> int:
        """Return the next 32-bit word of the generator."""
        return self._generator.getrandbits(32)

    def randrange(self, low: int, high: int, /) -> int:
        """Return low <= x < high, as `randint(low, high, dtype=int64)` does. The range has at most 2**64 values."""
        last = high - low - 1
        if last == 0:
            return low
        draw = self.uint32 if last < 2**32 else self._uint64
        mask = (1 << last.bit_length()) - 1
        # As numpy does: words are masked to the bits of the range, and drawn until one is within the range. For a range
        # of one value no word is drawn.
        while (word := draw() & mask) > last:
            pass
        return low + word

    def _uint64(self) -> int:
        return self.uint32() << 32 | self.uint32()


def _initial_words(seed: int) -> list[int]:
    """Return the state that the generator's `init_genrand` creates (Matsumoto and Nishimura, mt19937ar)."""
    words = [seed]
    for i in range(1, _WORDS):
        words.append(1812433253 * (words[-1] ^ words[-1] >> 30) + i & 0xFFFFFFFF)
    return words
