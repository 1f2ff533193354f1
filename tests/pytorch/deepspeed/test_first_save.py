"""The memory for copies of an engine's state is allocated before the first save."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from hpc_det.distributed.collectives import Distributed
from tests.core.test_saver import AT_THE_END, in_the_stall
from tests.distributed.ranks import OnRanks
from tests.pytorch.deepspeed.life import life_of
from tests.pytorch.deepspeed.trials import InBf16, Zero


class Layered(Zero):
    norm = nn.LayerNorm


CASES = [*((Layered, stage) for stage in range(4)), *((InBf16, stage) for stage in range(4))]


def in_stalls(distributed: Distributed, root: Path) -> list[set[str]]:
    """Return the names of the threads that allocated memory, by case."""
    found = []
    for number, (trial_class, stage) in enumerate(CASES):
        life = life_of(distributed, root / str(number), trial_class, {"stage": stage}, **AT_THE_END)
        found.append({*in_the_stall(distributed, life, math.inf)})
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_memory_is_handed_out_behind_the_training(on_ranks: OnRanks, tmp_path: Path, ranks: int) -> None:
    behind: list[Any] = [[{"allocate"}] * len(CASES)] * ranks
    assert on_ranks(ranks, in_stalls, tmp_path) == behind
