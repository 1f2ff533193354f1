"""A gang that survives failures: it is formed again, restored from the newest snapshot, and the call is repeated."""

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
from hpc_det.errors import count
from hpc_det.node.process import uninterrupted
from hpc_det.sgd.driver.calls import Call, Rounds
from hpc_det.sgd.driver.failures import GangLost, JobLeaves, RetriesUsedUp, StateLost, back_into_queue, pause_s
from hpc_det.sgd.driver.gang import RankGang
from hpc_det.sgd.driver.nodes import POLL_S, GangNode, GangRequest
from hpc_det.sgd.driver.recorded import RunRecord
from hpc_det.sgd.elastic.wait_report import WaitReport
from hpc_det.sgd.operator.training_operator import TrainingOperator
from hpc_det.sgd.rank.worker import Own, RankWorker, Start

T = TypeVar("T")
_log = logging.getLogger("hpc_det.sgd")


@dataclass
class Snapshot:
    """The newest snapshot: its shared part is in the memory of nodes, the ranks' own parts are in the driver."""

    number: int
    """Number of the snapshot in its run, from 1."""
    buffer: int
    """Number of the buffer that contains the shared part, the same on each of the nodes."""
    nodes: list[GangNode]
    """Nodes that hold the shared part; the first one writes it to disk."""
    own: list[bytes]
    """The ranks' own parts, in rank order."""


@dataclass
class _Keeping:
    """A snapshot that an agent is writing to disk: the node of the agent, the buffer, and the snapshot's number."""

    node: GangNode
    buffer: int
    number: int


