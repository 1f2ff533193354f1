"""What every search method keeps, whatever happens in whatever order."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_det.search.by_name import search_method
from hpc_det.search.method import Exit, SearchMethod, Work

COMMON = {"metric": "loss", "smaller_is_better": True}
TRIALS = 12
HALVING = {**COMMON, "max_length": {"batches": 64}, "max_trials": TRIALS, "divisor": 2.5, "num_rungs": 4}
ADAPTIVE = {**HALVING, "name": "adaptive_asha", "mode": "conservative", "max_rungs": 4, "bracket_rungs": []}
SEARCHERS: dict[str, dict[str, Any]] = {
    "single": {**COMMON, "name": "single", "max_length": {"batches": 64}},
    "random": {**COMMON, "name": "random", "max_length": None, "max_trials": TRIALS},
    "grid": {**COMMON, "name": "grid", "max_length": {"batches": 64}},
    "points": {**COMMON, "name": "points", "max_length": {"batches": 64}},
    "async_halving": {**HALVING, "name": "async_halving", "stop_once": False},
    "async_halving, stopping": {**HALVING, "name": "async_halving", "stop_once": True},
    "adaptive_asha": {**ADAPTIVE, "max_concurrent_trials": 5, "stop_once": False},
    "adaptive_asha, stopping": {**ADAPTIVE, "max_concurrent_trials": 0, "stop_once": True},
}
VALUES = st.one_of(st.sampled_from([0.0, 1.0, 2.0]), st.floats())
EVENTS = st.one_of(
    st.tuples(st.just("take"), st.none()),
    st.tuples(st.just("report"), VALUES),
    st.tuples(st.just("report"), VALUES),
    st.tuples(st.just("end"), st.sampled_from(Exit)),
    st.tuples(st.just("give_back"), st.none()),
)
STORIES = st.lists(st.tuples(EVENTS, st.integers(0, 99)), max_size=120)


def method_of(name: str) -> SearchMethod:
    return search_method(SEARCHERS[name], TRIALS)


@dataclass
class Search:
    """A method, what everybody does for it, and what must be true of it."""

    method: SearchMethod
    working: dict[int, Work] = field(default_factory=dict)
    reached: dict[int, list[int]] = field(default_factory=dict)
    """The lengths that a trial reported at."""
    ended: set[int] = field(default_factory=set)
    replaced: int = 0
    progress: float = 0.0
    log: list[object] = field(default_factory=list)

    def take(self, _: None = None) -> None:
        work = self.method.next_work()
        assert work == self.method.next_work()
        self.log.append(work)
        if work:
            self._check(work)
            self.method.start(work)
            self.working[work.trial] = work

    def _check(self, work: Work) -> None:
        assert work.trial not in self.working
        assert work.trial not in self.ended
        assert not self.method.is_closed(work.trial)
        assert work.trial <= len(self.reached) + 1
        lengths = self.reached.setdefault(work.trial, [])
        assert not lengths or (work.until or 0) > lengths[-1]
        assert len(self.reached) <= self.method.trials_expected + self.replaced

    def report(self, value: float, nth: int) -> None:
        work = self._nth(nth)
        self.reached[work.trial].append(work.until or 0)
        self.method.report(work.trial, value)

    def end(self, how: Exit, nth: int) -> None:
        trial = self._nth(nth).trial
        self.ended.add(trial)
        self.replaced += how is Exit.INVALID_HP
        self.method.end(trial, how)
        assert self.method.is_closed(trial)

    def give_back(self, _: None, nth: int) -> None:
        self.method.give_back(self._nth(nth).trial)

    def _nth(self, nth: int) -> Work:
        return self.working.pop(sorted(self.working)[nth % len(self.working)])

    def live(self, story: list[Any]) -> None:
        for (event, argument), nth in story:
            if event == "take":
                self.take()
            elif self.working:
                getattr(self, event)(argument, nth)
            self._check_progress()

    def _check_progress(self) -> None:
        assert self.progress <= self.method.progress <= 1
        assert (self.method.progress == 1) == self.method.finished
        self.progress = self.method.progress

    def finish(self, value: Callable[[int], float] = float) -> None:
        """Take and report until there is nothing more."""
        while not self.method.finished:
            self.take()
            if self.working and (len(self.working) > 3 or self.method.next_work() is None):
                trial = min(self.working)
                self.report(value(trial), sorted(self.working).index(trial))
            self._check_progress()


@pytest.mark.parametrize("name", SEARCHERS)
@given(STORIES)
def test_whatever_happens_no_work_is_given_twice_and_the_search_ends(name: str, story: list[Any]) -> None:
    search = Search(method_of(name))
    search.live(story)
    search.finish()
    assert search.method.next_work() is None
    assert search.progress == 1
    assert all(search.method.is_closed(trial) for trial in search.reached)
    assert len(search.reached) >= search.method.trials_expected


@pytest.mark.parametrize("name", SEARCHERS)
@given(STORIES)
def test_the_same_calls_have_the_same_answers(name: str, story: list[Any]) -> None:
    one, other = Search(method_of(name)), Search(method_of(name))
    for search in (one, other):
        search.live(story)
        search.finish()
    assert one.log == other.log


@pytest.mark.parametrize("name", [name for name in SEARCHERS if "halving" in name])
@given(STORIES)
def test_nobody_skips_a_rung(name: str, story: list[Any]) -> None:
    search = Search(method_of(name))
    search.live(story)
    search.finish()
    lengths = [4, 10, 25, 64]
    assert all(reached == lengths[: len(reached)] for reached in search.reached.values())


@given(st.lists(st.tuples(st.booleans(), VALUES, st.integers(0, 99)), max_size=150), st.booleans())
def test_every_promotion_is_of_one_of_the_best(story: list[tuple[bool, float, int]], smaller_is_better: bool) -> None:
    """Counted anew at each promotion, from all values that were reported at the rung below."""
    method = search_method({**SEARCHERS["async_halving"], "smaller_is_better": smaller_is_better, "max_trials": 40})
    values: dict[int, list[tuple[int, float]]] = {}
    reached: dict[int, int] = {}
    working: list[Work] = []

    def worse(value: float) -> float:
        return math.inf if math.isnan(value) else value if smaller_is_better else -value

    for is_report, value, nth in story:
        if is_report and working:
            work = working.pop(nth % len(working))
            method.report(work.trial, value)
            values.setdefault(work.until or 0, []).append((work.trial, worse(value)))
            reached[work.trial] = work.until or 0
        elif work := method.next_work():  # type: ignore[assignment]
            if below := reached.get(work.trial):
                own = dict(values[below])[work.trial]
                assert sum(other < own for _, other in values[below]) < int(len(values[below]) / 2.5)
            method.start(work)
            working.append(work)


@pytest.mark.parametrize("stop_once", [False, True])
def test_the_best_trial_gets_to_the_end(stop_once: bool) -> None:
    searcher = {**SEARCHERS["async_halving"], "num_rungs": 3, "stop_once": stop_once}
    search = Search(search_method(searcher))
    search.finish(value=lambda trial: abs(trial - 4))
    assert search.reached[4] == [10, 25, 64]


def test_who_starts_what_was_not_named_is_wrong() -> None:
    for name in SEARCHERS:
        with pytest.raises(AssertionError):
            method_of(name).start(Work(2, 64))
