"""Which of our searches a call of tune_run asks for, as the `searcher` of an effective configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ValidationError

from hpc_det.config.problems import render, schema_problems
from hpc_det.config.searchers import Searcher
from hpc_det.config.section import Section
from hpc_det.errors import UsageError, shown
from hpc_det.sgd.tune.files import ITERATION, Mode
from hpc_det.sgd.tune.space import Config, Tree
from hpc_det.sgd.tune.trainable import merged

_NO_METRIC = "(none)"


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


def space_of(config: Config) -> Tree:
    """The hyperparameters of an effective configuration."""
    return merged(config.space, config.grid)


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
