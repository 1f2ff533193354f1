"""Invariants of every search method, for any order of events."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_det.search.by_name import search_method
from hpc_det.search.method import Exit, SearchMethod, Work, better
from tests.facts import refused

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
    """A search method with its simulated workers, and checks of its invariants."""

    method: SearchMethod
    working: dict[int, Work] = field(default_factory=dict)
    reached: dict[int, list[int]] = field(default_factory=dict)
    """The lengths at which each trial reported."""
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
        """Take work and report values until the method has finished."""
        while not self.method.finished:
            self.take()
            if self.working and (len(self.working) > 3 or self.method.next_work() is None):
                trial = min(self.working)
                self.report(value(trial), sorted(self.working).index(trial))
            self._check_progress()


@pytest.mark.integration
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


@pytest.mark.integration
@pytest.mark.parametrize("name", SEARCHERS)
@given(STORIES)
def test_the_same_calls_have_the_same_answers(name: str, story: list[Any]) -> None:
    one, other = Search(method_of(name)), Search(method_of(name))
    for search in (one, other):
        search.live(story)
        search.finish()
    assert one.log == other.log


@pytest.mark.integration
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
    """The test counts at each promotion, from all values that were reported at the rung below."""
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


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("value", "than", "if_smaller", "if_larger"),
    [
        (1.0, 2.0, True, False),
        (2.0, 1.0, False, True),
        (1.0, 1.0, False, False),
        (1.0, None, True, True),
        (1.0, NAN, True, True),
        (NAN, 1.0, False, False),
        (NAN, None, False, False),
        (NAN, NAN, False, False),
        (INF, 1.0, False, True),
        (-INF, 1.0, True, False),
        (INF, None, True, True),
    ],
)
def test_better_is_strict_and_nan_never_is(value: float, than: float | None, if_smaller: bool, if_larger: bool) -> None:
    assert better(value, than, smaller_is_better=True) is if_smaller
    assert better(value, than, smaller_is_better=False) is if_larger


def fixed(name: str, points: int | None = None, **settings: Any) -> SearchMethod:
    return search_method({"name": name, "max_length": {"epochs": 7}, **settings}, points)


def take(method: SearchMethod) -> Work | None:
    if work := method.next_work():
        method.start(work)
    return work


@pytest.mark.parametrize(
    ("method", "trials"),
    [
        (fixed("single"), 1),
        (fixed("random", max_trials=3), 3),
        (fixed("grid", points=3), 3),
        (fixed("points", points=2), 2),
    ],
)
def test_every_trial_trains_once_and_to_the_end(method: SearchMethod, trials: int) -> None:
    assert (method.trials_expected, method.progress, method.finished) == (trials, 0, False)
    assert [take(method) for _ in range(trials + 1)] == [*(Work(k, 7) for k in range(1, trials + 1)), None]
    for trial in range(1, trials + 1):
        assert not method.is_closed(trial)
        assert not method.finished
        method.report(trial, math.nan)
        assert method.is_closed(trial)
        assert method.progress == trial / trials
    assert method.finished


def test_a_trial_without_a_length_trains_to_its_own_end() -> None:
    method = fixed("random", max_trials=1, max_length=None)
    assert take(method) == Work(1, None)
    method.end(1, Exit.COMPLETED)
    assert method.finished


def test_work_that_was_given_back_comes_before_new_trials_the_oldest_first() -> None:
    method = fixed("random", max_trials=4)
    for _ in range(3):
        take(method)
    method.give_back(3)
    method.give_back(1)
    assert [take(method) for _ in range(4)] == [Work(1, 7), Work(3, 7), Work(4, 7), None]


def test_a_trial_may_end_when_nobody_works_on_it() -> None:
    method = fixed("single")
    take(method)
    method.give_back(1)
    method.end(1, Exit.FAILED)
    assert method.next_work() is None
    assert method.finished


@pytest.mark.parametrize(("name", "replaced"), [("random", True), ("grid", False), ("points", False)])
def test_only_random_replaces_invalid_hyperparameters(name: str, replaced: bool) -> None:
    method = fixed(name, points=2, max_trials=2)
    take(method)
    take(method)
    method.end(1, Exit.INVALID_HP)
    method.report(2, 0.0)
    assert method.is_closed(1)
    assert method.trials_expected == 2
    assert (method.finished, method.progress) == ((False, 0.5) if replaced else (True, 1))
    assert take(method) == (Work(3, 7) if replaced else None)


@pytest.mark.parametrize("how", [Exit.FAILED, Exit.COMPLETED])
def test_other_ends_are_final(how: Exit) -> None:
    method = fixed("random", max_trials=1)
    take(method)
    method.end(1, how)
    assert (method.finished, method.progress) == (True, 1)


def test_an_unknown_searcher_is_our_own_mistake() -> None:
    with refused(ValueError, "'pbt'"):
        search_method({"name": "pbt"})
