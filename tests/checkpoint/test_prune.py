from __future__ import annotations

import math
from pathlib import Path

import pytest

from hpc_det.checkpoint.committed import Committed
from hpc_det.checkpoint.prune import superfluous

NAN, INF = math.nan, math.inf


def kept(
    steps: list[int], validations: dict[int, float], *, best: int, latest: int, smaller_is_better: bool = True
) -> list[int]:
    newest_first = [
        Committed(path=Path(str(number)), steps=number, time=float(number), files={})
        for number in sorted(steps, reverse=True)
    ]
    gone = superfluous(newest_first, validations, smaller_is_better=smaller_is_better, best=best, latest=latest)
    assert all(checkpoint in newest_first for checkpoint in gone)
    return sorted(checkpoint.steps for checkpoint in newest_first if checkpoint not in gone)


# Upstream's own table for two trials, the columns of a trial's best and latest; each checkpoint's number is its steps.
TRIAL_1 = ([1, 2, 3, 4, 5], {3: 0.6, 4: 0.5, 5: 0.4})
TRIAL_2 = ([6, 7, 8, 9, 10], {7: 0.2, 8: 0.3})


@pytest.mark.parametrize(
    ("best", "latest", "of_trial_1", "of_trial_2"),
    [
        (0, 0, [], []),
        (1, 0, [5], [7]),
        (3, 0, [3, 4, 5], [7, 8]),
        (0, 1, [5], [10]),
        (0, 3, [3, 4, 5], [8, 9, 10]),
        (1, 1, [5], [7, 10]),
    ],
)
def test_upstreams_table(best: int, latest: int, of_trial_1: list[int], of_trial_2: list[int]) -> None:
    assert kept(*TRIAL_1, best=best, latest=latest) == of_trial_1
    assert kept(*TRIAL_2, best=best, latest=latest) == of_trial_2


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
