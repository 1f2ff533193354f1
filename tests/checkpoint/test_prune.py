from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_det.checkpoint.committed import Committed
from hpc_det.checkpoint.prune import Policy, TrialCheckpoints, superfluous, superfluous_of_all

NAN, INF = math.nan, math.inf


def newest_first(steps: list[int]) -> list[Committed]:
    return [
        Committed(path=Path(str(number)), steps=number, time=float(number), files={})
        for number in sorted(steps, reverse=True)
    ]


def kept(
    steps: list[int], validations: dict[int, float], *, best: int, latest: int, smaller_is_better: bool = True
) -> list[int]:
    every = newest_first(steps)
    gone = superfluous(every, validations, smaller_is_better=smaller_is_better, best=best, latest=latest)
    assert all(checkpoint in every for checkpoint in gone)
    return sorted(checkpoint.steps for checkpoint in every if checkpoint not in gone)


# Upstream's own table of two trials; each checkpoint's number is its steps.
TRIAL_1 = ([1, 2, 3, 4, 5], {3: 0.6, 4: 0.5, 5: 0.4})
TRIAL_2 = ([6, 7, 8, 9, 10], {7: 0.2, 8: 0.3})


def kept_of_all(*trials: tuple[list[int], dict[int, float], Policy], smaller_is_better: bool = True) -> list[int]:
    every = [
        TrialCheckpoints(checkpoints=newest_first(steps), validations=validations, policy=policy)
        for steps, validations, policy in trials
    ]
    gone = superfluous_of_all(every, smaller_is_better=smaller_is_better)
    return sorted({step for steps, _, _ in trials for step in steps} - {item.steps for item in gone})


@pytest.mark.parametrize(
    ("experiment_best", "trial_best", "trial_latest", "stay"),
    [
        (0, 0, 0, []),
        (2, 0, 0, [7, 8]),
        (5, 0, 0, [3, 4, 5, 7, 8]),
        (0, 1, 0, [5, 7]),
        (0, 3, 0, [3, 4, 5, 7, 8]),
        (0, 0, 1, [5, 10]),
        (0, 0, 3, [3, 4, 5, 8, 9, 10]),
        (2, 1, 0, [5, 7, 8]),
        (2, 0, 1, [5, 7, 8, 10]),
        (0, 1, 1, [5, 7, 10]),
        (2, 1, 1, [5, 7, 8, 10]),
    ],
)
@pytest.mark.parametrize("smaller_is_better", [True, False])
def test_upstreams_table(
    experiment_best: int, trial_best: int, trial_latest: int, stay: list[int], smaller_is_better: bool
) -> None:
    policy = Policy(experiment_best=experiment_best, trial_best=trial_best, trial_latest=trial_latest)
    sign = 1 if smaller_is_better else -1
    trials = [(steps, {step: sign * value for step, value in found.items()}) for steps, found in (TRIAL_1, TRIAL_2)]
    assert kept_of_all(*((*trial, policy) for trial in trials), smaller_is_better=smaller_is_better) == stay


def test_of_equals_of_two_trials_the_one_that_came_first_is_the_best() -> None:
    policy = Policy(experiment_best=1, trial_best=0, trial_latest=0)
    assert kept_of_all(([3, 4], {3: 0.5, 4: 0.5}, policy), ([1, 2], {2: 0.5}, policy)) == [2]


def test_a_point_that_keeps_more_of_the_best_counts_them_among_those_of_all() -> None:
    two, none = (Policy(experiment_best=number, trial_best=0, trial_latest=0) for number in (2, 0))
    assert kept_of_all(([1, 2], {1: 0.1, 2: 0.3}, two), ([3], {3: 0.2}, none)) == [1]


def test_while_a_trial_runs_the_best_of_the_experiment_may_all_be_its_own() -> None:
    assert Policy(experiment_best=3, trial_best=2).best_while_it_runs == 3
    assert Policy(experiment_best=0, trial_best=2).best_while_it_runs == 2


@pytest.mark.parametrize(
    ("values", "smaller_is_better", "the_best"),
    [
        ({1: 0.5, 2: 0.5, 3: 0.5}, True, [1, 2]),
        ({1: 0.7, 2: 0.5, 3: 0.5}, True, [2, 3]),
        ({1: 0.5, 2: 0.7, 3: 0.7}, False, [2, 3]),
        ({1: 0.5, 2: 0.5, 3: 0.7}, False, [1, 3]),
        ({1: NAN, 2: 0.5, 3: NAN}, True, [1, 2]),
        ({1: NAN, 2: 0.5, 3: 0.6}, False, [2, 3]),
        ({1: NAN, 2: 0.5, 3: 0.6}, True, [2, 3]),
        ({1: -INF, 2: 0.5, 3: INF}, True, [1, 2]),
        ({1: -INF, 2: 0.5, 3: INF}, False, [2, 3]),
        ({1: NAN, 2: INF, 3: INF}, True, [2, 3]),
    ],
)
def test_the_two_best_are_kept_of_equals_the_earliest(
    values: dict[int, float], smaller_is_better: bool, the_best: list[int]
) -> None:
    assert kept([1, 2, 3], values, best=2, latest=0, smaller_is_better=smaller_is_better) == the_best


def test_validations_without_a_checkpoint_take_no_place() -> None:
    assert kept([2, 4], {1: 0.1, 2: 0.5, 3: 0.1, 4: 0.6}, best=1, latest=0) == [2]


def test_nothing_to_keep_and_nothing_there() -> None:
    assert kept([], {}, best=1, latest=1) == []


def test_what_no_trial_resumes_from_pushes_nothing_out() -> None:
    """Its owner removed files of the newest; what is trained anew has fewer batches."""
    partial, *whole = newest_first([10, 20, 30])
    every = [replace(partial, removed=("state_dict.pth",)), *whole]
    gone = superfluous(every, {}, smaller_is_better=True, best=0, latest=1)
    assert [item.steps for item in gone] == [10]
