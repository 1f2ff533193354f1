"""The config and the searcher of tune_run: functions to write them, and their translation for hpc_det.search."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from pydantic import ValidationError

from hpc_det.config.checks import space_problems
from hpc_det.config.problems import render, schema_problems
from hpc_det.config.searchers import Searcher
from hpc_det.config.section import Section
from hpc_det.errors import Problem, UsageError, shown
from hpc_det.search.population import RESAMPLED
from hpc_det.search.sample import GridSampler, SpaceSampler, is_nested
from hpc_det.search.state import NO_METRIC
from hpc_det.sgd.tune.draws import Drawn, Tree, drawn_by, is_plain, mutations_of, seeded
from hpc_det.sgd.tune.files import ITERATION, Mode
from hpc_det.sgd.tune.trainable import merged

GRID = "grid_search"


def grid_search(values: Iterable[Any]) -> Tree:
    """Return a grid: each value is tried in combination with each value of all other grids.

    Args:
        values: Numbers, texts and other values that JSON can represent.
    """
    return {GRID: list(values)}


def choice(values: Iterable[Any]) -> Tree:
    """Return a range from which one of the values is drawn.

    Args:
        values: Numbers, texts and other values that JSON can represent.
    """
    return {"type": "categorical", "vals": list(values)}


def uniform(low: float, high: float) -> Tree:
    """Return a range from which a float is drawn uniformly.

    Args:
        low: Smallest value.
        high: Largest value.
    """
    return {"type": "double", "minval": low, "maxval": high}


def loguniform(low: float, high: float, base: float = 10.0) -> Tree:
    """Return a range from which a float is drawn whose logarithm is uniform.

    Args:
        low: Smallest value, above 0. As in Ray Tune it is the value itself; `log` in an experiment file takes its
            exponent.
        high: Largest value.
        base: Base of the logarithm.

    Raises:
        UsageError: Unless 0 < low < high.
    """
    if not 0 < low < high:
        raise UsageError(f"loguniform({low}, {high}): expected 0 < low < high")
    return {"type": "log", "base": base, "minval": math.log(low, base), "maxval": math.log(high, base)}


def randint(low: int, high: int) -> Tree:
    """Return a range from which an integer is drawn uniformly.

    Args:
        low: Smallest value.
        high: One more than the largest value, as in Ray Tune and numpy; `int` in an experiment file includes its
            `maxval`.
    """
    if high - low == 1:  # an `int` range with equal ends is invalid
        return {"type": "const", "val": low}
    return {"type": "int", "minval": low, "maxval": high - 1}


def asha(*, num_rungs: int = 5, divisor: float = 4, stop_once: bool = False) -> Tree:
    """Return a searcher that trains many trials a little and promotes the best (asynchronous successive halving).

    Of the trials that complete a rung, the best one in `divisor` is promoted to the next rung, which is `divisor` times
    as many iterations long.

    Args:
        num_rungs: Number of rungs.
        divisor: Ratio of trials, and of iterations, from one rung to the next.
        stop_once: Whether a trial that is not promoted at once is stopped for good, as by Ray Tune's ASHAScheduler.
            False: it is paused, and promoted when the results of later trials allow it.
    """
    return {"name": "async_halving", "num_rungs": num_rungs, "divisor": divisor, "stop_once": stop_once}


def adaptive_asha(
    *, mode: Literal["standard", "aggressive", "conservative"] = "standard", max_rungs: int = 5, divisor: float = 4
) -> Tree:
    """Return a searcher that runs several `asha` searches in parallel, which stop trials at different times.

    Args:
        mode: How early trials are stopped: "aggressive" (early), "standard" or "conservative" (late).
        max_rungs: Largest number of rungs of a search.
        divisor: Ratio of trials, and of iterations, from one rung to the next.
    """
    return {"name": "adaptive_asha", "mode": mode, "max_rungs": max_rungs, "divisor": divisor}


def pbt(
    *,
    interval: int = 1,
    quantile: float = 0.25,
    mutations: Mapping[str, Any] | None = None,
    resampled: float = RESAMPLED,
) -> Tree:
    """Return a searcher that trains a population of trials (population-based training).

    Every `interval` iterations, a trial that is among the worst loads the checkpoint of one of the best, and continues
    with hyperparameters close to that trial's. A checkpoint contains the learning rate of the optimizer: where `lr`
    changes, the operator must set it again in `load_state_dict` (docs/examples/sgd/pbt.py), as in RaySGD.

    Args:
        interval: Iterations between two comparisons, at least 1.
        quantile: Fraction of the trials that count as the worst, and as the best; above 0, at most 0.5.
        mutations: The hyperparameters that change, by name, also nested: a range, a list of values, or a function
            without arguments that draws a number. None: those that are ranges or choices in `config`.
        resampled: Probability that a hyperparameter is drawn again instead of being changed a little.

    Raises:
        UsageError: An argument is out of range.
    """
    if interval < 1 or not 0 < quantile <= 0.5 or not 0 <= resampled <= 1:
        raise UsageError(
            f"pbt: got interval {interval}, quantile {quantile} and resampled {resampled}; expected interval >= 1, "
            f"0 < quantile <= 0.5 and 0 <= resampled <= 1"
        )
    given: Tree = {"name": "population", "interval": interval, "quantile": quantile}
    # Only what differs from the defaults: searches that began without these keys can be continued.
    if resampled != RESAMPLED:
        given["resampled"] = resampled
    return given if mutations is None else {**given, "mutations": dict(mutations)}


# --- translation of a config with ranges for hpc_det.search


@dataclass(frozen=True)
class Config:
    """The `config` of a user, separated into its kinds of values."""

    space: Tree
    """Ranges, and fixed values that JSON can represent."""
    grid: Tree
    """The values of each grid_search, as a `categorical` range."""
    functions: Tree
    """Hyperparameters that functions draw (Drawn)."""
    objects: Tree
    """All other values, such as functions and classes; they are the same for all trials."""

    def points(self, num_samples: int, seed: int) -> list[Tree]:
        """Return the hyperparameters of every trial: all points of the grid, `num_samples` times.

        Values of ranges and functions are drawn for each trial. All values are constants of a search space. Raises
        UsageError for a value of a function that JSON cannot represent.
        """
        grid, drawn = GridSampler(self.grid, 0), SpaceSampler(self.space, seed)
        points = []
        with seeded(seed):
            for i in range(num_samples * grid.points):
                of_grid, of_space = grid.sample(i % grid.points + 1).hparams, drawn.sample(i + 1).hparams
                of_functions = drawn_by(self.functions, merged(of_grid, of_space))
                constants = merged(_constants(self.grid, of_grid), _constants(self.space, of_space))
                points.append(merged(constants, _constants(self.functions, of_functions)))
        return points


def config_of(written: Mapping[str, Any]) -> Config:
    """Return the config separated into its kinds of values. Raises UsageError with every problem in it."""
    found = Config({}, {}, {}, {})
    problems = list(_sort(written, found, "config"))
    problems += space_problems({**found.grid}, "random", "config")
    problems += space_problems(found.space, "random", "config")
    if problems:
        raise UsageError([f"{problem.path}: {problem.what}; {problem.remedy}" for problem in problems])
    return found


def _sort(written: Mapping[str, Any], found: Config, path: str) -> Iterable[Problem]:
    """Add each value of a config to the tree of its kind; yield the problems."""
    for name, value in written.items():
        if _is_section(value):
            inner = Config({}, {}, {}, {})
            yield from _sort(value, inner, f"{path}.{name}")
            for field in fields(Config):
                part = getattr(inner, field.name)
                if part or (field.name == "space" and not value):  # keep an empty section
                    getattr(found, field.name)[name] = part
        elif isinstance(value, Mapping) and GRID in value:
            yield from _not_in_json(value[GRID], f"{path}.{name}")
            found.grid[name] = {"type": "categorical", "vals": value[GRID]}
        elif isinstance(value, Mapping) and isinstance(value.get("type"), str):
            yield from _not_in_json(value.get("vals", [value.get("val")]), f"{path}.{name}")
            found.space[name] = dict(value)
        elif isinstance(value, Drawn):
            found.functions[name] = value
        elif is_plain(value):
            found.space[name] = {"type": "const", "val": value}
        else:
            found.objects[name] = value


def _is_section(value: Any) -> bool:
    """Return whether the value is a nested part of the config, not a range or a grid."""
    if not isinstance(value, Mapping) or "type" in value or set(value) == {GRID}:
        return False
    return all(isinstance(key, str) for key in value)


def _not_in_json(values: Any, path: str) -> Iterable[Problem]:
    """Yield a problem if one of the values of a range cannot be represented in JSON."""
    if wrong := [value for value in values if not is_plain(value)] if isinstance(values, list) else []:
        yield Problem(
            path,
            f"{shown(wrong[0])} cannot be represented in JSON",
            "use numbers or names, and let setup() look up the object by its name",
        )


def _constants(space: Tree, values: Tree) -> Tree:
    """Return the values as constants of a search space, nested as the ranges in `space`."""
    # Nested by the ranges, not by the values: a drawn value that is a dict is one constant.
    return {
        name: _constants(spec, values[name]) if is_nested(spec) else {"type": "const", "val": values[name]}
        for name, spec in space.items()
    }


def space_of(config: Config) -> Tree:
    """Return the section `hyperparameters` of an effective configuration."""
    return merged(config.space, config.grid)


# --- the section `searcher` of an effective configuration


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
    """Return the section `searcher` of the effective configuration.

    `asked`: the result of asha, adaptive_asha or pbt, or a `searcher` section of an experiment file; None: every trial
    runs to its end. Unless it has `max_trials`, there are `num_samples` trials, or with a grid as many for each point.

    Raises UsageError with all problems.
    """
    points = config.points(num_samples, seed) if config.grid or config.functions else None
    given: Tree = {"name": "random"} if asked is None else dict(asked)
    if mutations := given.get("mutations"):
        given["mutations"] = mutations_of(mutations, seed)
    searcher = {"max_trials": len(points) if points else num_samples, **given}
    searcher |= {"smaller_is_better": mode == "min", "max_concurrent_trials": max_concurrent}
    if searcher["name"] in ("single", "grid"):
        del searcher["max_trials"]
    # The schema of experiment files has no searcher "population": trials of experiments keep their hyperparameters.
    found = searcher if searcher["name"] == "population" else _validated(searcher, metric, length)
    _check(found, asked, metric, mode, length)
    found["max_length"] = {"epochs": length} if length else None
    if points and searcher["name"] in ("grid", "optuna", "custom"):
        raise UsageError(
            f"searcher {searcher['name']!r}: it chooses hyperparameters itself and cannot be combined with "
            f"grid_search([...]) or sample_from(...); use choice([...]) or another range"
        )
    if points:
        # Any searcher with "points" tries these instead of drawing; the one named "points" only tries them.
        found |= {"points": points} if asked else {"name": "points", "points": points}
    return found


def _check(found: Tree, asked: Tree | None, metric: str | None, mode: str, length: int | None) -> None:
    problems = []
    if mode not in ("min", "max"):
        problems.append(f"mode: got {shown(mode)}; expected 'min' or 'max'")
    if metric is None and found["name"] not in ("single", "random", "grid", "points"):
        problems.append(
            f"metric: none is given, but {found['name']} compares trials by one; give the name of a metric that step "
            f"returns"
        )
    if length is None and found["name"] in ("async_halving", "adaptive_asha", "population"):
        problems.append(
            f'stop: {found["name"]} needs the largest number of iterations of a trial; give stop={{"{ITERATION}": ...}}'
        )
    if problems:
        raise UsageError(problems)


class _Asked(Section):
    searcher: Searcher


def _validated(searcher: Mapping[str, Any], metric: str | None, length: int | None) -> Tree:
    """Return the searcher with all defaults of an experiment file. Raises UsageError if it is invalid."""
    whole = {"max_length": {"epochs": length} if length else None, **searcher, "metric": metric or NO_METRIC}
    try:
        found = _Asked.model_validate({"searcher": whole})
    except ValidationError as error:
        raise UsageError(render(schema_problems(_Asked, error), lambda path: None)) from None
    tree: Tree = found.model_dump(mode="json", by_alias=True)["searcher"]
    return tree
