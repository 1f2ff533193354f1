"""Creates the search that an effective configuration names: its method, and the sampler of its hyperparameters.

The modules of a method are imported when it is named: most jobs train a single trial, and start sooner without them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_det.search.method import FixedSearch, SearchMethod
from hpc_det.search.sample import GridSampler, PointsSampler, Sampler, Space, SpaceSampler


def search_of(
    config: Mapping[str, Any], points: Sequence[Mapping[str, Any]], code: Path | None
) -> tuple[SearchMethod, Sampler]:
    """Return the method and the sampler of a search.

    `config`: the effective configuration, with a seed; `points`: those of a multirun or sweep, else empty; `code`: the
    folder of the trial's code.
    """
    searcher, seed = config["searcher"], config["reproducibility"]["experiment_seed"] or 0
    if searcher["name"] == "population":
        from hpc_det.search.population import Population

        first = sampler(searcher, config["hyperparameters"], seed)
        return Population(searcher, config["hyperparameters"], first, seed), first
    if not points:
        found = sampler(searcher, config["hyperparameters"], seed)
        return search_method(searcher, points=found.points, code=code, seed=seed), found
    if any("searcher" in point for point in points):  # each point sets the length of its trial
        searcher = {**searcher, "max_length": None}
    listed = PointsSampler([point["hyperparameters"] for point in points], seed)
    return search_method({**searcher, "name": "points"}, points=len(points)), listed


def sampler(searcher: Mapping[str, Any], hyperparameters: Space, experiment_seed: int) -> Sampler:
    """Return the sampler for the searcher of an effective configuration.

    Searchers of hpc_det.sgd.tune may contain points, whatever their name.
    """
    if searcher["name"] == "grid":
        return GridSampler(hyperparameters, experiment_seed)
    if "points" in searcher:
        return PointsSampler(searcher["points"], experiment_seed)
    return SpaceSampler(hyperparameters, experiment_seed)


def search_method(
    searcher: Mapping[str, Any], points: int | None = None, *, code: Path | None = None, seed: int = 0
) -> SearchMethod:
    """Return the search method for the searcher of an effective configuration.

    `points`: the number of points of the sampler, for a grid or a list; `code`: the folder with the user's class, for
    `custom`; `seed`: the experiment's seed, which that class receives.
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
            from hpc_det.search.asha import AsyncHalving, rung_lengths

            return AsyncHalving(
                rung_lengths(searcher["num_rungs"], searcher["divisor"], _required_length(searcher)),
                searcher["max_trials"],
                **_halving(searcher),
            )
        case "adaptive_asha":
            from hpc_det.search.adaptive import adaptive_asha

            return adaptive_asha(searcher, _required_length(searcher), **_halving(searcher))
        case "custom":
            from hpc_det.search.custom import CustomSearch

            assert code is not None, searcher
            names = ("max_trials", "smaller_is_better", "settings")
            max_trials, smaller_is_better, settings = (searcher[name] for name in names)
            arguments = {"max_trials": max_trials, "smaller_is_better": smaller_is_better, "seed": seed}
            return CustomSearch(searcher["class"], code, {**arguments, "max_length": _max_length(searcher), **settings})
        case name:
            raise ValueError(f"searcher.name: unknown searcher {name!r}")


def _max_length(searcher: Mapping[str, Any]) -> int | None:
    """Return the number in searcher.max_length, whatever its unit; None if the searcher has none."""
    return next(iter(searcher["max_length"].values())) if searcher.get("max_length") else None


def _required_length(searcher: Mapping[str, Any]) -> int:
    length = _max_length(searcher)
    assert length is not None, searcher
    return length


def _halving(searcher: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of AsyncHalving that both searchers by halving have."""
    return {key: searcher[key] for key in ("divisor", "smaller_is_better", "stop_once")}
