"""Count attempts, survivals and losses in all tests, and print them at the end of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import pytest

FEWEST_KILLS = 1000
"""Smallest number of kills in a complete run."""
PROPERTY = "chaos"
"""The property of a test's report with its tallies, which brings them to the process that prints the table, whichever
process ran the test.
"""


T = TypeVar("T")


@dataclass(frozen=True)
class Amount:
    is_all: bool

    def of(self, everything: Sequence[T], sample: int) -> Sequence[T]:
        """Return all, or `sample` of them, evenly spaced."""
        if self.is_all or len(everything) <= sample:
            return everything
        return [everything[(2 * number + 1) * len(everything) // (2 * sample)] for number in range(sample)]


SAMPLED_IN_LONG = pytest.mark.parametrize(
    "amount",
    [
        pytest.param(False, id="sample", marks=pytest.mark.long),
        pytest.param(True, id="all", marks=pytest.mark.chaos),
    ],
    indirect=True,
)


@dataclass(frozen=True)
class Tally:
    """The counts of one test."""

    tried: dict[str, int] = field(default_factory=dict)
    survived: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """Count one more attempt of `what`. It has survived if the block, which checks the promises, does not raise."""
        self.tried[what] = self.tried.get(what, 0) + 1
        yield
        self.survived[what] = self.survived.get(what, 0) + 1

    @contextmanager
    def trying_each(self, all_of_it: Iterable[str]) -> Iterator[None]:
        """Count several attempts at once."""
        with ExitStack() as trials:
            for what in all_of_it:
                trials.enter_context(self.trying(what))
            yield


def kills(tallies: Iterable[Tally]) -> int:
    """Return the number of kills that were tried: the names of their rows contain the word "killed"."""
    return sum(count for tally in tallies for what, count in tally.tried.items() if "killed" in what.split())


def shown(tallies: Sequence[Tally], skipped: Sequence[str] = ()) -> list[str]:
    """Return the lines of the table; `skipped`: tests that tried nothing."""
    tried, survived = Counter[str](), Counter[str]()
    for tally in tallies:
        tried.update(tally.tried)
        survived.update(tally.survived)
    rows = [("WHAT", "TRIED", "SURVIVED", "LOST")]
    rows += [(what, str(tried[what]), str(survived[what]), str(tried[what] - survived[what])) for what in sorted(tried)]
    rows += [(test, "skipped", "-", "-") for test in sorted(skipped)]
    rows.append(("all", str(tried.total()), str(survived.total()), str(tried.total() - survived.total())))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [*lines, f"{kills(tallies)} of them were kills"]
