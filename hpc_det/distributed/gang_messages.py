"""Messages between rank 0 and the other ranks of a gang, outside of collectives: any thread may send and await them.

Rank 0 listens, and each other rank keeps one authenticated connection to it for the whole run (hpc_det.node). A message
has a kind and a value: bytes, or anything that JSON has. It replaces the previous message of the same kind from the
same sender, so that no queue grows. Every wait has a time limit, and ends at once if the connection to an awaited rank
ends.

In a gang of several nodes, the ranks of each node also exchange messages with the first rank of their node, in the same
way. So rank 0 can exchange one message with each node, and the first ranks pass them on.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import math
import os
import secrets
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hpc_det.distributed.gang_store import address_of_rank_0
from hpc_det.distributed.sealed import shared_secret
from hpc_det.errors import HpcDetError, UsageError
from hpc_det.node.key import derived
from hpc_det.node.line_server import Event, TcpLineServer
from hpc_det.node.lines import Line, Message, connect, send_to
from hpc_det.node.network import own_address
from hpc_det.node.suspension import AwakeClock

FOREVER = math.inf
ARRIVE_S = 300.0
"""Seconds within which all ranks connect to rank 0; they do so as soon as the process group exists."""
LOOK_S = 5.0
"""Seconds between two checks of a waiting thread."""


class RankGone(RuntimeError):
    """Raised when a rank that others wait for has exited, or has sent nothing for too long."""


class GangMessages:
    """One rank's end of the messages. This base class serves a gang of one rank; the subclasses serve larger gangs."""

    key = b""
    """The key that the ranks of this gang have in common."""

    def __init__(self, rank: int = 0, size: int = 1, first: int = 0) -> None:
        """`first`: what to add to these rank numbers to get those of the gang, for error messages."""
        self.rank, self.size, self._first = rank, size, first
        self._values: dict[str, dict[int, Any]] = {}
        """The latest value by kind and sender."""
        self._arrivals: Counter[str] = Counter()
        """The number of messages received by kind."""
        self._gone: set[int] = set()
        """The ranks whose connection has ended."""
        self._changed = threading.Condition()
        _open.add(self)

    def to_rank_0(self, kind: str, value: Any) -> None:
        """Send from any rank, including rank 0. Raises nothing if rank 0 has exited."""
        self._take(kind, self.rank, value)

    def to_all(self, kind: str, value: Any) -> None:
        """Send from rank 0 to all ranks, including itself."""
        self.to_ranks(range(self.size), kind, value)

    def to_ranks(self, ranks: Collection[int], kind: str, value: Any) -> None:
        """Send from rank 0 to some ranks, of which it may be one."""
        if 0 in ranks:
            self._take(kind, 0, value)

    def from_all(
        self,
        kind: str,
        what: str,
        *,
        limit_s: float,
        is_it: Callable[[Any], bool] = lambda value: True,
        go_on: Callable[[], None] = lambda: None,
        ranks: Sequence[int] | None = None,
    ) -> list[Any]:
        """Return the value of this kind that each rank sent to rank 0, in rank order, and discard them. On rank 0 only.

        `is_it`: whether a value is the awaited one. `what`: what the ranks have done by then, for the error message.
        `ranks`: the ranks that send one; None: all. `go_on` is called whenever the waiting thread wakes, and raises to
        end the wait (see `wake`). Raises RankGone, with the ranks' numbers, if an awaited rank has exited, or if
        nothing of this kind arrived for `limit_s` seconds.
        """
        senders = range(self.size) if ranks is None else ranks
        with self._changed:
            self._wait(kind, senders, what, limit_s, is_it, go_on)
            values = self._values.pop(kind)
            return [values[rank] for rank in senders]

    def from_any(self, kind: str, *, go_on: Callable[[], None]) -> None:
        """Wait, without a time limit, until any rank has sent a message of this kind. On rank 0 only."""
        with self._changed:
            while kind not in self._values:
                go_on()
                self._changed.wait()

    def from_rank_0(
        self,
        kind: str,
        what: str,
        *,
        limit_s: float,
        is_it: Callable[[Any], bool],
        go_on: Callable[[], None] = lambda: None,
    ) -> Any:
        """Return the value that rank 0 sent to all ranks. Parameters and errors as for `from_all`."""
        with self._changed:
            self._wait(kind, [0], what, limit_s, is_it, go_on)
            return self._values[kind][0]

    def latest(self, kind: str) -> dict[int, Any]:
        """Return the latest value of this kind by sender. Call it with the messages locked, as `go_on` is called."""
        return self._values.get(kind, {})

    def arrivals(self, kind: str) -> int:
        """Return how many messages of this kind this rank has received."""
        with self._changed:
            return self._arrivals[kind]

    def forget(self, *kinds: str) -> None:
        """Discard the values and the counts of these kinds."""
        with self._changed:
            for kind in kinds:
                self._values.pop(kind, None)
                del self._arrivals[kind]

    def wake(self) -> None:
        """Make every waiting thread call its `go_on`."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Close the connections; threads that wait on either side are woken."""
        _open.discard(self)
        self._ends(*range(self.size))

    def let_go(self) -> None:
        """Close the inherited connections in a forked child, such as a DataLoader's worker."""
        # A child's copy of a connection would keep it open after the rank has exited, so the exit would go unnoticed.

    # --- helpers

    def _take(self, kind: str, sender: int, value: Any) -> None:
        with self._changed:
            self._values.setdefault(kind, {})[sender] = value
            self._arrivals[kind] += 1
            self._changed.notify_all()

    def _ends(self, *ranks: int) -> None:
        with self._changed:
            self._gone.update(ranks)
            self._changed.notify_all()

    def _wait(
        self,
        kind: str,
        senders: Collection[int],
        what: str,
        limit_s: float,
        is_it: Callable[[Any], bool],
        go_on: Callable[[], None],
    ) -> None:
        def is_late(rank: int) -> bool:
            values = self._values.get(kind, {})
            return rank not in values or not is_it(values[rank])

        late, clock, arrivals = list(senders), AwakeClock(LOOK_S), self._arrivals[kind]
        while True:
            # Checks the last one only: checking all at each message would be quadratic in thousands of ranks.
            while late and not is_late(late[-1]):
                late.pop()
            if not late:
                return
            go_on()
            if self._gone and (gone := [rank for rank in late if rank in self._gone and is_late(rank)]):
                raise RankGone(f"{self._named(gone)} ended and {_have(gone)} not {what}")
            if self._arrivals[kind] != arrivals:  # the limit counts from the latest message
                clock, arrivals = AwakeClock(LOOK_S), self._arrivals[kind]
            left_s = limit_s - clock.seconds()
            if left_s <= 0 and (late := [rank for rank in late if is_late(rank)]):
                raise RankGone(f"{self._named(late)} {_have(late)} not {what} for {limit_s:g} s")
            self._changed.wait(min(left_s, LOOK_S))  # AwakeClock must be read at least every LOOK_S seconds

    def _named(self, ranks: Collection[int]) -> str:
        """Return the numbers of the first eight ranks as text, and how many more there are."""
        numbers = [self._first + rank for rank in ranks] if self._first else [*ranks]
        shown = ", ".join(map(str, numbers[:8]))
        more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
        return f"rank{'' if len(ranks) == 1 else 's'} {shown}{more}"


