from __future__ import annotations

import math
from typing import Any

import pytest

from hpc_det.search.by_name import search_method
from hpc_det.search.method import Exit, SearchMethod, Work


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
    with pytest.raises(ValueError, match="no searcher is called 'pbt'"):
        search_method({"name": "pbt"})
