from __future__ import annotations

import io
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from hpc_det.distributed.rng import restore_rng, rng_state, seed_everything


@pytest.fixture(autouse=True)
def own_generators() -> Iterator[None]:
    before = rng_state()
    yield
    restore_rng(before)


def draws() -> list[float]:
    """Of every generator; gauss keeps a spare value, which must survive, too."""
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
