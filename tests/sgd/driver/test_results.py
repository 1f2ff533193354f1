from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from hpc_det.sgd.driver import calls


def test_samples_are_summed_and_other_numbers_averaged_over_the_ranks() -> None:
    ranks = [
        {"epoch": 1, "batch_count": 3, "num_samples": 30, "train_loss": 1.0},
        {"epoch": 1, "batch_count": 2, "num_samples": 10, "train_loss": 2.0},
    ]
    reduced = calls.reduce(ranks)
    assert reduced == {"epoch": 1.0, "batch_count": 2.5, "num_samples": 40, "train_loss": 1.5}
    assert isinstance(reduced["epoch"], np.float64)
    assert type(reduced["num_samples"]) is int


@pytest.mark.parametrize(
    ("first", "second", "reduced"),
    [
        (1.0, math.nan, 1.0),
        (np.float32(1), 2, 1.5),
        (True, False, 0.5),
        ("of rank 0", "of rank 1", "of rank 0"),
        ({"a": 1}, {"a": 3}, {"a": 1}),
        (None, 2.0, None),
        (1.0, None, 1.0),
    ],
)
def test_what_becomes_of_a_value_of_two_ranks(first: Any, second: Any, reduced: Any) -> None:
    assert calls.reduce([{"value": first}, {"value": second}]) == {"value": reduced}


def test_a_number_that_no_rank_has_is_nan() -> None:
    assert math.isnan(calls.reduce([{"value": math.nan}, {"value": math.nan}])["value"])


def test_rank_0_says_which_keys_there_are() -> None:
    assert calls.reduce([{"here": 1.0}, {"there": 2.0}]) == {"here": 1.0}
    assert calls.reduce([{"here": 1.0, "there": 4.0}, {"there": 2.0}]) == {"here": 1.0, "there": 3.0}