class RankZero(GangMessages):
    """Rank 0's end, which listens at a free port of `host`."""

    def __init__(self, size: int, host: str, key: bytes, first: int = 0) -> None:
        super().__init__(0, size, first)
        self._lines: dict[int, Line] = {}
        self.key = key
        # Any address may connect: the ranks' addresses are not known, and each connection must prove the key.
        self._server = TcpLineServer(host, self._key_for, lambda address: True, self._on_event)
        self._server.answers["send"] = self._on_message
        self.host, self.port = self._server.host, self._server.port

    def await_all(self, limit_s: float = ARRIVE_S) -> None:
        """Wait until every rank has connected. Raises RankGone."""
        self.to_rank_0("arrived", True)
        self.from_all("arrived", f"connected to rank {self._first} at {self.host}:{self.port}", limit_s=limit_s)

    def to_ranks(self, ranks: Collection[int], kind: str, value: Any) -> None:
        super().to_ranks(ranks, kind, value)
        send_to([self._lines[rank] for rank in ranks if rank in self._lines], *_encoded(kind, value))

    def close(self) -> None:
        super().close()
        self._server.close()

    def let_go(self) -> None:
        self._server.let_go()

    def _key_for(self, identity: Mapping[str, Any]) -> bytes | None:
        """Return the key for a rank that has not connected yet; None, which refuses the connection, for others."""
        rank = identity["rank"]
        return self.key if type(rank) is int and 0 < rank < self.size and rank not in self._lines else None

    def _on_event(self, event: Event) -> None:
        rank = event.line.identity["rank"]
        if event.kind == "arrived":
            self._lines[rank] = event.line
            self._take("arrived", rank, True)
        elif event.kind == "gone":
            self._ends(rank)

    def _on_message(self, line: Line, message: Message) -> None:
        self._take(message.head["kind"], line.identity["rank"], _decoded(message))


