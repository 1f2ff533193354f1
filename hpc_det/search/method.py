"""What a search method is: it says what to train next, from nothing but what it was told."""

from __future__ import annotations

import math
from enum import Enum
from typing import NamedTuple, Protocol


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


def better(value: float, than: float | None, smaller_is_better: bool) -> bool:
    """Strictly better; NaN is never better, and anything is better than nothing."""
    if math.isnan(value):
        return False
    if than is None or math.isnan(than):
        return True
    return value < than if smaller_is_better else value > than
