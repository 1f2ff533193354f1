"""Messages between the ranks of one node and the first rank of it, in a gang of several nodes."""

from __future__ import annotations

from hpc_det.distributed.gang_messages import ARRIVE_S, GangMessages, OtherRank, RankZero
from hpc_det.node.key import derived

_PORT = "port of a node"
"""The kind of message with the port at which the first rank of a node listens."""


def open_node_messages(messages: GangMessages, local_rank: int, local_size: int) -> GangMessages:
    """Return this rank's end of the messages of its node, connected; its rank 0 is the first rank of the node.

    `messages`: those of the gang, which has `local_size` ranks with consecutive numbers on each node. Every rank of the
    gang calls this. Raises RankGone if a rank does not connect.
    """
    if local_size == messages.size:
        return messages
    first, leaders = messages.rank - local_rank, range(0, messages.size, local_size)
    if local_size == 1:
        return GangMessages(first=first)
    key = derived(messages.key, f"messages of the node of rank {first}")
    leader = RankZero(local_size, "127.0.0.1", key, first) if local_rank == 0 else None
    if leader:
        messages.to_rank_0(_PORT, leader.port)
    if messages.rank == 0:
        ports = messages.from_all(_PORT, "opened a port on its node", limit_s=ARRIVE_S, ranks=leaders)
        for number, port in zip(leaders, ports, strict=True):
            messages.to_ranks(range(number + 1, number + local_size), _PORT, port)
    if leader:
        leader.await_all()
        return leader
    what = "sent the port of the first rank of the node"
    port = messages.from_rank_0(_PORT, what, limit_s=ARRIVE_S, is_it=lambda value: True)
    return OtherRank(local_rank, local_size, "127.0.0.1", port, key, first)
