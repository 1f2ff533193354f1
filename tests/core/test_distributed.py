from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from hpc_det.core.distributed import Distributed
from tests.core.ranks import OnRanks


def collectives(distributed: Distributed) -> dict[str, Any]:
    rank = distributed.rank
    collected = {
        "gathered": distributed.gather_json({"rank": rank, "long": "x" * 1000 * rank, "umlaut": "ä"}),
        "broadcast": distributed.broadcast_json(["from", rank]),
        "sum": distributed.sum(torch.tensor([1.0, rank], dtype=torch.float64)).tolist(),
        "nothing": distributed.gather_json(None),
    }
    distributed.barrier()
    return collected


@pytest.mark.parametrize("size", [1, 3])
def test_every_rank_gets_what_all_gave(on_ranks: OnRanks, size: int) -> None:
    expected = {
        "gathered": [{"rank": rank, "long": "x" * 1000 * rank, "umlaut": "ä"} for rank in range(size)],
        "broadcast": ["from", 0],
        "sum": [size, sum(range(size))],
        "nothing": [None] * size,
    }
    assert on_ranks(size, collectives) == [expected] * size


def side_by_side(distributed: Distributed) -> bytes:
    """Two connections of a rank: a wait in one must not hold up the other."""
    waiting, speaking = (distributed.side_store(os.environ) for _ in range(2))
    speaking.set(f"said/{distributed.rank}", str(distributed.rank))
    other = (distributed.rank + 1) % distributed.size
    waiting.wait([f"said/{other}"])
    return waiting.get(f"said/{other}")


def test_side_stores_reach_all_ranks(on_ranks: OnRanks) -> None:
    assert on_ranks(2, side_by_side) == [b"1", b"0"]


def test_without_any_variable_there_is_one_rank() -> None:
    assert Distributed.from_env({}) == Distributed(rank=0, size=1, local_rank=0, local_size=1, nodes=1)


def test_the_variables_of_torchrun_give_the_numbers() -> None:
    env = {"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    distributed = Distributed.from_env(env)
    assert (distributed.get_rank(), distributed.get_size(), distributed.get_local_rank()) == (5, 6, 1)
    assert distributed.get_num_agents() == 3
    assert not distributed.is_chief


def fails_on_rank_1(distributed: Distributed) -> None:
    if distributed.rank == 1:
        raise RuntimeError("as told")
    distributed.barrier()


def test_the_ranks_of_these_tests_pass_on_a_failure(on_ranks: OnRanks) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"rank 1:(?s:.*)RuntimeError: as told"):
        on_ranks(2, fails_on_rank_1)


def waits_forever(distributed: Distributed) -> None:
    distributed.side_store(os.environ).wait(["never"])


def test_the_ranks_of_these_tests_have_a_deadline(on_ranks: OnRanks) -> None:
    with pytest.raises(pytest.fail.Exception, match="not done after 1"):
        on_ranks(2, waits_forever, deadline_s=1)
