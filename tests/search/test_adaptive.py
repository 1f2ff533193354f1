from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_det.search.adaptive import bracket_trials, concurrency_shares, most_rungs
from hpc_det.search.by_name import search_method
from hpc_det.search.method import Exit, SearchMethod, Work

ADAPTIVE = {
    "name": "adaptive_asha",
    "metric": "loss",
    "smaller_is_better": True,
    "max_length": {"batches": 900},
    "max_trials": 20,
    "max_concurrent_trials": 6,
    "mode": "standard",
    "max_rungs": 5,
    "divisor": 3,
    "bracket_rungs": [],
    "stop_once": False,
}


def adaptive(**settings: Any) -> SearchMethod:
    return search_method({**ADAPTIVE, **settings})


def take(method: SearchMethod) -> Work:
    work = method.next_work()
    assert work
    method.start(work)
    return work


# --- numbers; tests/conformance/searches.py has Determined's


def test_rounding_up_to_one_trial_in_each_bracket_does_not_exceed_max_trials() -> None:
    assert bracket_trials(3, 4, [5, 2, 1]) == [1, 1, 1]


def test_the_trials_of_brackets_are_the_same_in_every_version_of_python() -> None:
    """The login node and a container may run different versions. The last bits of a sum decide this case."""
    assert bracket_trials(439, 3.5, [5, 4, 3]) == [296, 104, 39]


@given(
    st.floats(1.5, 8), st.integers(1, 200), st.lists(st.integers(1, 6), min_size=1, max_size=8).map(sorted).map(list)
)
def test_brackets_have_all_the_trials_and_each_has_one(divisor: float, max_trials: int, rungs: list[int]) -> None:
    trials = bracket_trials(max_trials, divisor, rungs[::-1][:max_trials])
    assert sum(trials) == max_trials
    assert min(trials) >= 1


def test_each_bracket_has_a_share_of_at_least_one() -> None:
    assert concurrency_shares(1, 4, [9, 3, 1]) == [1, 1, 1]


@pytest.mark.parametrize(
    ("length", "trials", "rungs"), [(10_000, 10_000, 5), (16, 10_000, 3), (10_000, 15, 2), (1, 1, 1)]
)
def test_no_more_rungs_than_the_length_and_the_trials_allow(length: int, trials: int, rungs: int) -> None:
    assert most_rungs(5, 4, length, trials) == rungs


# --- stories


def test_brackets_are_filled_up_to_their_shares_in_turn() -> None:
    """Three brackets: 1, 3 and 9 parts of 900, for 12, 5 and 3 trials; 2 of each at a time."""
    method = adaptive(bracket_rungs=[1, 2, 3])
    assert method.trials_expected == 20
    works = [take(method) for _ in range(8)]
    assert works == [
        *(Work(1, 100), Work(2, 100)),
        *(Work(3, 300), Work(4, 300)),
        *(Work(5, 900), Work(6, 900)),
        *(Work(7, 100), Work(8, 100)),  # above the shares: the first bracket with work
    ]
    method.report(4, 0.5)
    assert take(method) == Work(9, 300)
    method.end(6, Exit.FAILED)
    assert take(method) == Work(10, 900)


def test_a_bracket_promotes_its_own_trials_by_their_numbers_in_the_search() -> None:
    method = adaptive(bracket_rungs=[3, 2])
    for _ in range(6):
        take(method)
    for trial, value in ((4, 0.3), (5, 0.2), (6, 0.1), (1, 0.9)):
        method.report(trial, value)
    assert take(method) == Work(7, 100)
    assert take(method) == Work(6, 900)
    method.give_back(6)
    assert take(method) == Work(6, 900)
    method.end(6, Exit.INVALID_HP)
    assert method.is_closed(6)
    assert not method.is_closed(8)
    assert take(method) == Work(8, 300)


def test_more_brackets_than_trials_are_left_out() -> None:
    method = adaptive(bracket_rungs=[5, 4, 3, 2, 1], max_trials=2, divisor=3)
    assert method.trials_expected == 2
    assert [take(method), take(method), method.next_work()] == [Work(1, 11), Work(2, 33), None]
    method.report(1, 1.0)
    method.report(2, 1.0)
    assert (method.finished, method.progress) == (True, 1)
