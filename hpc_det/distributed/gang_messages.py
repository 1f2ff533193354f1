"""Messages between rank 0 and the other ranks of a gang, outside of collectives: any thread may send them and wait.

Rank 0 listens, and each other rank keeps one authenticated connection to it for the whole run (hpc_det.node). A message
has a kind and a JSON value, and replaces the one of the same kind from the same sender, so that nothing piles up. What
is awaited has a limit, and a rank whose connection has ended ends the wait at once.
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
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist

from hpc_det.distributed.gang_store import address_of_rank_0
from hpc_det.distributed.sealed import shared_secret
from hpc_det.errors import HpcDetError, UsageError
from hpc_det.node.key import derived
from hpc_det.node.line_server import Event, TcpLineServer
from hpc_det.node.lines import Line, Message, connect
from hpc_det.node.network import own_address
from hpc_det.node.suspension import AwakeClock

FOREVER = math.inf
ARRIVE_S = 300.0
"""For all ranks to connect to rank 0, which they do as soon as the process group stands."""
LOOK_S = 5.0
"""Between two looks of a thread that waits."""


class RankGone(RuntimeError):
    """A rank that was waited for has ended, or has sent nothing for too long."""


class GangMessages:
    """One rank's end. This class by itself is that of a gang of one."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self._values: dict[str, dict[int, Any]] = {}
        """By kind and sender."""
        self._arrivals: Counter[str] = Counter()
        """By kind: how many messages came."""
        self._gone: set[int] = set()
        """Ranks whose connection has ended."""
        self._changed = threading.Condition()
        _open.add(self)

    def to_rank_0(self, kind: str, value: Any) -> None:
        """From any rank, rank 0 included. Nothing is raised where rank 0 is gone."""
        self._take(kind, self.rank, value)

    def to_all(self, kind: str, value: Any) -> None:
        """From rank 0, to itself as well."""
        self._take(kind, 0, value)

    def from_all(
        self,
        kind: str,
        what: str,
        *,
        limit_s: float,
        is_it: Callable[[Any], bool] = lambda value: True,
        go_on: Callable[[], None] = lambda: None,
    ) -> list[Any]:
        """On rank 0: what every rank has sent there, by rank, and it is forgotten.

        `is_it`: whether a value is the one that is waited for. `what`: what the ranks then have done, for the error.
        `go_on` is called at each look, and raises to end the wait (see `wake`). Raises RankGone, with the ranks'
        numbers, where one has ended, and where nothing of this kind came for `limit_s` seconds.
        """
        with self._changed:
            self._wait(kind, range(self.size), what, limit_s, is_it, go_on)
            values = self._values.pop(kind)
            return [values[rank] for rank in range(self.size)]

    def from_any(self, kind: str, *, go_on: Callable[[], None]) -> None:
        """On rank 0: wait, as long as it takes, until some rank has sent it."""
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
        """The value that rank 0 has sent to all; see `from_all`."""
        with self._changed:
            self._wait(kind, [0], what, limit_s, is_it, go_on)
            return self._values[kind][0]

    def arrivals(self, kind: str) -> int:
        """How many messages of this kind have come to this rank."""
        with self._changed:
            return self._arrivals[kind]

    def forget(self, *kinds: str) -> None:
        """What came of these."""
        with self._changed:
            for kind in kinds:
                self._values.pop(kind, None)
                del self._arrivals[kind]

    def wake(self) -> None:
        """Have every thread that waits call its `go_on`."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """The connection ends; whoever waits is woken, here and there."""
        _open.discard(self)
        self._ends(*range(self.size))

    def let_go(self) -> None:
        """In a forked child, a DataLoader's worker: its copy of a connection would hide that the rank is gone."""

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
            while late and not is_late(late[-1]):  # not all of them at each message: there may be thousands
                late.pop()
            if not late:
                return
            go_on()
            if self._gone and (gone := [rank for rank in late if rank in self._gone and is_late(rank)]):
                raise RankGone(f"{_named(gone)} ended and {_have(gone)} not {what}")
            if self._arrivals[kind] != arrivals:
                clock, arrivals = AwakeClock(LOOK_S), self._arrivals[kind]
            left_s = limit_s - clock.seconds()
            if left_s <= 0 and (late := [rank for rank in late if is_late(rank)]):
                raise RankGone(f"{_named(late)} {_have(late)} not {what} for {limit_s:g} s")
            self._changed.wait(min(left_s, LOOK_S))


