"""The driver's end of ranks: on which nodes they are, and whether they answer and get on. One may be in the driver."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from hpc_det.launch.watch.hang import HangJudge, last_first, sentence
from hpc_det.node.frames import Message
from hpc_det.node.heartbeat import Progress
from hpc_det.node.key import derived
from hpc_det.node.lines import Line
from hpc_det.node.suspension import AwakeClock
from hpc_det.sgd.driver.failures import COLLATERAL_S, Hung, RankDied
from hpc_det.sgd.driver.nodes import POLL_S, GangNode, Nodes
from hpc_det.sgd.elastic.held import BUFFERS, Buffer, Held, keep
from hpc_det.sgd.rank.worker import RankWorker
from hpc_det.store.run_folder import RunFolder

RANK_SILENT_S = 600.0
"""A rank's second thread answers within milliseconds, but not while a C call keeps the interpreter's lock: to unpickle
a large data set takes minutes."""


@dataclass(eq=False)
class Rank:
    number: int
    node: GangNode
    line: Line | None = None
    pid: int | None = None
    code: int | None = None
    has_left: bool = False

    def send(self, head: dict[str, Any], body: bytes = b"") -> None:
        assert self.line, "it has not arrived yet"
        self.line.send(head, body)

    def __str__(self) -> str:
        return f"rank {self.number} on {self.node} (process {self.pid})"


def spread(nodes: Sequence[GangNode], size: int) -> list[tuple[GangNode, int]]:
    """Node and local rank of each rank: evenly over the nodes, as RaySGD has it, and a node's ranks in a row."""
    by_turns = [(local, place) for place, node in enumerate(nodes) for local in range(node.slots)]
    taken = sorted(by_turns)[:size]
    return [(nodes[place], local) for place, local in sorted((place, local) for local, place in taken)]


class Watch:
    """Over the ranks of a generation, while something is asked of them."""

    def __init__(self, ranks: Sequence[Rank], nodes: Nodes, hang_timeout_s: int | None) -> None:
        self._ranks = ranks
        self._nodes = nodes
        self._judge = HangJudge(len(ranks), hang_timeout_s)
        self._clock = AwakeClock(POLL_S)
        self._places: dict[int, str] = {}
        self._asked: set[int] = set()
        """Ranks that owe an answer."""
        self._asked_at = self._next_look = 0.0

    def begin(self) -> None:
        """Something is asked now."""
        self._asked_at = time.monotonic()
        self._next_look = self._asked_at + POLL_S

    @property
    def rest_s(self) -> float:
        """How long to wait until the next look."""
        return self._next_look - time.monotonic()

    def hears(self, rank: int, head: dict[str, Any]) -> None:
        """What it says when it is looked at."""
        self._asked.discard(rank)
        self._judge.take(rank, Progress(*head["progress"]))
        if "at" in head:
            self._places[rank] = head["at"]

    def look(self) -> None:
        """If it is time. Raises RankDied for a rank that does not answer, and Hung where none gets on."""
        if self.rest_s > 0:
            return
        self._next_look = time.monotonic() + min(POLL_S, self._judge.round_s)
        if self._nodes.are_suspended:
            self._asked_at = time.monotonic()
            return
        asked_since = max(self._asked_at, self._nodes.attentive_since)
        for rank in self._ranks:
            if rank.number not in self._asked:  # what a suspended rank does not read would pile up
                rank.send({"do": "progress"})
                self._asked.add(rank.number)
            if rank.line and time.monotonic() > max(rank.line.heard_at, asked_since) + RANK_SILENT_S:
                log = self._nodes.run.rank_log(self._nodes.generation, rank.number)
                raise RankDied(f"{rank} has not answered for {RANK_SILENT_S:g} s (stopped?); its log: {log}")
        if self._judge.is_hung(self._clock.seconds()):
            raise Hung(f"{self._where_they_stand()} ({self._nodes.run.logs})")

    def _where_they_stand(self) -> str:
        self._places.clear()
        for rank in self._ranks:
            rank.send({"do": "stacks"})
        end = time.monotonic() + COLLATERAL_S
        while len(self._places) < len(self._ranks) and time.monotonic() < end:
            self._nodes.hear(POLL_S)
        standing = {
            rank: (progress, self._places.get(rank, "no answer")) for rank, progress in self._judge.ranks.items()
        }
        return sentence(self._judge.still_s, last_first(standing))


class InProcess:
    """Stands for the line to an agent: what the driver sends is done at once, by this process.

    `answer` is called with what an agent would say.
    """

    def __init__(self, run: RunFolder, address: tuple[str, int], answer: Callable[[dict[str, Any]], None]) -> None:
        self.worker: RankWorker | None = None
        self._run = run
        self._address = address
        self._answer = answer
        self._buffers = [Buffer(number) for number in range(BUFFERS)]
        self._former: dist.ProcessGroup | None = None
        """Of the gang that has ended. What destroys a group has the GIL and waits for gloo's threads, and one of those
        may wait for the GIL, to drop what a lost peer has broken off. Until there is another gang, they have done that.
        """

    @property
    def heard_at(self) -> float:
        return time.monotonic()

    def send(self, head: dict[str, Any], body: bytes = b"") -> None:
        getattr(self, f"_{head['do']}")(head, body)

    def serve(self) -> None:
        """What the driver has just asked of all ranks, by the thread that asks."""
        if self.worker:
            self.worker.serve_one()

    def close(self) -> None:
        for buffer in self._buffers:
            os.close(buffer.descriptor)
        self._buffers = []

    def _fork(self, head: dict[str, Any], body: bytes) -> None:
        key = derived(self._run.key(), f"generation {head['generation']}")
        self._former = None
        place = {"rank": 0, "local_rank": 0, "size": head["size"], "generation": head["generation"]}
        buffers = [buffer.descriptor for buffer in self._buffers]
        self.worker = RankWorker({**place, "driver": self._address, "key": key.hex(), "buffers": buffers})

    def _end(self, head: dict[str, Any], body: bytes) -> None:
        if self.worker:
            self._former = dist.group.WORLD
            self.worker.close()
            self.worker = None
        self._answer({"ended": head["generation"]})

    def _hold(self, head: dict[str, Any], body: bytes) -> None:
        """Written at once where it is to be durable: here nothing is behind the training."""
        if head["keep"]:
            self._answer(keep(Held.of(Message(head, body), self._buffers), self._run))

    def _leave(self, head: dict[str, Any], body: bytes) -> None:
        self.close()
