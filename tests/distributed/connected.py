"""Connect the messages of a gang whose ranks are threads of one process, over real connections."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

from hpc_det.distributed.gang_messages import GangMessages, OtherRank, RankZero

KEY = bytes(range(32))


@contextmanager
def connected(size: int, key: bytes = KEY) -> Iterator[list[GangMessages]]:
    """Yield the messages of each rank, by rank."""
    with ExitStack() as ends:
        if size == 1:
            yield [ends.enter_context(closing(GangMessages()))]
            return
        rank_0 = ends.enter_context(closing(RankZero(size, "127.0.0.1", key)))
        others = [OtherRank(rank, size, rank_0.host, rank_0.port, key) for rank in range(1, size)]
        for other in others:
            ends.enter_context(closing(other))
        rank_0.await_all()
        yield [rank_0, *others]
