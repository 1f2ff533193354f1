from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from hpc_det.distributed.rng import mixed_seed, seed_generators, seeded


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


def test_a_mixed_seed_is_the_same_with_every_version() -> None:
    assert mixed_seed("training", 1, 2) == 3792517578148837094


def test_numbers_of_numpy_are_no_others() -> None:
    assert mixed_seed("training", np.int64(1), 2) == mixed_seed("training", 1, 2)  # type: ignore[arg-type]


def test_every_part_of_a_key_counts() -> None:
    keys = [(), (1,), (1, 2), (2, 1), (12,), ("1, 2",), ("a", 1, 2), ("b", 1, 2), (2**64,), (-1,)]
    seeds = {mixed_seed(*key) for key in keys}
    assert len(seeds) == len(keys)
    assert all(0 <= seed < 2**64 for seed in seeds)


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**64 - 1])
def test_all_generators_follow_the_seed(seed: int) -> None:
    seed_generators(seed)
    first = drawn()
    seed_generators(seed)
    assert drawn() == first
    seed_generators(seed ^ 1)
    assert len({*drawn(), *first}) == 6, "neither the seeds nor the generators share numbers"


def test_generators_are_put_back_after_the_block() -> None:
    seed_generators(1)
    expected = drawn(), drawn()
    seed_generators(1)
    before = drawn()
    with pytest.raises(ZeroDivisionError), seeded(5):
        drawn()[0] / 0
    assert (before, drawn()) == expected