class OtherRank(GangMessages):
    """The end of a rank other than 0."""

    def __init__(self, rank: int, size: int, host: str, port: int, key: bytes, first: int = 0) -> None:
        """Raises RankGone if rank 0 cannot be reached."""
        super().__init__(rank, size, first)
        self.key = key
        try:
            self._line = connect(host, port, key, {"role": "rank", "rank": rank}, ARRIVE_S, listener=f"rank {first}")
        except HpcDetError:
            raise RankGone(
                f"{self._named([rank])} cannot connect to rank {first} at {host}:{port}, which must be reachable from "
                f"every node of the gang; name the network between the nodes (dtrain_network_interface of the cluster "
                f"profile)"
            ) from None
        self._listener = threading.Thread(target=self._listen, name="gang messages", daemon=True)
        self._listener.start()

    def to_rank_0(self, kind: str, value: Any) -> None:
        head, body = _encoded(kind, value)
        self._line.send({"do": "send", **head}, body)

    def to_ranks(self, ranks: Collection[int], kind: str, value: Any) -> None:
        raise AssertionError(f"rank {self.rank} is not rank 0")

    def close(self) -> None:
        super().close()
        self._line.close()
        self._listener.join()

    def let_go(self) -> None:
        self._line.connection.close()

    def _listen(self) -> None:
        while (message := self._line.receive()) is not None:
            self._take(message.head["kind"], 0, _decoded(message))
        self._ends(0)


def _encoded(kind: str, value: Any) -> tuple[dict[str, Any], bytes]:
    """Return head and body of the message with this value."""
    if isinstance(value, bytes):
        return {"kind": kind, "is_json": False}, value
    return {"kind": kind, "is_json": True}, json.dumps(value).encode()


def _decoded(message: Message) -> Any:
    return json.loads(message.body) if message.head["is_json"] else bytes(message.body)


def open_messages(
    rank: int, size: int, nodes: int, env: Mapping[str, str], group: dist.ProcessGroup | None = None
) -> GangMessages:
    """Return this rank's end of the messages, connected. Collective in `group`, by default the default group.

    Rank 0 broadcasts its address in the group, which takes CPU tensors; everything else is sent over the authenticated
    connections.
    Raises UsageError if the ranks share no secret (see `shared_secret`), RankGone if a rank does not connect.
    """
    if size == 1:
        return GangMessages()
    secret = shared_secret(env)
    if rank > 0:
        host, port, run, mark = _broadcast(None, group)
        if mark != _mark(secret):
            raise UsageError(
                f"rank {rank} has another secret than rank 0, so they cannot exchange messages: start all ranks with "
                f"one HPC_DET_ROOT on a file system that all nodes share"
            )
        return OtherRank(rank, size, str(ipaddress.ip_address(host)), port, _key(secret, run))
    run = secrets.randbits(62)  # fits into the int64 that `_broadcast` sends
    rank_0 = RankZero(size, _own_host(nodes, env), _key(secret, run))
    _broadcast([int(ipaddress.ip_address(rank_0.host)), rank_0.port, run, _mark(secret)], group)
    rank_0.await_all()
    return rank_0


def _own_host(nodes: int, env: Mapping[str, str]) -> str:
    """Return where rank 0 listens: loopback for a gang on one node, otherwise at MASTER_ADDR, known to all ranks."""
    if nodes == 1:
        return "127.0.0.1"
    # An IPv6 address does not fit into the int64 that `_broadcast` sends.
    if (name := env.get("MASTER_ADDR")) and ":" not in (address := address_of_rank_0(name, nodes)):
        return address
    return own_address(nodes, None)[0]


def _key(secret: bytes, run: int) -> bytes:
    """Return the key of this run's messages."""
    # Derived per run: a user's secret outlives a run, and ranks of another run must not be able to connect.
    return derived(secret, f"messages of gang {run}")


def _mark(secret: bytes) -> int:
    """Return a number that is equal for two ranks with the same secret and does not disclose the secret."""
    return int.from_bytes(hmac.digest(secret, b"which secret", "sha256")[:7], "big")


def _broadcast(numbers: list[int] | None, group: dist.ProcessGroup | None) -> list[int]:
    """Return rank 0's four numbers on every rank. Collective."""
    tensor = torch.tensor(numbers or [0] * 4, dtype=torch.int64)
    dist.broadcast(tensor, src=0, group=group)
    return [int(number) for number in tensor]


def _have(ranks: Collection[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


_open: weakref.WeakSet[GangMessages] = weakref.WeakSet()


def _let_go() -> None:
    for messages in list(_open):
        messages.let_go()


os.register_at_fork(after_in_child=_let_go)
