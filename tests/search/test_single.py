from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_det.search.single import trial_seed


@settings(deadline=None)
@given(st.integers(0, 2**31 - 1), st.integers(1, 10**6))
def test_a_seed_is_one_that_numpy_and_torch_take(experiment_seed: int, trial_id: int) -> None:
    assert 0 <= trial_seed(experiment_seed, trial_id) < 2**31


def test_the_same_experiment_gives_the_same_seeds_for_ever() -> None:
    assert [trial_seed(7, trial) for trial in (1, 2)] == [1776908988, 231060907]


def test_trials_and_experiments_do_not_share_seeds() -> None:
    seeds = {trial_seed(experiment, trial) for experiment in range(40) for trial in range(1, 40)}
    assert len(seeds) == 40 * 39
