from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_det.search.asha import AsyncHalving, Rung, rung_lengths
from hpc_det.search.method import Exit, Work

NAN = math.nan


def promoting(trials: int = 9, *, smaller_is_better: bool = True) -> AsyncHalving:
    """Return a method with rungs 1, 3 and 9 that promotes the best third of each rung."""
    return AsyncHalving([1, 3, 9], trials, divisor=3, smaller_is_better=smaller_is_better, stop_once=False)


def stopping(trials: int = 9, *, smaller_is_better: bool = True) -> AsyncHalving:
    return AsyncHalving([1, 3, 9], trials, divisor=3, smaller_is_better=smaller_is_better, stop_once=True)


def take(method: AsyncHalving) -> Work:
    work = method.next_work()
    assert work
    method.start(work)
    return work


def train(method: AsyncHalving, *values: float) -> None:
    """For each value, take one unit of work and report the value."""
    for value in values:
        method.report(take(method).trial, value)


@pytest.mark.parametrize(
    ("rungs", "divisor", "max_length", "lengths"),
    [
        (1, 4, 50, [50]),
        (5, 4, 16, [1, 4, 16]),  # lengths 0, 0 and 1 would make three rungs of one batch
        (3, 2.5, 10, [1, 4, 10]),
    ],
)
def test_lengths_of_rungs(rungs: int, divisor: float, max_length: int, lengths: list[int]) -> None:
    assert rung_lengths(rungs, divisor, max_length) == lengths


# --- promotion


def test_a_trial_is_promoted_once_it_is_among_the_best_third() -> None:
    method = promoting()
    train(method, 0.5, 0.3)
    assert method.next_work() == Work(3, 1)  # a third of two trials is less than one trial
    train(method, 0.4)
    assert method.next_work() == Work(2, 3)  # trial 2 is the best of three
    train(method, 0.9)
    assert method.next_work() == Work(4, 1)
    train(method, 0.1)
    assert method.next_work() == Work(4, 3)  # trial 2 is the best of four, and has been promoted already
    train(method, 0.6)
    assert method.next_work() == Work(5, 1)


def test_a_paused_trial_is_promoted_when_its_rung_fills() -> None:
    method = promoting()
    train(method, 0.5, 0.6, 0.7)
    assert take(method) == Work(1, 3)
    for work in [take(method) for _ in range(3)]:
        method.report(work.trial, 0.8)
    assert take(method) == Work(2, 3)  # the second best of six
    for work, value in zip([take(method) for _ in range(3)], (0.1, 0.2, 0.9), strict=True):
        method.report(work.trial, value)
    assert [take(method), take(method)] == [Work(7, 3), Work(8, 3)]
    assert method.next_work() is None  # the third best of nine is trial 1


def test_the_highest_rung_is_promoted_from_first() -> None:
    method = promoting(12)
    train(method, 1, 2, 3)
    assert take(method) == Work(1, 3)
    works = [take(method) for _ in range(6)]
    for work in works:
        method.report(work.trial, 0.1 * work.trial)
    assert [take(method), take(method), take(method)] == [Work(4, 3), Work(5, 3), Work(6, 3)]
    method.report(4, 0.4)
    method.report(5, 0.5)
    assert take(method) == Work(10, 1)
    method.report(10, 0.05)
    method.report(6, 0.6)
    assert [take(method), take(method), take(method)] == [Work(4, 9), Work(10, 3), Work(11, 1)]


def test_who_reaches_the_last_rung_is_closed_and_others_only_at_the_end() -> None:
    method = AsyncHalving([1, 3], 3, divisor=3, smaller_is_better=True, stop_once=False)
    train(method, 3, 1, 2)
    assert [method.is_closed(trial) for trial in (1, 2, 3, 4)] == [False] * 4
    assert take(method) == Work(2, 3)
    assert not method.finished
    method.report(2, 1)
    assert method.finished
    assert [method.is_closed(trial) for trial in (1, 2, 3, 4)] == [True, True, True, False]


def test_larger_may_be_better() -> None:
    method = promoting(smaller_is_better=False)
    train(method, 0.5, 0.9, 0.7)
    assert method.next_work() == Work(2, 3)


@pytest.mark.parametrize("smaller_is_better", [True, False])
def test_nan_is_worse_than_infinity(smaller_is_better: bool) -> None:
    worst = math.inf if smaller_is_better else -math.inf
    method = promoting(smaller_is_better=smaller_is_better)
    train(method, NAN, worst, NAN)
    assert method.next_work() == Work(2, 3)


def test_of_equal_values_the_first_that_arrived_is_better() -> None:
    method = promoting()
    works = [take(method) for _ in range(3)]
    for work in reversed(works):
        method.report(work.trial, 0.5)
    assert method.next_work() == Work(3, 3)


def test_a_failed_trial_counts_as_the_worst_of_its_rung() -> None:
    method = promoting(3)
    train(method, 5)
    for how in (Exit.FAILED, Exit.COMPLETED):
        method.end(take(method).trial, how)
    assert method.is_closed(2)
    assert take(method) == Work(1, 3)
    method.report(1, 5)
    assert method.finished


def test_nobody_is_promoted_in_place_of_a_failed_trial_that_would_be() -> None:
    method = promoting(3)
    for _ in range(3):
        method.end(take(method).trial, Exit.FAILED)
    assert method.next_work() is None
    assert (method.finished, method.progress) == (True, 1)


def test_a_paused_trial_may_end() -> None:
    method = promoting(3)
    train(method, 1, 2)
    method.end(1, Exit.FAILED)
    train(method, 3)
    assert method.next_work() is None  # trial 1 keeps its rank: the best third has not changed
    assert method.finished