class RankZero(GangMessages):
    """Listens at a free port of `host`."""

    def __init__(self, size: int, host: str, key: bytes) -> None:
        super().__init__(0, size)
        self._lines: dict[int, Line] = {}
        self._key = key
        self._server = TcpLineServer(host, self._key_for, lambda address: True, self._on_event)
        self._server.answers["send"] = self._on_message
        self.host, self.port = self._server.host, self._server.port

    def await_all(self, limit_s: float = ARRIVE_S) -> None:
        """Until every rank has connected. Raises RankGone."""
        self.to_rank_0("arrived", True)
        self.from_all("arrived", f"connected to rank 0 at {self.host}:{self.port}", limit_s=limit_s)

    def to_all(self, kind: str, value: Any) -> None:
        super().to_all(kind, value)
        body = json.dumps(value).encode()
        for line in list(self._lines.values()):
            line.send({"kind": kind}, body)

    def close(self) -> None:
        super().close()
        self._server.close()

    def let_go(self) -> None:
        self._server.let_go()

    def _key_for(self, identity: Mapping[str, Any]) -> bytes | None:
        """Each rank comes once."""
        rank = identity["rank"]
        return self._key if type(rank) is int and 0 < rank < self.size and rank not in self._lines else None

    def _on_event(self, event: Event) -> None:
        rank = event.line.identity["rank"]
        if event.kind == "arrived":
            self._lines[rank] = event.line
            self._take("arrived", rank, True)
        elif event.kind == "gone":
            self._ends(rank)

    def _on_message(self, line: Line, message: Message) -> None:
        self._take(message.head["kind"], line.identity["rank"], json.loads(message.body))


class OtherRank(GangMessages):
    def __init__(self, rank: int, size: int, host: str, port: int, key: bytes) -> None:
        """Raises RankGone where rank 0 cannot be reached."""
        super().__init__(rank, size)
        try:
            self._line = connect(host, port, key, {"role": "rank", "rank": rank}, ARRIVE_S, listener="rank 0")
        except HpcDetError:
            raise RankGone(
                f"rank {rank} has no connection to rank 0 at {host}:{port}, which must be reachable from every node of "
                f"the gang; name the network between the nodes (dtrain_network_interface of the cluster profile)"
            ) from None
        self._listener = threading.Thread(target=self._listen, name="gang messages", daemon=True)
        self._listener.start()

    def to_rank_0(self, kind: str, value: Any) -> None:
        self._line.send({"do": "send", "kind": kind}, json.dumps(value).encode())

    def to_all(self, kind: str, value: Any) -> None:
        raise AssertionError(f"rank {self.rank} is not rank 0")

    def close(self) -> None:
        super().close()
        self._line.close()
        self._listener.join()

    def let_go(self) -> None:
        self._line.connection.close()

    def _listen(self) -> None:
        while (message := self._line.receive()) is not None:
            self._take(message.head["kind"], 0, json.loads(message.body))
        self._ends(0)


def open_messages(rank: int, size: int, nodes: int, env: Mapping[str, str]) -> GangMessages:
    """Collective, in the process group: rank 0 says in it where it listens, and that is all that crosses it.

    Raises UsageError where the ranks share no secret (see `shared_secret`), RankGone where one does not come.
    """
    if size == 1:
        return GangMessages()
    secret = shared_secret(env)
    if rank > 0:
        host, port, run, mark = _broadcast(None)
        if mark != _mark(secret):
            raise UsageError(
                f"rank {rank} has another secret than rank 0, so they cannot exchange messages: start all ranks with "
                f"one HPC_DET_ROOT that all nodes see"
            )
        return OtherRank(rank, size, str(ipaddress.ip_address(host)), port, _key(secret, run))
    run = secrets.randbits(62)
    rank_0 = RankZero(size, _own_host(nodes, env), _key(secret, run))
    _broadcast([int(ipaddress.ip_address(rank_0.host)), rank_0.port, run, _mark(secret)])
    rank_0.await_all()
    return rank_0


def _own_host(nodes: int, env: Mapping[str, str]) -> str:
    """Loopback for a gang on one node; otherwise where the others find rank 0 anyway, by MASTER_ADDR."""
    if nodes == 1:
        return "127.0.0.1"
    if (name := env.get("MASTER_ADDR")) and ":" not in (address := address_of_rank_0(name, nodes)):
        return address
    return own_address(nodes, None)[0]


def _key(secret: bytes, run: int) -> bytes:
    """A user's secret outlives a run: ranks of another one do not get in."""
    return derived(secret, f"messages of gang {run}")


def _mark(secret: bytes) -> int:
    """Shows whether two ranks have the same secret, and says nothing about it."""
    return int.from_bytes(hmac.digest(secret, b"which secret", "sha256")[:7], "big")


def _broadcast(numbers: list[int] | None) -> list[int]:
    """Rank 0's four."""
    is_for_cpu = "cpu:" in dist.get_backend_config()
    device = torch.device("cpu") if is_for_cpu else torch.device("cuda", torch.cuda.current_device())
    tensor = torch.tensor(numbers or [0] * 4, dtype=torch.int64, device=device)
    dist.broadcast(tensor, src=0)
    return [int(number) for number in tensor]


def _named(ranks: Collection[int]) -> str:
    """The first few."""
    shown = ", ".join(map(str, [*ranks][:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'' if len(ranks) == 1 else 's'} {shown}"


def _have(ranks: Collection[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


_open: weakref.WeakSet[GangMessages] = weakref.WeakSet()


def _let_go() -> None:
    for messages in list(_open):
        messages.let_go()


os.register_at_fork(after_in_child=_let_go)
