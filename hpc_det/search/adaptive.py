"""Adaptive ASHA: several searches by successive halving side by side, from brackets that stop early to patient ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any

from hpc_det.search.asha import AsyncHalving, rung_lengths
from hpc_det.search.method import Exit, Work


@dataclass
class Bracket:
    """One of the searches; it numbers its trials for itself."""

    search: AsyncHalving
    share: int
    """How many trials of it should train at a time."""
    numbers: list[int] = field(default_factory=list)
    """Of each of its trials, the number in the whole search."""


class AdaptiveSearch:
    def __init__(self, brackets: Sequence[Bracket]) -> None:
        self.brackets = brackets
        self._homes: list[tuple[Bracket, int]] = []
        """Of each trial, its bracket and its number there."""
        self._turn: Bracket | None = None
        """Whose work was named last."""

    def next_work(self) -> Work | None:
        for bracket in self._in_turn():
            if own := bracket.search.next_work():
                self._turn = bracket
                return self._numbered(bracket, own)
        return None

    def start(self, work: Work) -> None:
        if work.trial > len(self._homes):
            self._create()
        bracket, own = self._homes[work.trial - 1]
        bracket.search.start(Work(own, work.until))

    def report(self, trial: int, value: float) -> None:
        bracket, own = self._homes[trial - 1]
        bracket.search.report(own, value)

    def end(self, trial: int, how: Exit) -> None:
        bracket, own = self._homes[trial - 1]
        bracket.search.end(own, how)

    def give_back(self, trial: int) -> None:
        bracket, own = self._homes[trial - 1]
        bracket.search.give_back(own)

    def is_closed(self, trial: int) -> bool:
        if trial > len(self._homes):
            return False
        bracket, own = self._homes[trial - 1]
        return bracket.search.is_closed(own)

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
        """In the bracket whose trial was named."""
        assert self._turn
        self._turn.numbers.append(len(self._homes) + 1)
        self._homes.append((self._turn, len(self._turn.numbers)))

    def _in_turn(self) -> Iterator[Bracket]:
        """First those that train fewer trials than their share."""
        others = []
        for bracket in self.brackets:
            if bracket.search.working < bracket.share:
                yield bracket
            else:
                others.append(bracket)
        yield from others

    def _numbered(self, bracket: Bracket, own: Work) -> Work:
        """The bracket's own work, with the trial's number in the whole search."""
        is_new = own.trial > len(bracket.numbers)
        return Work(len(self._homes) + 1 if is_new else bracket.numbers[own.trial - 1], own.until)


def adaptive_asha(searcher: Mapping[str, Any], max_length: int, **halving: Any) -> AdaptiveSearch:
    """`halving`: what every bracket's AsyncHalving takes."""
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
    """No more than the length can be divided into and the trials can fill; with Determined's rounding of logarithms."""
    return min(max_rungs, *(int(math.log(amount) / math.log(divisor)) + 1 for amount in (max_length, max_trials)))


def bracket_rungs(mode: str, max_rungs: int) -> list[int]:
    """How many rungs each bracket has."""
    first = {"conservative": 1, "standard": (max_rungs - 1) // 2 + 1, "aggressive": max_rungs}[mode]
    return list(range(first, max_rungs + 1))


def bracket_trials(max_trials: int, divisor: float, rungs: Sequence[int]) -> list[int]:
    """How many trials each bracket creates, so that all train about as much, every bracket at least one.

    `rungs`: of each bracket, from many to few, no more brackets than trials. What rounding leaves goes to the first.
    """
    weights = [divisor ** (count - 1) / count for count in rungs]
    total = reduce(add, weights)  # sum() rounds otherwise since Python 3.12, and all readers of a journal must agree
    trials = [max(int(weight / total * max_trials), 1) for weight in weights]
    trials[0] += max(max_trials - sum(trials), 0)
    while sum(trials) > max_trials:
        trials[trials.index(max(trials))] -= 1
    return trials


def concurrency_shares(max_concurrent_trials: int, divisor: float, trials: Sequence[int]) -> list[int]:
    """How many trials of each bracket should train at a time; 0 as the sum: no limit."""
    if max_concurrent_trials == 0:
        return [max(trials[-1], int(divisor))] * len(trials)
    each, rest = divmod(max(max_concurrent_trials, len(trials)), len(trials))
    return [each + (i < rest) for i in range(len(trials))]
