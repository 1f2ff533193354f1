"""What users of tune_run write, a config with ranges and a searcher, in the words of hpc_det.search."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from hpc_det.config.checks import space_problems
from hpc_det.config.problems import render, schema_problems
from hpc_det.config.searchers import Searcher
from hpc_det.config.section import Section
from hpc_det.errors import Problem, UsageError, shown
from hpc_det.search.sample import GridSampler, SpaceSampler, is_nested
from hpc_det.sgd.tune.files import ITERATION, Mode
from hpc_det.sgd.tune.trainable import merged

GRID = "grid_search"

_NO_METRIC = "(none)"

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


def asha(*, num_rungs: int = 5, divisor: float = 4, stop_once: bool = False) -> Tree:
    """Of the trials of a rung one in `divisor` goes on to the next one, whose length is `divisor` times as long.

    `stop_once`: a trial that was left behind never goes on, as with Tune's ASHAScheduler. (Else it waits for the
    promotion that those after it may bring.)
    """
    return {"name": "async_halving", "num_rungs": num_rungs, "divisor": divisor, "stop_once": stop_once}


def adaptive_asha(
    *, mode: Literal["standard", "aggressive", "conservative"] = "standard", max_rungs: int = 5, divisor: float = 4
) -> Tree:
    """Several searches by `asha` side by side, which stop trials more and less early."""
    return {"name": "adaptive_asha", "mode": mode, "max_rungs": max_rungs, "divisor": divisor}


def pbt(*, interval: int = 1, quantile: float = 0.25) -> Tree:
    """Every `interval` iterations a trial that is among the worst `quantile` loads the checkpoint of one of the best,
    and goes on a step away from its hyperparameters. Those change that are ranges or choices in `config`.
    """
    if interval < 1 or not 0 < quantile <= 0.5:
        raise UsageError(f"pbt: interval {interval}, quantile {quantile}; expected interval >= 1, 0 < quantile <= 0.5")
    return {"name": "population", "interval": interval, "quantile": quantile}


# --- a config with ranges in it, in the words of hpc_det.search


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


def space_of(config: Config) -> Tree:
    """The hyperparameters of an effective configuration."""
    return merged(config.space, config.grid)


# --- the `searcher` of an effective configuration


def searcher_of(
    asked: Tree | None,
    config: Config,
    *,
    num_samples: int,
    metric: str | None,
    mode: Mode,
    length: int | None,
    max_concurrent: int,
    seed: int,
) -> Tree:
    """`asked`: what asha, adaptive_asha or pbt gave, or a `searcher` as in an experiment file; None: every trial to its
    end. Without a `max_trials` of its own there are `num_samples` trials, or so many for each point of the grid.

    Raises UsageError with every problem at once.
    """
    points = config.points(num_samples, seed) if config.grid else None
    given = {"name": "random"} if asked is None else dict(asked)
    searcher = {"max_trials": len(points) if points else num_samples, **given}
    searcher |= {"smaller_is_better": mode == "min", "max_concurrent_trials": max_concurrent}
    if searcher["name"] in ("single", "grid"):
        del searcher["max_trials"]
    found = searcher if searcher["name"] == "population" else _validated(searcher, metric, length)
    _check(found, asked, metric, mode, length)
    found["max_length"] = {"epochs": length} if length else None
    if points and searcher["name"] in ("grid", "optuna", "custom"):
        raise UsageError(
            f"searcher {searcher['name']!r}: chooses by itself; write choice([...]) for grid_search([...])"
        )
    if points:
        found |= {"points": points} if asked else {"name": "points", "points": points}
    return found


def _check(found: Tree, asked: Tree | None, metric: str | None, mode: str, length: int | None) -> None:
    problems = []
    if mode not in ("min", "max"):
        problems.append(f"mode: got {shown(mode)}; expected 'min' or 'max'")
    if metric is None and found["name"] not in ("single", "random", "grid", "points"):
        problems.append(f"metric: {found['name']} compares trials by it; give the name of a metric that step returns")
    if length is None and found["name"] in ("async_halving", "adaptive_asha", "population"):
        problems.append(f'stop: {found["name"]} needs the most iterations of a trial; give stop={{"{ITERATION}": ...}}')
    if problems:
        raise UsageError(problems)


class _Asked(Section):
    searcher: Searcher


def _validated(searcher: Mapping[str, Any], metric: str | None, length: int | None) -> Tree:
    """With every default that an experiment file has."""
    whole = {"max_length": {"epochs": length} if length else None, **searcher, "metric": metric or _NO_METRIC}
    try:
        found = _Asked.model_validate({"searcher": whole})
    except ValidationError as error:
        raise UsageError(render(schema_problems(_Asked, error), lambda path: None)) from None
    tree: Tree = found.model_dump(mode="json", by_alias=True)["searcher"]
    return tree
