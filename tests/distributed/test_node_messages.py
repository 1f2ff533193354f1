from __future__ import annotations

from typing import Any

import pytest

from hpc_det.distributed.collectives import Distributed
from hpc_det.distributed.gang_messages import RankGone
from tests.distributed.ranks import OnRanks
from tests.wait import DEADLINE_S


def over_the_node(distributed: Distributed) -> tuple[int, int, list[Any], Any]:
    """Return rank and size on the node, what the first rank of a node received, and what it sent."""
    node = distributed.node_messages
    node.to_rank_0("kind", bytes([distributed.rank]) * 70_000)
    received = node.from_all("kind", "sent it", limit_s=DEADLINE_S) if node.rank == 0 else []
    if node.rank == 0:
        node.to_all("answer", ["from", distributed.rank])
    answer = node.from_rank_0("answer", "answered", limit_s=DEADLINE_S, is_it=lambda value: True)
    distributed.barrier()
    return node.rank, node.size, [(value[0], len(value)) for value in received], answer


@pytest.mark.parametrize(("size", "nodes"), [(6, 2), (3, 1), (2, 2)])
def test_the_ranks_of_a_node_exchange_messages_with_its_first_rank(on_ranks: OnRanks, size: int, nodes: int) -> None:
    local = size // nodes
    for rank, found in enumerate(on_ranks(size, over_the_node, nodes=nodes)):
        first = rank - rank % local
        received = [(other, 70_000) for other in range(first, first + local)] if rank == first else []
        assert found == (rank % local, local, received, ["from", first])


def leaves_its_node(distributed: Distributed) -> str:
    node = distributed.node_messages
    if distributed.rank == 3:
        node.close()
    distributed.barrier()
    if distributed.rank != 2:
        return ""
    node.to_rank_0("kind", 1)
    with pytest.raises(RankGone) as error:
        node.from_all("kind", "sent it", limit_s=DEADLINE_S)
    return str(error.value)


def test_a_rank_that_ends_is_named_by_its_number_in_the_gang(on_ranks: OnRanks) -> None:
    assert on_ranks(4, leaves_its_node, nodes=2)[2] == "rank 3 ended and has not sent it"
