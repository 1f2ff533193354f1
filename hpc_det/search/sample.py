"""Where the hyperparameters and the seed of a trial come from: drawn from ranges, points of a grid, or a list."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import repeat
from typing import Any, Protocol

Space = Mapping[str, Any]
"""Hyperparameters by name: constants, ranges (maps with a `type`) and nested maps."""


@dataclass(frozen=True)
class Sample:
    """What is a trial's own."""

    hparams: dict[str, Any]
    seed: int
    """0 .. 2**31 - 1"""
    source: int | None = None
    """The trial of the same search whose latest weights it begins with."""


class Sampler(Protocol):
    """Pure: the samples follow from the space and the experiment's seed alone."""

    @property
    def points(self) -> int | None:
        """How many trials there are to take, if that follows from the space."""

    def sample(self, trial: int) -> Sample:
        """Of this trial (1, 2, ...), the same each time; what the caller does with it changes no other."""


def first_sample(hyperparameters: Space, experiment_seed: int) -> Sample:
    """Of the first trial, or the only one."""
    return SpaceSampler(hyperparameters, experiment_seed).sample(1)


class _SeededSampler:
    """Draws trial after trial from one stream of random numbers, as far as it was asked, and remembers.

    The stream is Determined's (master/pkg/searcher): hyperparameters, 16 bytes that are a trial's id there, its seed.
    """

    def __init__(self, experiment_seed: int) -> None:
        self._experiment_seed = experiment_seed
        self._samples: list[Sample] = []

    @cached_property
    def _draws(self) -> NumpyRandom:
        """Not before the first sample: seeding takes as long as all else that a list of experiments needs to know."""
        return NumpyRandom(self._experiment_seed)

    def sample(self, trial: int) -> Sample:
        assert trial >= 1, trial
        while len(self._samples) < trial:
            self._samples.append(self._next())
        return deepcopy(self._samples[trial - 1])

    def _next(self) -> Sample:
        hparams = self._hparams(len(self._samples) + 1)
        for _ in range(4):
            self._draws.uint32()
        return Sample(hparams, seed=self._draws.randrange(0, 2**31))

    def _hparams(self, trial: int) -> dict[str, Any]:
        raise NotImplementedError


class SpaceSampler(_SeededSampler):
    """Each trial's values are drawn from their ranges."""

    points = None

    def __init__(self, hyperparameters: Space, experiment_seed: int) -> None:
        super().__init__(experiment_seed)
        self._space = hyperparameters

    def _hparams(self, trial: int) -> dict[str, Any]:
        return _drawn(self._space, self._draws)


class GridSampler(_SeededSampler):
    """Trial k is the k-th point of the grid: keys sorted, the last one fastest. (Determined begins at the end.)"""

    def __init__(self, hyperparameters: Space, experiment_seed: int) -> None:
        """Every int, double and log needs its `count`."""
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
    """Trial k has the hyperparameters, all of them constants, of `points[k - 1]`."""

    def __init__(self, points: Sequence[Space], experiment_seed: int) -> None:
        super().__init__(experiment_seed)
        self._points = points
        self.points = len(points)

    def _hparams(self, trial: int) -> dict[str, Any]:
        return _at(self._points[trial - 1], repeat(0))


# --- random values


class _Draws(Protocol):
    def uniform(self, low: float, high: float, /) -> float: ...
    def randrange(self, low: int, high: int, /) -> int: ...


def sample(hyperparameters: Space, draws: random.Random | None = None) -> dict[str, Any]:
    """One value for each hyperparameter, keys in sorted order; constants as they are, nested maps recursively.

    The ranges are Determined's: `int` includes its `maxval`; `log` gives base ** exponent, and `minval` and `maxval`
    bound the exponent. Raises ValueError for a type that is none of const, int, double, log, categorical.
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
    for name in sorted(space):
        yield from _leaves(space[name]) if is_nested(space[name]) else [space[name]]


def _at(space: Space, places: Iterator[int]) -> dict[str, Any]:
    """The values at the next place of each axis, in the order of `_leaves`."""
    return {
        name: _at(space[name], places) if is_nested(space[name]) else _point(space[name], next(places))
        for name in sorted(space)
    }


def _count(spec: Any) -> int:
    """How many points an axis has."""
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
    """The points of a range are even from end to end; a single one is the middle."""
    kind = kind_of(spec)
    if kind == "const":
        return constant(spec)
    if kind == "categorical":
        return spec["vals"][place]
    count, low, width = _count(spec), spec["minval"], spec["maxval"] - spec["minval"]
    step, steps = (place, count - 1) if count > 1 else (1, 2)
    if kind == "int":
        return _rounded(low + Fraction(step * width, steps))
    point = low + step * width / steps
    return float(point) if kind == "double" else base_of(spec) ** point


def _rounded(value: Fraction) -> int:
    """Half away from zero, as Go rounds."""
    size = math.floor(abs(value) + Fraction(1, 2))
    return size if value >= 0 else -size


# --- what a hyperparameter is


def is_nested(spec: Any) -> bool:
    return isinstance(spec, Mapping) and spec.get("type") is None


def kind_of(spec: Any) -> str:
    kind = spec["type"] if isinstance(spec, Mapping) else "const"
    if kind not in ("const", "int", "double", "log", "categorical"):
        raise ValueError(f"hyperparameter type {kind!r}: expected const, int, double, log or categorical")
    return str(kind)


def constant(spec: Any) -> Any:
    return spec["val"] if isinstance(spec, Mapping) else spec


def base_of(spec: Mapping[str, Any]) -> float:
    return float(spec.get("base") or 10)


# --- numpy's legacy `RandomState` of one whole number, in pure Python: the same draws without loading numpy
#
# Both it and `random.Random` are the generator MT19937. They differ in how a seed fills its state and in how whole
# numbers of a range are made of its words.

_WORDS = 624
_VERSION = 3
"""Of the state that `random.Random.setstate` takes."""


class NumpyRandom:
    """Draws as `numpy.random.RandomState(seed)` does, call by call."""

    def __init__(self, seed: int) -> None:
        """`seed`: 0 .. 2**32 - 1."""
        self._generator = random.Random()
        self._generator.setstate((_VERSION, (*_initial_words(seed), _WORDS), None))

    def random(self) -> float:
        """0 <= x < 1 with 53 random bits, as `random_sample()`."""
        return self._generator.random()

    def uniform(self, low: float, high: float, /) -> float:
        return low + (high - low) * self.random()

    def uint32(self) -> int:
        return self._generator.getrandbits(32)

    def randrange(self, low: int, high: int, /) -> int:
        """low <= x < high, at most 2**64 of them, as `randint(low, high, dtype=int64)`.

        Words are masked to the bits that the range needs, until one lies in it. A range of one draws nothing.
        """
        last = high - low - 1
        if last == 0:
            return low
        draw = self.uint32 if last < 2**32 else self._uint64
        mask = (1 << last.bit_length()) - 1
        while (word := draw() & mask) > last:
            pass
        return low + word

    def _uint64(self) -> int:
        return self.uint32() << 32 | self.uint32()


def _initial_words(seed: int) -> list[int]:
    """The generator's state as its authors' `init_genrand` fills it (Matsumoto and Nishimura, mt19937ar)."""
    words = [seed]
    for i in range(1, _WORDS):
        words.append(1812433253 * (words[-1] ^ words[-1] >> 30) + i & 0xFFFFFFFF)
    return words
