"""Adaptive ASHA: several searches by successive halving in parallel, which differ in how early they stop trials."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any

from hpc_det.search.asha import AsyncHalving, rung_lengths
from hpc_det.search.method import Exit, Work


@dataclass
class Bracket:
    """One of the searches by halving. Within a bracket, its trials are numbered from 1."""

    search: AsyncHalving
    share: int
    """Number of its trials that should train at the same time."""
    numbers: list[int] = field(default_factory=list)
    """The number in the whole search of each of its trials; the index is the number in the bracket, less 1."""


class AdaptiveSearch:
    """Adaptive ASHA as a search method: it distributes workers and trials over brackets."""

    def __init__(self, brackets: Sequence[Bracket]) -> None:
        self.brackets = brackets
        self._bracket_of: list[Bracket] = []
        """The bracket of each trial; the index is the number of the trial, less 1."""
        self._own: list[int] = []
        """The number of each trial in its bracket."""
        self._turn: Bracket | None = None
        """The bracket whose work `next_work` returned last."""

    def next_work(self) -> Work | None:
        """Return work of the first bracket that has some; those that train fewer trials than their share come first."""
        full = []
        for bracket in self.brackets:
            if bracket.search.working >= bracket.share:
                full.append(bracket)
            elif own := bracket.search.next_work():
                return self._numbered(bracket, own)
        for bracket in full:
            if own := bracket.search.next_work():
                return self._numbered(bracket, own)
        return None

    def start(self, work: Work) -> None:
        index = work.trial - 1
        if index >= len(self._own):
            self._create()
        self._bracket_of[index].search.start(Work(self._own[index], work.until))

    def report(self, trial: int, value: float) -> None:
        self._bracket_of[trial - 1].search.report(self._own[trial - 1], value)

    def end(self, trial: int, how: Exit) -> None:
        self._bracket_of[trial - 1].search.end(self._own[trial - 1], how)

    def give_back(self, trial: int) -> None:
        self._bracket_of[trial - 1].search.give_back(self._own[trial - 1])

    def is_closed(self, trial: int) -> bool:
        if trial > len(self._own):
            return False
        return self._bracket_of[trial - 1].search.is_closed(self._own[trial - 1])

    @property
    def finished(self) -> bool:
        return all(bracket.search.finished for bracket in self.brackets)

    @property
    def progress(self) -> float:
        if self.finished:
            return 1.0
        parts = [(bracket.search.length_expected, bracket.search.progress) for bracket in self.brackets]
        return sum(length * progress for length, progress in parts) / sum(length for length, _ in parts)

    @property
    def trials_expected(self) -> int:
        return sum(bracket.search.trials_expected for bracket in self.brackets)

    def _create(self) -> None:
        """Add a trial to the bracket whose work `next_work` returned last; every `start` follows a `next_work`."""
        assert self._turn
        self._turn.numbers.append(len(self._own) + 1)
        self._bracket_of.append(self._turn)
        self._own.append(len(self._turn.numbers))

    def _numbered(self, bracket: Bracket, own: Work) -> Work:
        """Return the next work of this bracket, with the trial's number in the whole search."""
        self._turn = bracket
        is_new = own.trial > len(bracket.numbers)
        return Work(len(self._own) + 1 if is_new else bracket.numbers[own.trial - 1], own.until)


def adaptive_asha(searcher: Mapping[str, Any], max_length: int, **halving: Any) -> AdaptiveSearch:
    """Return the method for this configuration. `halving`: further arguments for the AsyncHalving of each bracket."""
    divisor, max_trials = searcher["divisor"], searcher["max_trials"]
    rungs = searcher["bracket_rungs"] or bracket_rungs(
        searcher["mode"], most_rungs(searcher["max_rungs"], divisor, max_length, max_trials)
    )
    rungs = sorted(rungs, reverse=True)[:max_trials]
    trials = bracket_trials(max_trials, divisor, rungs)
    shares = concurrency_shares(searcher["max_concurrent_trials"], divisor, trials)
    return AdaptiveSearch(
        [
            Bracket(AsyncHalving(rung_lengths(count, divisor, max_length), own, **halving), share)
            for count, own, share in zip(rungs, trials, shares, strict=True)
        ]
    )


def most_rungs(max_rungs: int, divisor: float, max_length: int, max_trials: int) -> int:
    """Return the number of rungs of the bracket that has the most.

    It is `max_rungs`, or less if the length or the number of trials is too small for as many.
    """
    # Logarithms are rounded as in Determined, so that both create the same brackets.
    return min(max_rungs, *(int(math.log(amount) / math.log(divisor)) + 1 for amount in (max_length, max_trials)))


def bracket_rungs(mode: str, max_rungs: int) -> list[int]:
    """Return the number of rungs of each bracket, in ascending order."""
    first = {"conservative": 1, "standard": (max_rungs - 1) // 2 + 1, "aggressive": max_rungs}[mode]
    return list(range(first, max_rungs + 1))


def bracket_trials(max_trials: int, divisor: float, rungs: Sequence[int]) -> list[int]:
    """Return the number of trials of each bracket, so that all brackets train about as much, and at least one each.

    `rungs`: the number of rungs of each bracket in descending order, for no more brackets than trials. The first
    bracket gets the trials that rounding leaves over.
    """
    weights = [divisor ** (count - 1) / count for count in rungs]
    # Not sum(), which rounds differently since Python 3.12: all readers of a journal must get the same numbers.
    total = reduce(add, weights)
    trials = [max(int(weight / total * max_trials), 1) for weight in weights]
    trials[0] += max(max_trials - sum(trials), 0)
    # The minimum of one trial for each bracket may make too many.
    while sum(trials) > max_trials:
        trials[trials.index(max(trials))] -= 1
    return trials


def concurrency_shares(max_concurrent_trials: int, divisor: float, trials: Sequence[int]) -> list[int]:
    """Return the number of trials of each bracket that should train at the same time, as Determined does.

    `max_concurrent_trials`: 0 sets no limit; `trials`: the number of trials of each bracket.
    """
    if max_concurrent_trials == 0:
        return [max(trials[-1], int(divisor))] * len(trials)
    each, rest = divmod(max(max_concurrent_trials, len(trials)), len(trials))
    return [each + (i < rest) for i in range(len(trials))]
