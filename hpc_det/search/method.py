"""What a search method is, what methods share, and the simplest one.

A method says what to train next, from nothing but what it was told.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
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
    """Whether a value of the searcher's metric is strictly better; NaN never is, and any number is better than none."""
    if math.isnan(value):
        return False
    if than is None or math.isnan(than):
        return True
    return value < than if smaller_is_better else value > than


class Trials:
    """The trials of a search: which exist, which are worked on, which have work that waits, which are closed."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        """How many to create, with a replacement for each invalid one."""
        self.created = 0
        self.working: dict[int, Work] = {}
        self.closed: set[int] = set()
        self._waiting: dict[int, Work] = {}
        self._order: list[tuple[int, int]] = []
        """Of the works that wait: the longest first, then the oldest trial."""

    def waiting_work(self) -> Work | None:
        """Work that was decided on and that nobody does."""
        return self._waiting[self._order[0][1]] if self._order else None

    def new_trial(self) -> int | None:
        """The number of the trial to create next."""
        return self.created + 1 if self.created < self.wanted else None

    def start(self, work: Work) -> None:
        assert work.trial <= self.created + 1, work
        assert work.trial not in self.working, work
        assert work.trial not in self.closed, work
        self._unqueue(work.trial)
        self.created = max(self.created, work.trial)
        self.working[work.trial] = work

    def queue(self, work: Work) -> None:
        """Somebody should do this."""
        self._waiting[work.trial] = work
        insort(self._order, _place(work))

    def give_back(self, trial: int) -> None:
        self.queue(self.working.pop(trial))

    def close(self, trial: int) -> None:
        self.working.pop(trial, None)
        self._unqueue(trial)
        self.closed.add(trial)

    def reopen(self, work: Work) -> None:
        self.closed.remove(work.trial)
        self.queue(work)

    def replace(self, trial: int) -> None:
        """Close it and create another in its place."""
        self.close(trial)
        self.wanted += 1

    def is_under_way(self, trial: int) -> bool:
        """It has work, whether somebody does it or not."""
        return trial in self.working or trial in self._waiting

    def _unqueue(self, trial: int) -> None:
        if work := self._waiting.pop(trial, None):
            del self._order[bisect_left(self._order, _place(work))]


def _place(work: Work) -> tuple[int, int]:
    return -(work.until or 0), work.trial


class FixedSearch:
    """single, random, grid and points, which look at no metric: a number of trials, each trained in one go."""

    def __init__(self, trials: int, until: int | None, *, replaces_invalid: bool = False) -> None:
        """`replaces_invalid`: another trial comes for one with invalid hyperparameters, as no point of a grid can."""
        self.trials_expected = trials
        self._until = until
        self.replaces_invalid = replaces_invalid
        self._trials = Trials(trials)

    def next_work(self) -> Work | None:
        if work := self._trials.waiting_work():
            return work
        new = self._trials.new_trial()
        return Work(new, self._until) if new else None

    def start(self, work: Work) -> None:
        assert work.until == self._until, work
        self._trials.start(work)

    def report(self, trial: int, value: float) -> None:
        assert trial in self._trials.working, trial
        self._trials.close(trial)

    def end(self, trial: int, how: Exit) -> None:
        if self.is_closed(trial):
            return
        if how is Exit.INVALID_HP and self.replaces_invalid:
            self._trials.replace(trial)
        else:
            self._trials.close(trial)

    def give_back(self, trial: int) -> None:
        self._trials.give_back(trial)

    def reopen(self, trial: int) -> None:
        """A closed trial shall go on after all."""
        self._trials.reopen(Work(trial, self._until))

    def is_closed(self, trial: int) -> bool:
        return trial in self._trials.closed

    @property
    def finished(self) -> bool:
        return len(self._trials.closed) == self._trials.wanted

    @property
    def progress(self) -> float:
        replaced = self._trials.wanted - self.trials_expected
        return (len(self._trials.closed) - replaced) / self.trials_expected
