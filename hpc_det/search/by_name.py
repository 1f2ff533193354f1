"""The search that an effective configuration names: its method, and where its hyperparameters come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_det.search.adaptive import adaptive_asha
from hpc_det.search.asha import AsyncHalving, rung_lengths
from hpc_det.search.custom import CustomSearch
from hpc_det.search.method import FixedSearch, SearchMethod
from hpc_det.search.population import Population
from hpc_det.search.sample import GridSampler, PointsSampler, Sampler, Space, SpaceSampler


def search_of(
    config: Mapping[str, Any], points: Sequence[Mapping[str, Any]], code: Path | None
) -> tuple[SearchMethod, Sampler]:
    """Of an effective config with a seed, of the points of a multirun or sweep, and of the folder of the code."""
    searcher, seed = config["searcher"], config["reproducibility"]["experiment_seed"] or 0
    if searcher["name"] == "population":
        first = sampler(searcher, config["hyperparameters"], seed)
        return Population(searcher, config["hyperparameters"], first, seed), first
    if not points:
        found = sampler(searcher, config["hyperparameters"], seed)
        return search_method(searcher, points=found.points, code=code, seed=seed), found
    if any("searcher" in point for point in points):  # each trial knows its own length
        searcher = {**searcher, "max_length": None}
    listed = PointsSampler([point["hyperparameters"] for point in points], seed)
    return search_method({**searcher, "name": "points"}, points=len(points)), listed


def sampler(searcher: Mapping[str, Any], hyperparameters: Space, experiment_seed: int) -> Sampler:
    """The sampler that belongs to the searcher, which is that of an effective configuration.

    Those of hpc_det.sgd.tune may list points whatever their name is.
    """
    if searcher["name"] == "grid":
        return GridSampler(hyperparameters, experiment_seed)
    if "points" in searcher:
        return PointsSampler(searcher["points"], experiment_seed)
    return SpaceSampler(hyperparameters, experiment_seed)


def search_method(
    searcher: Mapping[str, Any], points: int | None = None, *, code: Path | None = None, seed: int = 0
) -> SearchMethod:
    """The method that `searcher` of an effective configuration names.

    `points`: the sampler's. A class of the user's lies in the folder `code`, and gets the experiment's `seed`.
    """
    match searcher["name"]:
        case "single":
            return FixedSearch(1, _max_length(searcher))
        case "random" | "optuna":
            return FixedSearch(searcher["max_trials"], _max_length(searcher), replaces_invalid=True)
        case "grid" | "points":
            assert points is not None, searcher
            return FixedSearch(points, _max_length(searcher))
        case "async_halving":
            return AsyncHalving(
                rung_lengths(searcher["num_rungs"], searcher["divisor"], _required_length(searcher)),
                searcher["max_trials"],
                **_halving(searcher),
            )
        case "adaptive_asha":
            return adaptive_asha(searcher, _required_length(searcher), **_halving(searcher))
        case "custom":
            assert code is not None, searcher
            names = ("max_trials", "smaller_is_better", "settings")
            max_trials, smaller_is_better, settings = (searcher[name] for name in names)
            arguments = {"max_trials": max_trials, "smaller_is_better": smaller_is_better, "seed": seed}
            return CustomSearch(searcher["class"], code, {**arguments, "max_length": _max_length(searcher), **settings})
        case name:
            raise ValueError(f"no searcher is called {name!r}")


def _max_length(searcher: Mapping[str, Any]) -> int | None:
    return next(iter(searcher["max_length"].values())) if searcher.get("max_length") else None


def _required_length(searcher: Mapping[str, Any]) -> int:
    length = _max_length(searcher)
    assert length is not None, searcher
    return length


def _halving(searcher: Mapping[str, Any]) -> dict[str, Any]:
    return {key: searcher[key] for key in ("divisor", "smaller_is_better", "stop_once")}
