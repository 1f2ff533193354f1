"""Adaptive ASHA: several searches by successive halving in parallel, which differ in how early they stop trials."""

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
        self._homes: list[tuple[Bracket, int]] = []
        """The bracket of each trial, and the number of the trial in that bracket."""
        self._turn: Bracket | None = None
        """The bracket whose work `next_work` returned last."""

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
        """Add a trial to the bracket whose work `next_work` returned last; every `start` follows a `next_work`."""
        assert self._turn
        self._turn.numbers.append(len(self._homes) + 1)
        self._homes.append((self._turn, len(self._turn.numbers)))

    def _in_turn(self) -> Iterator[Bracket]:
        """Yield the brackets, first those that train fewer trials than their share."""
        others = []
        for bracket in self.brackets:
            if bracket.search.working < bracket.share:
                yield bracket
            else:
                others.append(bracket)
        yield from others

    def _numbered(self, bracket: Bracket, own: Work) -> Work:
        """Return the work of a bracket with the trial's number in the whole search."""
        is_new = own.trial > len(bracket.numbers)
        return Work(len(self._homes) + 1 if is_new else bracket.numbers[own.trial - 1], own.until)


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
