"""What a search method is: it says what to train next, from nothing but what it was told."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, Protocol


class Work(NamedTuple):
    """A stretch of training of one trial."""

    trial: int
    """From 1, in the order of creation."""
    until: int | None
    """The length, in the unit of searcher.max_length, at which the trial reports; None: to its own end."""


class Exit(str, Enum):
    """Why a trial will never go on."""

    COMPLETED = "completed"
    FAILED = "failed"
    INVALID_HP = "invalid hyperparameters"
    CANCELLED = "cancelled"


class SearchMethod(Protocol):
    """Pure: its state follows from the calls alone. Each call is O(log n) in the number of trials."""

    def next_work(self) -> Work | None:
        """What should be done next, that nobody does yet; None: nothing now. Asking changes nothing.

        A trial number never seen is a new trial.
        """

    def start(self, work: Work) -> None:
        """`work`, which next_work has just named, is being done from now on.

        That it was named is taken on trust: a replay of decisions need not take them again.
        """

    def report(self, trial: int, value: float) -> None:
        """The trial's work is done with this value of the metric; NaN is the worst there is."""

    def end(self, trial: int, how: Exit) -> None:
        """The trial will never go on."""

    def give_back(self, trial: int) -> None:
        """Whoever did the trial's work is gone: next_work names the same work again."""

    def is_closed(self, trial: int) -> bool:
        """No more work for this trial, ever."""

    @property
    def finished(self) -> bool:
        """Nothing is being done, and nothing will ever come."""

    @property
    def progress(self) -> float:
        """0 .. 1, and 1 only when finished; it never falls."""

    @property
    def trials_expected(self) -> int:
        """How many trials it will create in all, replacements of invalid ones left out."""


def search_method(
    searcher: Mapping[str, Any], points: int | None = None, *, code: Path | None = None, seed: int = 0
) -> SearchMethod:
    """The method that `searcher` of an effective configuration names.

    `points`: the sampler's. A class of the user's lies in the folder `code`, and gets the experiment's `seed`.
    """
    from hpc_det.search import adaptive, asha, custom, fixed  # they are made of the words above

    match searcher["name"]:
        case "single":
            return fixed.FixedSearch(1, _max_length(searcher))
        case "random" | "optuna":
            return fixed.FixedSearch(searcher["max_trials"], _max_length(searcher), replaces_invalid=True)
        case "grid" | "points":
            assert points is not None, searcher
            return fixed.FixedSearch(points, _max_length(searcher))
        case "async_halving":
            return asha.AsyncHalving(
                asha.rung_lengths(searcher["num_rungs"], searcher["divisor"], _required_length(searcher)),
                searcher["max_trials"],
                **_halving(searcher),
            )
        case "adaptive_asha":
            return adaptive.adaptive_asha(searcher, _required_length(searcher), **_halving(searcher))
        case "custom":
            assert code is not None, searcher
            names = ("max_trials", "smaller_is_better", "settings")
            max_trials, smaller_is_better, settings = (searcher[name] for name in names)
            arguments = {"max_trials": max_trials, "smaller_is_better": smaller_is_better, "seed": seed}
            return custom.CustomSearch(
                searcher["class"], code, {**arguments, "max_length": _max_length(searcher), **settings}
            )
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
