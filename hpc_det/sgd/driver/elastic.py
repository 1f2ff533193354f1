"""A gang that outlives its ranks: formed over what nodes there are, put where its last snapshot was, tried again."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle

from hpc_det.checkpoint.snapshots import BUFFERS, Durable, await_writers, last_number, newest
from hpc_det.node.process import uninterrupted
from hpc_det.sgd.driver.calls import Call, Rounds
from hpc_det.sgd.driver.failures import GangLost, JobLeaves, RetriesUsedUp, StateLost, back_into_queue, pause_s
from hpc_det.sgd.driver.gang import RankGang
from hpc_det.sgd.driver.nodes import POLL_S, GangNode, GangRequest
from hpc_det.sgd.operator.training_operator import TrainingOperator
from hpc_det.sgd.rank.worker import Own, RankWorker, Start

T = TypeVar("T")
_log = logging.getLogger("hpc_det.sgd")


@dataclass
class Snapshot:
    """The newest snapshot, in the memory of nodes; the ranks' own parts are here, too."""

    number: int
    buffer: int
    nodes: list[GangNode]
    own: list[bytes]


@dataclass
class _Keeping:
    """The snapshot that an agent writes to the disk now."""

    node: GangNode
    buffer: int
    number: int


class ElasticGang:
    """Between two calls, the newest snapshot is what the ranks are."""

    def __init__(self, gang: RankGang, wanted: GangRequest, is_durable: bool) -> None:
        self.calls = 0
        """Train calls that have returned, by whatever driver of this run."""
        self.epochs_done = 0
        self.has_failed = False
        """Whether the last call raised an exception."""
        self._calls_read = 0
        """Train calls in the state that the program has read, or loaded, last."""
        self._gang = gang
        self._nodes = gang.nodes
        self._wanted = wanted
        self._is_durable = is_durable
        self._held: Snapshot | None = None
        self._keeping: _Keeping | None = None
        self._blamed: GangNode | None = None
        """On which the last gang could not be formed."""
        self._is_changed = False
        """Whether the newest snapshot is more than what `setup` makes."""
        self._is_in_step = False
        """Whether the ranks are what the newest snapshot says; not after a Ctrl-C in the midst of a call."""
        self._kept = 0
        """The newest of which its writer has told what became of it."""
        self._stored_round: Mapping[str, Any] | None = {}
        """Of the snapshot from which this program begins; None as soon as it has begun."""
        self.rounds = Rounds(self._nodes.run.round, is_durable=is_durable)
        gang.on_kept = self._on_kept
        if is_durable:
            await_writers(self._nodes.run)
        self._number = last_number(self._nodes.run)

    def start(self) -> None:
        """Wait for the ranks that are wanted, or for the least of them, and form the gang."""
        self._nodes.await_slots(self._wanted.most, self._wanted.least)
        self._retried(lambda: None, max_retries=3)
        self.rounds.resume(self._stored_round or {})
        self._stored_round = None

    def train(self, call: Call, max_retries: int) -> Any:
        """One call of Runner.train on all ranks, more of them than before if there is room."""
        return self.rounds.once(
            call, lambda: self._retried(lambda: self._change(call, self.calls + 1), max_retries, may_grow=True)
        )

    def change(self, call: Call) -> Any:
        """Another method of the Runner, on all ranks."""
        return self.rounds.once(call, lambda: self._retried(lambda: self._change(call, self.calls), max_retries=3))

    def load(self, state: dict[str, Any]) -> None:
        """Into all ranks, and on the disk when this returns: that it is undone could be seen by no number of calls."""
        self.change(Call("load_state_dict", {"state": state}))
        self.note_read()
        self._settle()

    def ask(self, method: str, **arguments: Any) -> Any:
        """A method of rank 0's Runner that returns its state and changes nothing."""
        return self._retried(lambda: self._gang.call("call", method, arguments, 0)[0], max_retries=3)

    def note_read(self) -> None:
        """Record that the program has a copy of the current state."""
        self._calls_read = self.calls

    def loop(self, begun: Callable[[RankGang], Callable[[RankWorker], None]], max_retries: int) -> None:
        """A function on all ranks that keeps what it does by itself. `begun` says for each gang where it begins."""
        self._retried(lambda: self._gang.call("loop", begun(self._gang)), max_retries, may_grow=True)

    @property
    def has_unread_training(self) -> bool:
        """Whether the program would lose train calls if the state were gone now."""
        return self.calls > self._calls_read

    def keep(self) -> bool:
        """Write the newest snapshot to the disk, also of a temporary run; whether there is one when this returns."""
        self._is_durable = True
        self._settle()
        return last_number(self._nodes.run) > 0

    @property
    def local_operator(self) -> TrainingOperator | None:
        """Of rank 0, where it lives in this process."""
        return self._gang.local_operator

    def stop(self, force: bool) -> None:
        self._settle()
        if not force:
            self._gang.leave()
        self._nodes.close()

    def _settle(self) -> None:
        """What is newest shall be durable, however long that takes, as long as its node is there."""
        self._gang.poll()
        while (keeping := self._keeping) and keeping.node in self._nodes and not self._is_given_up(keeping):
            self._nodes.hear(POLL_S)
        self._keeping = None
        held = self._held if self._is_durable else None
        if held and held.number != self._kept and (there := [node for node in held.nodes if node in self._nodes]):
            self._hand_over(replace(held, nodes=there))
            self._settle()

    def _is_given_up(self, keeping: _Keeping) -> bool:
        """By its writer, as soon as that is handed the newest: there may be time for no more than one."""
        return self._held is not None and keeping.number < self._held.number and keeping.node is self._held.nodes[0]

    def _leave_job(self) -> None:
        self._settle()
        _log.warning("the scheduler takes the nodes after %d calls: %s", self.calls, back_into_queue(os.environ))
        raise JobLeaves

    def _retried(self, do: Callable[[], T], max_retries: int, may_grow: bool = False) -> T:
        """Raises what a rank has raised, RetriesUsedUp after `max_retries` gangs that were lost, and StateLost.

        However it ends, there is no rank left that is in the middle of something.
        """
        failures = in_a_row = 0
        while True:
            try:
                self._be_ready(may_grow)
                self._is_in_step = False
                result = do()
                self._is_in_step, self.has_failed = True, False
                return result
            except GangLost as lost:
                self.has_failed = True
                self._gang.end()
                failures, in_a_row = failures + lost.counts, in_a_row + 1
                if failures > max_retries:
                    raise RetriesUsedUp(f"{lost}; {failures} failures, with max_retries = {max_retries}") from lost
                _log.warning("%s; the last call is made again from its start", lost)
                self._nodes.wait(pause_s(in_a_row))
            except BaseException as error:
                self.has_failed = isinstance(error, Exception)
                self._gang.end()
                raise

    def _change(self, call: Call, calls: int) -> Any:
        """What comes of it is safe in a snapshot when this returns."""
        place = self._place()
        parts = self._gang.call("change", call.method, call.arguments, *place)
        result = call.then([result for result, _ in parts])
        self._take([own for _, own in parts], place, calls, (call, result))
        self._is_changed = True
        return result

    def _snapshot(self) -> None:
        place = self._place()
        self._take(self._gang.call("snapshot", *place), place, self.calls)

    def _place(self) -> tuple[int, list[int]]:
        """Which of the nodes' buffers is free, and the ranks that write to it: rank 0, and one on another node."""
        self._gang.poll()
        if self._keeping and self._keeping.node not in self._nodes:
            self._keeping = None
        taken = {part.buffer for part in (self._held, self._keeping) if part}
        return next(buffer for buffer in range(BUFFERS) if buffer not in taken), _on_different_nodes(self._gang)

    @uninterrupted()
    def _take(
        self, own: list[Own], place: tuple[int, list[int]], calls: int, made: tuple[Call, Any] | None = None
    ) -> None:
        """From now on this snapshot, after so many calls, is the newest."""
        buffer, holders = place
        nodes = [self._gang.ranks[rank].node for rank in holders]
        self._number += 1
        self._held = Snapshot(self._number, buffer, nodes, [part.state for part in own])
        self.calls, self.epochs_done = calls, own[0].epochs_done
        if made:
            self.rounds.add(*made, self.epochs_done)
        self._hand_over(self._held)

    @uninterrupted()
    def _hand_over(self, held: Snapshot) -> None:
        """To the agents: it is whole. The first of them makes it durable, unless it is still busy with another one."""
        keeps = self._is_durable and self._keeping is None
        if keeps:
            self._keeping = _Keeping(held.nodes[0], held.buffer, held.number)
        progress = {"epochs_done": self.epochs_done, "calls": self.calls, "round": self.rounds.record()}
        order = {"do": "hold", "number": held.number, "buffer": held.buffer, "progress": progress}
        for place, node in enumerate(held.nodes):
            is_writer = self._is_durable and place == 0
            own = held.own if is_writer else []
            marks = {"own": [len(part) for part in own], "is_writer": is_writer, "keep": keeps and is_writer}
            node.line.send({**order, **marks}, b"".join(own))

    def _be_ready(self, may_grow: bool) -> None:
        """There is a gang, whole, of the size that it can have, and where the newest snapshot was taken."""
        gang = self._gang
        gang.poll()
        if self._nodes.is_taken:
            self._leave_job()
        is_whole = self._is_in_step and gang.size > 0 and not gang.is_broken
        if is_whole and not (may_grow and gang.size != self._wanted.possible(self._nodes)):
            return
        self._is_in_step = False
        if is_whole and not self._holder():
            self._snapshot()  # in time, on a node that stays
        if not self._holder():
            self._settle()  # all of them leave: it has to be on the disk before they do
        gang.end()
        if not self._is_durable:
            self._check_not_lost(None)  # no node that comes would help
        if self._nodes.slots < self._wanted.least:
            self._nodes.await_slots(self._wanted.most, self._wanted.least)
        try:
            self._form()
        except GangLost as lost:
            self._blame(lost.node)
            raise
        self._blamed = None
        self._is_in_step = True

    def _form(self) -> None:
        """Ranks that are what the newest snapshot says."""
        gang = self._gang
        first, source, own = self._source()
        gang.form(self._wanted.possible(self._nodes), first)
        common = cloudpickle.dumps((self._wanted.settings(gang.size), self._wanted.hook))
        modules = tuple(map(os.path.abspath, sys.path))
        starts = [
            Start(common, source, self._wanted.is_here, own[rank] if rank < len(own) else None, modules)
            for rank in range(gang.size)
        ]
        gang.call_each("begin", [cloudpickle.dumps((start,)) for start in starts])
        if source is None:
            self._snapshot()

    def _blame(self, node: GangNode | None) -> None:
        """Its ranks have died before they could do anything. The second time in a row the gang does without it, if it
        can: `max_retries` would be used up there.
        """
        is_again, self._blamed = node is self._blamed, node
        if node is None or not is_again or self._nodes.slots - node.slots < self._wanted.least:
            return
        holders = [holder for holder in self._held.nodes if holder in self._nodes.staying] if self._held else []
        if holders == [node]:
            return
        node.is_broken = True
        _log.warning(
            "%s: twice in a row no gang could be formed on it; it is left out until its agent is replaced", node
        )

    def _holder(self) -> GangNode | None:
        """A node that stays and has the newest snapshot."""
        return next((node for node in self._held.nodes if node in self._nodes.staying), None) if self._held else None

    def _source(self) -> tuple[GangNode | None, int | Path | None, list[bytes]]:
        """Which node rank 0 has to be on, where it finds the newest snapshot, and the ranks' own parts of it."""
        if self._held and (node := self._holder()):
            return node, self._held.buffer, self._held.own
        stored = newest(self._nodes.run) if self._is_durable else None
        self._check_not_lost(stored)
        if self._held and stored:
            _log.warning(
                "all nodes that held the state after train() call %d are lost; the training goes on after call %d, "
                "the last one on the disk",
                self.calls,
                stored.calls,
            )
            self.rounds.forget()
        self._held = None
        if self._stored_round is not None and stored:
            self._stored_round = stored.round
        self._is_changed = stored is not None
        self.calls, self.epochs_done = (stored.calls, stored.epochs_done) if stored else (0, 0)
        return (None, stored.state, stored.own) if stored else (None, None, [])

    def _check_not_lost(self, stored: Durable | None) -> None:
        """Raises StateLost where the training would begin anew behind the back of the program."""
        if not (self._held and self._is_changed) or self._holder() or stored:
            return
        hosts = ", ".join(str(node) for node in self._held.nodes)
        remedy = (
            f"nor is there any on the disk, in {self._nodes.run.snapshots}"
            if self._is_durable
            else "and with run=NAME it would be on the disk, too; name a run, and train again from the start"
        )
        raise StateLost(f"{hosts}: lost, and nobody else held the state after train() call {self.calls}; {remedy}")

    def _on_kept(self, message: dict[str, Any]) -> None:
        if self._keeping and self._keeping.number == message["kept"]:
            self._keeping = None
            self._kept = message["kept"]
        if "error" in message:
            _log.warning("snapshot %d is not durable: %s", message["kept"], message["error"])


def _on_different_nodes(gang: RankGang) -> list[int]:
    """Rank 0 and the first on another node; of nodes that stay, as far as there are any."""
    staying = [rank for rank in gang.ranks if not rank.node.is_leaving] or gang.ranks
    buddies = [rank for rank in staying if rank.node is not staying[0].node]
    return [rank.number for rank in (staying[0], *buddies[:1])]