class ElasticGang:
    """A gang that survives the loss of its ranks. Between two calls the newest snapshot is the state of the ranks."""

    def __init__(self, gang: RankGang, wanted: GangRequest, is_durable: bool, record: RunRecord | None = None) -> None:
        """`record`: where attempts and results are recorded; None: nowhere."""
        self.calls = 0
        """Number of `train` calls that the state contains, including those of earlier programs of this run."""
        self.epochs_done = 0
        """Completed passes over the training data that the state contains."""
        self.has_failed = False
        """Whether the last call raised an exception."""
        self._calls_read = 0
        """Value of `calls` when the program last read or loaded the state."""
        self.record = record or RunRecord()
        self._gang = gang
        self._nodes = gang.nodes
        self._wanted = wanted
        self._is_durable = is_durable
        self._held: Snapshot | None = None
        self._keeping: _Keeping | None = None
        self._blamed: GangNode | None = None
        """The node on which the last gang could not be formed."""
        self._is_changed = False
        """Whether the newest snapshot differs from the state that `setup` creates."""
        self._is_in_step = False
        """Whether the ranks have the state of the newest snapshot; they do not after a Ctrl-C during a call."""
        self._kept = 0
        """Number of the newest snapshot whose writer has reported its result."""
        self._stored_round: Mapping[str, Any] | None = {}
        """The record of the round in the snapshot that this program starts from; None once it has started."""
        self.rounds = Rounds(self._nodes.run.round, is_durable=is_durable)
        gang.on_kept = self._on_kept
        if is_durable:  # agents of an earlier driver may still be writing a snapshot
            report = WaitReport(lambda: f"agents of an earlier program write a snapshot to {gang.nodes.run.snapshots}")
            await_writers(gang.nodes.run, report.look)
        self._number = last_number(self._nodes.run)

    def start(self) -> None:
        """Wait for slots for the requested number of ranks, or at least for the minimum, and form the gang."""
        self._nodes.await_slots(self._wanted.most, self._wanted.least)
        self._retried(lambda: None, max_retries=3)
        self.rounds.resume(self._stored_round or {})
        self._stored_round = None

    def train(self, call: Call, max_retries: int) -> Any:
        """Call Runner.train on all ranks and return the call's result. Before it, the gang grows if there are slots."""
        return self.rounds.once(
            call, lambda: self._retried(lambda: self._change(call, self.calls + 1), max_retries, may_grow=True)
        )

    def change(self, call: Call) -> Any:
        """Call another method of the Runner that changes the state, on all ranks; return the call's result."""
        return self.rounds.once(call, lambda: self._retried(lambda: self._change(call, self.calls), max_retries=3))

    def load(self, state: dict[str, Any]) -> None:
        """Load a state into all ranks; it is on disk when this returns, if the run is durable."""
        self.change(Call("load_state_dict", {"state": state}))
        self.note_read()
        # Loading does not change `calls`, so the program could not notice that a lost snapshot has undone it.
        self._settle()

    def ask(self, method: str, **arguments: Any) -> Any:
        """Call a method of rank 0's Runner that changes nothing, and return its result."""
        return self._retried(lambda: self._gang.call("call", method, arguments, 0)[0], max_retries=3)

    def note_read(self) -> None:
        """Record that the program has a copy of the current state."""
        self._calls_read = self.calls

    def loop(self, begun: Callable[[RankGang], Callable[[RankWorker], None]], max_retries: int) -> None:
        """Run a function on all ranks that saves its own state (a training loop of `fit`), without snapshots.

        `begun` is called for each gang that is formed, and returns the function, which contains the checkpoint to start
        from.
        """
        self._retried(lambda: self._gang.call("loop", begun(self._gang)), max_retries, may_grow=True)

    @property
    def has_unread_training(self) -> bool:
        """True if the state contains `train` calls that the program has neither saved nor read."""
        return self.calls > self._calls_read

    def keep(self) -> bool:
        """Write the newest snapshot to disk, even of a temporary run; return whether a snapshot is on disk then."""
        self._is_durable = True
        self._settle()
        return last_number(self._nodes.run) > 0

    @property
    def local_operator(self) -> TrainingOperator | None:
        """The operator of rank 0 if that is in this process, else None."""
        return self._gang.local_operator

    def stop(self, force: bool) -> None:
        """Make the newest snapshot durable and end all ranks, agents and jobs; `force`: kill the ranks."""
        self._settle()
        if not force:
            self._gang.leave()
        self._nodes.close()

    def _settle(self) -> None:
        """If the run is durable, wait until the newest snapshot is on disk or all nodes that hold it are lost."""
        self._gang.poll()
        with self._nodes.reported(self._writing):
            while (keeping := self._keeping) and keeping.node in self._nodes and not self._is_given_up(keeping):
                self._nodes.hear(POLL_S)
        self._keeping = None
        held = self._held if self._is_durable else None
        if held and held.number != self._kept and (there := [node for node in held.nodes if node in self._nodes]):
            self._hand_over(replace(held, nodes=there))
            self._settle()

    def _writing(self) -> str:
        """Return which node writes which snapshot to disk, as text."""
        assert self._keeping
        return f"{self._keeping.node} writes snapshot {self._keeping.number} to {self._nodes.run.snapshots}"

    def _is_given_up(self, keeping: _Keeping) -> bool:
        """Return whether the writer abandons this snapshot because it also holds a newer one."""
        # When the scheduler takes the node there may be time to write only one, so the writer prefers the newest.
        return self._held is not None and keeping.number < self._held.number and keeping.node is self._held.nodes[0]

    def _leave_job(self) -> None:
        """Make the state durable, requeue the job, and raise JobLeaves."""
        self._settle()
        _log.warning(
            "the scheduler takes all nodes of this job after train() call %d: %s",
            self.calls,
            back_into_queue(os.environ),
        )
        raise JobLeaves

    def _retried(self, do: Callable[[], T], max_retries: int, may_grow: bool = False) -> T:
        """Make the gang ready and return the result of `do()`; repeat both when the gang is lost.

        Raises the exception of a rank, RetriesUsedUp if more than `max_retries` gangs were lost, and StateLost. If it
        raises, all ranks are ended, so that none is still busy with the call.
        """
        failures = in_a_row = 0
        while True:
            try:
                self._be_ready(may_grow)
                self._is_in_step = False  # until the call has returned, the ranks' state is between two snapshots
                result = do()
                self._is_in_step, self.has_failed = True, False
                return result
            except GangLost as lost:
                self.has_failed = True
                self.record.gang_lost(lost)
                self._gang.end()
                failures, in_a_row = failures + lost.counts, in_a_row + 1
                if failures > max_retries:
                    problem = f"{lost}; {count(failures, 'failure')}, but max_retries is {max_retries}"
                    self.record.call_failed(given_up := RetriesUsedUp(problem))
                    raise given_up from lost
                _log.warning("%s; the last call is repeated from its start", lost)
                self._nodes.wait(pause_s(in_a_row))
            except BaseException as error:
                self.has_failed = isinstance(error, Exception)
                self.record.call_failed(error)
                self._gang.end()
                raise

    def _change(self, call: Call, calls: int) -> Any:
        """Make a call on all ranks, take a snapshot of the new state, and return the call's result.

        `calls`: the number of `train` calls that the new state contains.
        """
        place = self._place()
        parts = self._gang.call("change", call.method, call.arguments, *place)
        result = call.then([result for result, _ in parts])
        self._take([own for _, own in parts], place, calls, (call, result))
        self._is_changed = True
        self.record.call_made(call.method, self.calls, result)
        return result

    def _snapshot(self) -> None:
        """Take a snapshot of the current state."""
        place = self._place()
        self._take(self._gang.call("snapshot", *place), place, self.calls)

    def _place(self) -> tuple[int, list[int]]:
        """Return the number of a free buffer, and the ranks that write a snapshot to it: two on different nodes."""
        self._gang.poll()
        if self._keeping and self._keeping.node not in self._nodes:
            self._keeping = None
        # Neither the newest snapshot nor the one that is being written to disk may be overwritten.
        taken = {part.buffer for part in (self._held, self._keeping) if part}
        return next(buffer for buffer in range(BUFFERS) if buffer not in taken), _on_different_nodes(self._gang)

    @uninterrupted()
    def _take(
        self, own: list[Own], place: tuple[int, list[int]], calls: int, made: tuple[Call, Any] | None = None
    ) -> None:
        """Record a snapshot that the ranks have taken as the newest one.

        `own`: the ranks' own parts; `place`: what `_place` returned for it; `calls`: the number of `train` calls in it;
        `made`: the call that led to this state, with its result.
        """
        # Uninterrupted: after a Ctrl-C in between, number, calls and record would not belong to the same snapshot.
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
        """Send the ranks' own parts to the agents that hold the snapshot, which completes it on their nodes.

        The first agent writes it to disk if the run is durable, unless an earlier snapshot is being written: training
        does not wait for the disk.
        """
        # Uninterrupted: after a Ctrl-C in between, `_settle` would wait for a writer that has no request.
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
        """Make sure that the gang is complete, has the possible size, and has the state of the newest snapshot."""
        gang = self._gang
        gang.poll()
        if self._nodes.is_taken:
            self._leave_job()
        is_whole = self._is_in_step and gang.size > 0 and not gang.is_broken
        if is_whole and not (may_grow and gang.size != self._wanted.possible(self._nodes)):
            return
        self._is_in_step = False
        if is_whole and not self._holder():
            self._snapshot()  # on a node that stays, while the ranks still exist
        if not self._holder():
            self._settle()  # all nodes that hold the snapshot will be taken away: it must be on disk before that
        gang.end()
        if not self._is_durable:
            self._check_not_lost(None)  # before waiting for nodes, which would be in vain: they do not have the state
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
        """Form a gang and restore the newest snapshot on its ranks."""
        gang = self._gang
        first, source, own = self._source()
        self.record.gang_begins(self._nodes.generation + 1, self.calls)
        gang.form(self._wanted.possible(self._nodes), first)
        self.record.gang_formed([rank.node.host for rank in gang.ranks])
        common = cloudpickle.dumps((self._wanted.settings(gang.size), self._wanted.hook))
        modules = tuple(map(os.path.abspath, sys.path))
        starts = [
            Start(common, source, self._wanted.is_here, own[rank] if rank < len(own) else None, modules)
            for rank in range(gang.size)
        ]
        gang.call_each("begin", [cloudpickle.dumps((start,)) for start in starts])
        if source is None:  # the first call needs a state to be repeated from, too
            self._snapshot()

    def _blame(self, node: GangNode | None) -> None:
        """Record that ranks of `node` failed while a gang was formed; at the second time in a row, exclude the node.

        The node stays if too few slots would remain, or if no other node holds the newest snapshot.
        """
        # Otherwise a node on which ranks always fail would use up `max_retries`.
        is_again, self._blamed = node is self._blamed, node
        if node is None or not is_again or self._nodes.slots - node.slots < self._wanted.least:
            return
        holders = [holder for holder in self._held.nodes if holder in self._nodes.staying] if self._held else []
        if holders == [node]:
            return
        node.is_broken = True
        _log.warning(
            "%s: ranks failed on this node twice in a row while the gang was formed; it is left out until its agent is "
            "replaced",
            node,
        )

    def _holder(self) -> GangNode | None:
        """Return a node that stays and holds the newest snapshot, or None."""
        return next((node for node in self._held.nodes if node in self._nodes.staying), None) if self._held else None

    def _source(self) -> tuple[GangNode | None, int | Path | None, list[bytes]]:
        """Return the newest snapshot: rank 0's node, the buffer or file that rank 0 reads, and the ranks' own parts.

        All are None or empty if the training starts from the beginning. The node is None if rank 0 may be on any node.
        """
        if self._held and (node := self._holder()):
            return node, self._held.buffer, self._held.own
        stored = newest(self._nodes.run) if self._is_durable else None
        self._check_not_lost(stored)
        if self._held and stored:
            _log.warning(
                "all nodes that held the state after train() call %d are lost; the training continues after call %d, "
                "from the newest snapshot on disk",
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
        """Raise StateLost if no node holds the newest snapshot and none is on disk; `stored`: the one on disk, or None.

        Without this error the training would silently start from the beginning.
        """
        if not (self._held and self._is_changed) or self._holder() or stored:
            return
        hosts = ", ".join(str(node) for node in self._held.nodes)
        remedy = (
            f"no snapshot is on disk in {self._nodes.run.snapshots}"
            if self._is_durable
            else "the run is temporary; pass run=NAME to have snapshots on disk too, and train again from the start"
        )
        raise StateLost(f"{hosts}: lost, and no other node held the state after train() call {self.calls}; {remedy}")

    def _on_kept(self, message: dict[str, Any]) -> None:
        """Note the result of a writer. A failure is only logged: the snapshot is still in memory."""
        if self._keeping and self._keeping.number == message["kept"]:
            self._keeping = None
            self._kept = message["kept"]
        if "error" in message:
            _log.warning("snapshot %d was not written to disk: %s", message["kept"], message["error"])


def _on_different_nodes(gang: RankGang) -> list[int]:
    """Return rank 0 and the first rank on another node, if there is one; ranks on nodes that stay are preferred."""
    staying = [rank for rank in gang.ranks if not rank.node.is_leaving] or gang.ranks
    buddies = [rank for rank in staying if rank.node is not staying[0].node]
    return [rank.number for rank in (staying[0], *buddies[:1])]
