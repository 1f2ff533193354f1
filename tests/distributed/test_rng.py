from __future__ import annotations

import io
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from hpc_det.distributed.rng import mixed_seed, restore_rng, rng_state, seed_everything, seed_generators, seeded


@pytest.fixture(autouse=True)
def own_generators() -> Iterator[None]:
    before = rng_state()
    yield
    restore_rng(before)


def draws() -> list[float]:
    """Return draws of every generator; gauss keeps a spare value, which must be saved too."""
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.random()),
        float(np.random.standard_normal()),
        float(torch.rand(())),
        float(torch.randn(())),
    ]


@pytest.mark.parametrize("drawn_before", [0, 1, 2, 700])
def test_generators_go_on_where_they_were_saved(drawn_before: int) -> None:
    seed_everything(7)
    for _ in range(drawn_before):
        draws()
    file = io.BytesIO()
    torch.save(rng_state(), file)
    expected = [draws() for _ in range(700)]
    seed_everything(8)
    file.seek(0)
    restore_rng(torch.load(file, weights_only=True))
    assert [draws() for _ in range(700)] == expected


def test_the_same_seed_gives_the_same_draws() -> None:
    seed_everything(2**32 - 1)
    first = draws()
    seed_everything(2**32 - 1)
    assert draws() == first
    seed_everything(0)
    assert draws() != first


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
