"""The interface of search methods, the parts that methods share, and the simplest method.

A search method decides which trial trains next and for how long. Its decisions depend only on the calls that it has
received.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from enum import Enum
from typing import NamedTuple, Protocol


class Work(NamedTuple):
    """Training that a search method requests: one trial, up to a length."""

    trial: int
    """The number of the trial, counted from 1 in the order of creation."""
    until: int | None
    """The total length at which the trial reports, in the unit of searcher.max_length; None: to the end of its
    training.
    """


class Exit(str, Enum):
    """The reason why a trial has ended for good."""

    COMPLETED = "completed"
    FAILED = "failed"
    INVALID_HP = "invalid hyperparameters"
    CANCELLED = "cancelled"


class SearchMethod(Protocol):
    """The interface of a search method.

    An implementation must be deterministic: its state may depend only on the calls that it has received, because every
    process that reads the search's journal replays these calls on its own instance. No call should take more than
    O(log n) time for n trials.
    """

    def next_work(self) -> Work | None:
        """Return the next work that no worker does yet, or None if there is none now. The call changes nothing.

        Work for a trial whose number is one higher than all before creates that trial.
        """

    def start(self, work: Work) -> None:
        """Record that `work`, which `next_work` has just returned, is being done.

        The method need not check that `next_work` has returned it.
        """

    def report(self, trial: int, value: float) -> None:
        """Record that the trial's work is done; `value`: the searcher's metric, where NaN is worse than any number."""

    def end(self, trial: int, how: Exit) -> None:
        """Record that the trial has ended for good and gets no more work."""

    def give_back(self, trial: int) -> None:
        """Record that the trial's work was interrupted: `next_work` must return the same work again."""

    def is_closed(self, trial: int) -> bool:
        """Return whether the trial will never get work again."""

    @property
    def finished(self) -> bool:
        """Whether no work is being done and there will be no more."""

    @property
    def progress(self) -> float:
        """The progress from 0 to 1. It never decreases, and is 1 only when the search is finished."""

    @property
    def trials_expected(self) -> int:
        """The number of trials that the search will create, without those that replace trials with invalid
        hyperparameters.
        """


def better(value: float, than: float | None, smaller_is_better: bool) -> bool:
    """Return whether the value `value` of the searcher's metric is strictly better than the value `than`.

    NaN is never better; any number is better than None or NaN.
    """
    if math.isnan(value):
        return False
    if than is None or math.isnan(than):
        return True
    return value < than if smaller_is_better else value > than


class Trials:
    """The trials of a search and their states: working, waiting with work that is not being done, or closed."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        """Number of trials to create, including replacements of invalid ones."""
        self.created = 0
        """Number of existing trials."""
        self.working: dict[int, Work] = {}
        """The work that is being done, by trial."""
        self.closed: set[int] = set()
        """The trials that get no more work."""
        self._waiting: dict[int, Work] = {}
        self._order: list[tuple[int, int]] = []
        """Sort keys of the waiting work: the longest first, then the oldest trial."""

    def waiting_work(self) -> Work | None:
        """Return the waiting work that is first in order, or None."""
        return self._waiting[self._order[0][1]] if self._order else None

    def new_trial(self) -> int | None:
        """Return the number of the trial to create next, or None if enough were created."""
        return self.created + 1 if self.created < self.wanted else None

    def start(self, work: Work) -> None:
        """Mark the work as being done; its trial must be new or without other work."""
        assert work.trial <= self.created + 1, work
        assert work.trial not in self.working, work
        assert work.trial not in self.closed, work
        self._unqueue(work.trial)
        self.created = max(self.created, work.trial)
        self.working[work.trial] = work

    def queue(self, work: Work) -> None:
        """Add work that is to be done."""
        self._waiting[work.trial] = work
        insort(self._order, _place(work))

    def give_back(self, trial: int) -> None:
        """Queue the work of the trial again."""
        self.queue(self.working.pop(trial))

    def close(self, trial: int) -> None:
        """Drop the trial's work, and mark the trial as closed."""
        self.working.pop(trial, None)
        self._unqueue(trial)
        self.closed.add(trial)

    def reopen(self, work: Work) -> None:
        """Queue work for a closed trial."""
        self.closed.remove(work.trial)
        self.queue(work)

    def replace(self, trial: int) -> None:
        """Close the trial, and create another one in its place later."""
        self.close(trial)
        self.wanted += 1

    def is_under_way(self, trial: int) -> bool:
        """Return whether the trial has work, whether it is waiting or being done."""
        return trial in self.working or trial in self._waiting

    def _unqueue(self, trial: int) -> None:
        if work := self._waiting.pop(trial, None):
            del self._order[bisect_left(self._order, _place(work))]


def _place(work: Work) -> tuple[int, int]:
    """Return the sort key of waiting work: the longest work comes first, then the oldest trial."""
    return -(work.until or 0), work.trial


class FixedSearch:
    """A search method with a fixed number of trials, each trained to its end, whatever its metric.

    The searchers single, random, grid, points and optuna use it, and search methods of users can derive from it.
    """

    def __init__(self, trials: int, until: int | None, *, replaces_invalid: bool = False) -> None:
        """`trials`: number of trials; `until`: their length, or None.

        `replaces_invalid`: whether another trial is created for each one with invalid hyperparameters. A grid has no
        other points for such trials.
        """
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
        """Queue the work of a closed trial again."""
        self._trials.reopen(Work(trial, self._until))

    def is_closed(self, trial: int) -> bool:
        return trial in self._trials.closed

    @property
    def finished(self) -> bool:
        return len(self._trials.closed) == self._trials.wanted

    @property
    def progress(self) -> float:
        replaced = self._trials.wanted - self.trials_expected  # these are closed, too, but are not progress
        return (len(self._trials.closed) - replaced) / self.trials_expected
