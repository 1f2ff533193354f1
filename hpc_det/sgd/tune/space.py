"""A config with ranges in it, as users of Tune write one, in the words of hpc_det.search."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hpc_det.config.checks import space_problems
from hpc_det.errors import Problem, UsageError, shown
from hpc_det.search.sample import GridSampler, SpaceSampler, is_nested
from hpc_det.sgd.tune.trainable import merged

GRID = "grid_search"
Tree = dict[str, Any]


def grid_search(values: Iterable[Any]) -> Tree:
    """Each of these values, with each of every other grid_search."""
    return {GRID: list(values)}


def choice(values: Iterable[Any]) -> Tree:
    """One of these values."""
    return {"type": "categorical", "vals": list(values)}


def uniform(low: float, high: float) -> Tree:
    return {"type": "double", "minval": low, "maxval": high}


def loguniform(low: float, high: float, base: float = 10.0) -> Tree:
    """`low` and `high` are values, both above 0, as with Tune; a `log` of an experiment file takes exponents."""
    if not 0 < low < high:
        raise UsageError(f"loguniform({low}, {high}): expected 0 < low < high")
    return {"type": "log", "base": base, "minval": math.log(low, base), "maxval": math.log(high, base)}


def randint(low: int, high: int) -> Tree:
    """low <= x < high, as with Tune and numpy; an `int` of an experiment file includes its maxval."""
    if high - low == 1:
        return {"type": "const", "val": low}
    return {"type": "int", "minval": low, "maxval": high - 1}


@dataclass(frozen=True)
class Config:
    """What a user gave as `config`, taken apart."""

    space: Tree
    """Ranges and what JSON has, without grids."""
    grid: Tree
    """The values of each grid_search, as `categorical`."""
    objects: Tree
    """All else: functions, classes. They are the same for all trials."""

    def points(self, num_samples: int, seed: int) -> list[Tree]:
        """Of every trial its constants: the grid `num_samples` times over, ranges drawn anew for each trial."""
        grid, drawn = GridSampler(self.grid, 0), SpaceSampler(self.space, seed)
        return [
            merged(
                _constants(self.grid, grid.sample(i % grid.points + 1).hparams),
                _constants(self.space, drawn.sample(i + 1).hparams),
            )
            for i in range(num_samples * grid.points)
        ]


def config_of(written: Mapping[str, Any]) -> Config:
    """Raises UsageError with everything that is wrong in it."""
    found = Config({}, {}, {})
    problems = list(_sort(written, found.space, found.grid, found.objects, "config"))
    problems += space_problems({**found.grid}, "random", "config")
    problems += space_problems(found.space, "random", "config")
    if problems:
        raise UsageError([f"{problem.path}: {problem.what}; {problem.remedy}" for problem in problems])
    return found


def _sort(written: Mapping[str, Any], space: Tree, grid: Tree, objects: Tree, path: str) -> Iterable[Problem]:
    for name, value in written.items():
        if _is_section(value):
            inner: tuple[Tree, Tree, Tree] = ({}, {}, {})
            yield from _sort(value, *inner, f"{path}.{name}")
            for tree, part in zip((space, grid, objects), inner, strict=True):
                if part or (tree is space and not value):
                    tree[name] = part
        elif isinstance(value, Mapping) and GRID in value:
            yield from _not_in_json(value[GRID], f"{path}.{name}")
            grid[name] = {"type": "categorical", "vals": value[GRID]}
        elif isinstance(value, Mapping) and isinstance(value.get("type"), str):
            yield from _not_in_json(value.get("vals", [value.get("val")]), f"{path}.{name}")
            space[name] = dict(value)
        elif is_plain(value):
            space[name] = {"type": "const", "val": value}
        else:
            objects[name] = value


def _is_section(value: Any) -> bool:
    if not isinstance(value, Mapping) or "type" in value or set(value) == {GRID}:
        return False
    return all(isinstance(key, str) for key in value)


def _not_in_json(values: Any, path: str) -> Iterable[Problem]:
    if wrong := [value for value in values if not is_plain(value)] if isinstance(values, list) else []:
        yield Problem(
            path, f"{shown(wrong[0])} is no JSON", "give texts or numbers, and let setup look up what they name"
        )


def is_plain(value: Any) -> bool:
    """Whether it is after a way through a file what it was before."""
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError):
        return False


def _constants(space: Tree, values: Tree) -> Tree:
    """A value that is a map stays one value."""
    return {
        name: _constants(spec, values[name]) if is_nested(spec) else {"type": "const", "val": values[name]}
        for name, spec in space.items()
    }
