"""Sums over the profile lines of ranks."""

from __future__ import annotations

import pytest

from hpc_det.store.folders import TrialFolder
from hpc_det.view.performance.timings import Part, read_timings, samples_per_second, total
from tests.view.performance.profiles import BATCHES, SECONDS, WALL_S, stretch


def test_stretches_of_a_rank_add_up(trial: TrialFolder) -> None:
    for batches in (100, 200, 300):
        stretch(trial, batches=batches, exposed_s=1.5)
    (stretches,) = read_timings(trial.profile).values()
    spent = total(stretches)
    assert (spent.count, spent.wall_s, spent.exposed_s) == (3 * BATCHES, 3 * WALL_S, 4.5)
    assert spent.seconds == pytest.approx({name: 3 * amount for name, amount in SECONDS.items()})
    assert samples_per_second(stretches) == 640


def test_all_parts_are_the_whole_time(trial: TrialFolder) -> None:
    more = {"callbacks.Log.on_batch_end": 0.05, "validation": 0.0, "of_a_later_version": 0.01}
    stretch(trial, exposed_s=2.0, seconds=more)
    (stretches,) = read_timings(trial.profile).values()
    parts = total(stretches).parts()
    assert sum(parts.values()) == pytest.approx(WALL_S)
    assert parts[Part.COMPUTING] == pytest.approx(9.4 - 2.0)
    assert parts[Part.COMMUNICATING] == pytest.approx(2.0 + 0.1)
    assert parts[Part.CALLBACKS] == pytest.approx(0.05)


def test_what_was_trained_again_counts_once_as_it_was_trained_last(trial: TrialFolder) -> None:
    for rank in (0, 1):
        for batches in (100, 200, 300):
            stretch(trial, rank, batches=batches)
    stretch(trial, 0, batches=200, count=50, attempt=2, host="n5", wall_s=77.0)
    stretch(trial, 0, batches=300, attempt=2, host="n5")
    of_0, of_1 = read_timings(trial.profile).values()
    assert [(its.attempt, its.first, its.batches) for its in of_0] == [(1, 0, 100), (2, 150, 200), (2, 200, 300)]
    assert [its.batches for its in of_1] == [100], "attempt 2 had only one rank"
    assert (total(of_0).host, total(of_0).wall_s) == ("n5", 10 + 77 + 10)


def test_an_attempt_that_begins_earlier_than_the_one_before_makes_more_void(trial: TrialFolder) -> None:
    for attempt, batches in ((1, 100), (1, 200), (2, 300), (3, 200)):
        stretch(trial, batches=batches, attempt=attempt)
    (stretches,) = read_timings(trial.profile).values()
    assert [(its.attempt, its.batches) for its in stretches] == [(1, 100), (3, 200)]


def test_a_trial_that_began_anew_is_measured_by_its_last_attempt_alone(trial: TrialFolder) -> None:
    stretch(trial, 0)
    stretch(trial, 1)
    stretch(trial, 0, attempt=2)
    assert {rank: [its.attempt for its in stretches] for rank, stretches in read_timings(trial.profile).items()} == {
        0: [2]
    }


def test_a_torn_line_is_left_out(trial: TrialFolder) -> None:
    stretch(trial, batches=100)
    with trial.timings(0).open("a") as file:
        file.write('{"time": 17950000')
    stretch(trial, batches=300)
    (stretches,) = read_timings(trial.profile).values()
    assert [its.batches for its in stretches] == [100, 300]


def test_ranks_are_in_the_order_of_their_numbers(trial: TrialFolder) -> None:
    for rank in (10, 2, 0):
        stretch(trial, rank)
    assert list(read_timings(trial.profile)) == [0, 2, 10]


def test_where_some_stretches_do_not_know_communication_those_that_do_tell_it(trial: TrialFolder) -> None:
    stretch(trial, batches=100)
    (stretches,) = read_timings(trial.profile).values()
    assert total(stretches).exposed_s is None
    stretch(trial, batches=400, count=300, exposed_s=0.6)
    (stretches,) = read_timings(trial.profile).values()
    assert total(stretches).exposed_s == pytest.approx(0.8)


def test_a_trial_without_a_profile_has_no_timings(trial: TrialFolder) -> None:
    assert read_timings(trial.profile) == {}


def test_no_time_at_all_is_no_share_of_anything(trial: TrialFolder) -> None:
    stretch(trial, wall_s=1e-300, seconds=dict.fromkeys(SECONDS, 0.0))
    (stretches,) = read_timings(trial.profile).values()
    assert total(stretches).share(Part.LOADING) == 0
