"""How much is tried, what survived, and what was lost: collected from all tests and printed at the end of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import pytest

FEWEST_KILLS = 1000
"""Of a run of everything."""
PROPERTY = "chaos"
"""Of a test's report: its tallies come to the process that prints the table, whichever process ran the test."""


T = TypeVar("T")


@dataclass(frozen=True)
class Amount:
    is_all: bool

    def of(self, everything: Sequence[T], sample: int) -> Sequence[T]:
        """All, or `sample` of them, evenly spread."""
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
    """Of one test."""

    tried: dict[str, int] = field(default_factory=dict)
    survived: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """One more trial of `what`. It has survived where the block, which asserts what was promised, ends."""
        self.tried[what] = self.tried.get(what, 0) + 1
        yield
        self.survived[what] = self.survived.get(what, 0) + 1

    @contextmanager
    def trying_each(self, all_of_it: Iterable[str]) -> Iterator[None]:
        """Several trials at once."""
        with ExitStack() as trials:
            for what in all_of_it:
                trials.enter_context(self.trying(what))
            yield


def kills(tallies: Iterable[Tally]) -> int:
    """How many were tried: their rows have the word "killed" in their names."""
    return sum(count for tally in tallies for what, count in tally.tried.items() if "killed" in what.split())


def shown(tallies: Sequence[Tally], skipped: Sequence[str] = ()) -> list[str]:
    """The table; `skipped`: tests that tried nothing."""
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