def test_an_invalid_trial_is_replaced_and_was_never_there() -> None:
    method = promoting(3)
    train(method, 1, 2, 3)
    assert take(method) == Work(1, 3)
    method.end(1, Exit.INVALID_HP)
    assert take(method) == Work(4, 1)
    method.report(4, 4)
    assert take(method) == Work(2, 3)
    method.report(2, 2)
    assert method.finished
    assert method.trials_expected == 3


def test_a_paused_trial_may_turn_out_to_be_invalid() -> None:
    method = promoting(3)
    train(method, 1, 2)
    method.end(1, Exit.INVALID_HP)
    train(method, 3, 4)
    assert method.next_work() == Work(2, 3)


def test_work_given_back_is_named_again_before_anything_else() -> None:
    method = promoting()
    train(method, 1, 2, 3)
    assert [take(method), take(method)] == [Work(1, 3), Work(4, 1)]
    method.give_back(4)
    method.give_back(1)
    assert [take(method), take(method), take(method)] == [Work(1, 3), Work(4, 1), Work(5, 1)]
    method.give_back(1)
    method.end(1, Exit.FAILED)
    assert method.next_work() == Work(6, 1)


# --- stopping


def test_a_trial_stops_unless_it_is_among_the_best_third_when_it_arrives() -> None:
    method = stopping()
    train(method, 0.5)
    assert method.next_work() == Work(1, 3)  # the best of one trial is promoted
    assert take(method) == Work(1, 3)
    train(method, 0.6)
    assert method.is_closed(2)
    train(method, 0.4)
    assert take(method) == Work(3, 3)
    train(method, 0.45, 0.55)
    assert method.is_closed(4)  # the second best of four
    assert method.is_closed(5)
    train(method, 0.42)
    assert take(method) == Work(6, 3)  # the second best of six


def test_a_worker_goes_on_with_the_trial_that_it_has() -> None:
    method = stopping()
    for until in (1, 3, 9):
        assert take(method) == Work(1, until)
        method.report(1, 0.5)
    assert method.is_closed(1)
    assert take(method) == Work(2, 1)


def test_stopped_trials_are_closed_at_once() -> None:
    method = stopping(2)
    train(method, 1, 1, 1)
    assert method.is_closed(1)
    assert not method.finished
    train(method, 2)
    assert method.finished


def test_failures_and_invalid_trials_where_trials_stop() -> None:
    method = stopping(3)
    method.end(take(method).trial, Exit.FAILED)
    train(method, 0.5)
    assert take(method) == Work(2, 3)
    method.end(2, Exit.INVALID_HP)
    train(method, 0.7)
    assert take(method) == Work(3, 3)  # the best of two: the failed trial and itself
    method.give_back(3)
    method.end(3, Exit.FAILED)
    assert take(method) == Work(4, 1)
    method.report(4, 0.8)
    assert method.is_closed(4)
    assert method.finished


# --- progress


def test_progress_is_the_training_that_is_expected() -> None:
    method = promoting()
    assert method.length_expected == 9 * 1 + 3 * 2 + 1 * 6
    train(method, 1, 2, 3)
    assert method.progress == 3 / 21
    train(method, 1)
    assert method.progress == 5 / 21


EVENTS = st.sampled_from(["settle", "pause", "pause", "unpause", "promote", "forget"])
VALUES = st.one_of(st.sampled_from([0.0, 1.0]), st.floats())


@pytest.mark.integration
@given(st.lists(st.tuples(EVENTS, VALUES, st.integers(0, 99)), max_size=80), st.floats(1.1, 4))
def test_a_rung_ranks_as_a_plain_list_does(story: list[tuple[str, float, int]], divisor: float) -> None:
    """The model is a list of [value, trial] in order of arrival, sorted at each query; Python's sort is stable."""
    rung, arrived, paused = Rung(1, divisor), dict[int, float](), set[int]()

    def ranked() -> list[int]:
        return sorted(arrived, key=lambda trial: (math.isnan(arrived[trial]), arrived[trial]))

    for trial, (event, value, nth) in enumerate(story, start=1):
        if event in ("settle", "pause"):
            arrived[trial] = value
            if event == "settle":
                settled = [other for other in ranked() if other not in paused]
                assert rung.settle(trial, value) == settled.index(trial)
            else:
                rung.pause(trial, value)
                paused.add(trial)
        elif event == "forget" and arrived:
            gone = sorted(arrived)[nth % len(arrived)]
            rung.forget(gone)
            paused.discard(gone)
            del arrived[gone]
        elif event == "unpause" and paused:
            settling = sorted(paused)[nth % len(paused)]
            rung.unpause(settling)
            paused.remove(settling)
        elif event == "promote" and (best := rung.promotable):
            rung.unpause(best)
            paused.remove(best)
        share = int(len(arrived) / divisor)
        assert rung.share == share
        assert rung.promotable == next((other for other in ranked()[:share] if other in paused), None)


def test_promotions_stay_in_order_when_many_others_leave() -> None:
    rung, draws = Rung(1, 1), random.Random(1)
    values = {trial: draws.random() for trial in range(1, 301)}
    for trial, value in values.items():
        rung.pause(trial, value)
    for trial in draws.sample(sorted(values), 100):
        rung.unpause(trial)
        del values[trial]
    for trial in sorted(values, key=lambda trial: values[trial]):
        assert rung.promotable == trial
        rung.unpause(trial)


def test_forgetting_who_was_never_there_changes_nothing() -> None:
    rung = Rung(1, 1)
    rung.settle(1, 0.0)
    rung.forget(2)
    assert rung.share == 1
