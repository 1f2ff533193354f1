from __future__ import annotations

import math
import statistics
import time

import pytest

from hpc_det.search.by_name import search_method
from hpc_det.search.method import SearchMethod, Work
from hpc_det.search.simulate import at_random, simulate
from tests.search.test_adaptive import ADAPTIVE


def random_search(trials: int) -> SearchMethod:
    return search_method({"name": "random", "max_length": {"batches": 10}, "max_trials": trials})


def halving(trials: int, *, stop_once: bool = False) -> SearchMethod:
    return search_method(
        {
            "name": "async_halving",
            "smaller_is_better": True,
            "max_length": {"batches": 9},
            "max_trials": trials,
            "num_rungs": 3,
            "divisor": 3,
            "stop_once": stop_once,
        }
    )


def test_trials_train_side_by_side() -> None:
    played = simulate(random_search(5), at_random(), workers=2, unit_s=60)
    assert played.reached == dict.fromkeys(range(1, 6), 10)
    assert played.seconds == 3 * 600
    assert played.busy == 5 / 6


def test_decisions_are_taken_one_after_the_other() -> None:
    """Two workers begin at 1 and 2 s, end at 11 and 12 s, and each gets its second work a second later."""
    played = simulate(random_search(4), at_random(), workers=2, latency_s=1)
    assert played.decisions == 6
    assert played.seconds == 23
    assert played.busy == 4 * 10 / (2 * 23)


def test_decisions_queue_up_behind_slow_storage() -> None:
    """Each trial trains for 0.1 s; the trials begin at 1, 2, 3 and 4 s."""
    played = simulate(random_search(4), at_random(), workers=2, unit_s=0.01, latency_s=1)
    assert played.seconds == pytest.approx(4.1)


def test_a_play_may_be_cut_off() -> None:
    played = simulate(random_search(100), at_random(), workers=4, ends_s=25)
    assert len(played.reached) == 8
    assert (played.seconds, played.busy) == (25, 1)


def test_a_trial_goes_on_where_it_was() -> None:
    """With one worker, and the first trial as the best: three trials train to 1, one of them is promoted to 3, and so
    on.
    """
    played = simulate(halving(9), lambda work: float(work.trial), workers=1)
    assert sorted(played.reached.items()) == [(1, 9), (2, 3), (3, 3), *((trial, 1) for trial in range(4, 10))]
    assert played.seconds == 9 + 3 + 3 + 6
    assert played.busy == 1


def test_an_idle_worker_gets_work_as_soon_as_there_is_some() -> None:
    """Ten workers for three trials: one trial continues to the end while the other workers wait."""
    played = simulate(halving(3), lambda work: float(work.trial), workers=10)
    assert played.reached == {1: 3, 2: 1, 3: 1}
    assert played.seconds == 3


def test_work_without_a_length_is_one_unit() -> None:
    played = simulate(search_method({"name": "single"}), at_random(), workers=1)
    assert (played.reached, played.seconds) == ({1: None}, 1)


@pytest.mark.parametrize("stop_once", [False, True])
def test_a_search_by_halving_finds_the_best_trial(stop_once: bool) -> None:
    def value(work: Work) -> float:
        return abs(work.trial - 20) + 1 / (work.until or 1)

    played = simulate(halving(81, stop_once=stop_once), value, workers=8)
    assert played.reached[20] == 9
    assert sum(length or 0 for length in played.reached.values()) < 81 * 9 / 2


def test_many_workers_stay_busy_behind_slow_storage() -> None:
    """The benchmark `search` at a tenth of its size; in the full benchmark the share is above 99.9 %."""
    searcher = {**ADAPTIVE, "max_length": {"batches": 60 * 256}, "max_trials": 10_000, "max_concurrent_trials": 50}
    played = simulate(
        search_method({**searcher, "divisor": 4}), at_random(), workers=50, latency_s=0.05, ends_s=4 * 3600
    )
    assert played.busy > 0.999
    assert played.decisions > 500


@pytest.mark.parametrize("stop_once", [False, True])
def test_a_decision_among_thousands_of_trials_takes_no_longer_than_among_few(stop_once: bool) -> None:
    """The goal is 5 ms per decision at 10,000 trials."""
    method, draws, seconds = halving(10_000, stop_once=stop_once), at_random(), []
    while not method.finished:
        began = time.process_time()
        work = method.next_work()
        assert work
        method.start(work)
        method.report(work.trial, draws(work))
        seconds.append(time.process_time() - began)
    assert len(seconds) > 10_000
    assert statistics.median(seconds[-1000:]) < 0.001
    assert math.fsum(seconds) / len(seconds) < 0.005
