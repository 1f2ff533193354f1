"""The agreement to stop: all ranks leave their loops at the same tick, without a collective in the step.

A tick is one call of `should_stop`; every rank makes the same calls. A notice (from the agent, or a signal) is sent to
rank 0. Rank 0 proposes a tick a little ahead; each rank answers whether it is past it already; rank 0 sends the verdict
to all: stop, only if nobody was late. Otherwise it proposes again, twice as far ahead. A rank that comes to a proposed
tick waits there for the verdict, so no rank can run on alone. Between notices the cost is one comparison.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hpc_det.distributed.gang_messages import FOREVER, GangMessages, RankGone
from hpc_det.node.heartbeat import Phase, Progress

ANSWER_S = 300.0
"""For a rank to answer a proposal, which a thread does that has nothing else to do."""


class _Closed(Exception):
    """Nobody asks for a stop any more."""


class StopAgreement:
    """`name`: no other agreement over the same messages has it."""

    def __init__(self, messages: GangMessages, name: str = "stop") -> None:
        self._messages = messages
        self._name = name
        self._tick = 0
        self._phase: Phase = "between steps"
        self._borders = self._began = self._alone = self._first = 0
        self._warm: set[Phase] = set()
        self._stop_at: float = math.inf
        self._settled = False
        self._noticed = False
        self.deadline: float | None = None
        """When this process will be gone, as far as whoever has given notice knows; seconds since the epoch."""
        self._changed = threading.Condition()
        self._problem: str | None = None
        """Why there is no agreement."""
        self._is_closed = False
        self._thread = threading.Thread(target=self._agree, name="stop-agreement", daemon=True)
        self._thread.start()

    @property
    def stopped(self) -> bool:
        """Whether `should_stop` has said so; a tick beyond the end of training may be settled, and never come."""
        return self._settled and self._tick >= self._stop_at

    def should_stop(self) -> bool:
        """Called at the same points by every rank; all get the same answer at the same call."""
        self._tick += 1
        return self._tick >= self._stop_at and self._verdict()

    @contextmanager
    def steps(self, phase: Phase, first: int = 0) -> Iterator[None]:
        """Around a loop over batches from number `first` on, of all ranks, in which `should_stop` or `step` tells of
        each.
        """
        self._border()
        self._first = first
        self._phase = phase
        try:
            yield
        finally:
            self._phase = "between steps"
            self._border()
        self._warm.add(phase)

    def step(self) -> None:
        """Done, in a loop in which not every rank has as many."""
        self._alone += 1

    def _border(self) -> None:
        """Let the hang detector distinguish ranks before, inside and after a loop."""
        self._borders += 1
        self._began, self._alone = self._tick + self._borders, 0

    @property
    def progress(self) -> Progress:
        """Read by another thread. The first tick of a loop may come before its first step."""
        steps = self._tick + self._borders
        warm = self._phase in self._warm or self._alone > 0 or steps > self._began + 1
        batch = self._first + (self._alone or steps - self._began)
        return Progress(self._phase, steps, self._alone, warm and self._phase != "between steps", batch)

    @property
    def noticed(self) -> bool:
        """Whether a stop is on its way: each rank learns it in its own time, so alone it decides nothing."""
        return self._noticed

    def close(self) -> None:
        """After the last tick of all ranks: its thread ends."""
        self._is_closed = True
        self._messages.wake()
        self._thread.join()
        self._messages.forget(*map(self._kind, ("notice", "proposal", "answer", "verdict")))

    def _verdict(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._settled or self._tick < self._stop_at or self._problem)
        if self._problem and not self._settled:
            raise RankGone(f"the ranks cannot agree where to stop: {self._problem}")
        return self.stopped

    def _agree(self) -> None:
        try:
            if self._messages.rank == 0:
                self._messages.from_any(self._kind("notice"), go_on=self._go_on)
            round_ = 0
            while not self._propose(round_):
                round_ += 1
        except _Closed:
            return
        except RankGone as error:
            self._fail(str(error))

    def _propose(self, round_: int) -> bool:
        """One round; True when it settled the tick."""
        if self._messages.rank == 0:
            self._messages.to_all(self._kind("proposal"), [round_, self._tick + 2**round_])
        tick = self._from_rank_0("proposal", round_, FOREVER)
        self._noticed = True
        self._stop_at = tick
        # The main thread counts first and compares then, we compare in the other order: one of us sees the other.
        self._messages.to_rank_0(self._kind("answer"), [round_, self._tick >= tick])
        if self._messages.rank == 0:
            self._messages.to_all(self._kind("verdict"), [round_, self._judge(round_)])
        verdict = self._from_rank_0("verdict", round_, 2 * ANSWER_S)
        if isinstance(verdict, str):
            raise RankGone(verdict)
        with self._changed:
            self._settled = verdict
            self._stop_at = tick if verdict else math.inf
            self._changed.notify_all()
        return self._settled

    def _judge(self, round_: int) -> bool | str:
        """On rank 0: whether nobody was late; or why not all have answered."""
        try:
            answers = self._messages.from_all(
                self._kind("answer"),
                "answered the proposal to stop",
                limit_s=ANSWER_S,
                is_it=lambda answer: answer[0] == round_,
                go_on=self._go_on,
            )
        except RankGone as error:
            return str(error)
        return not any(late for _, late in answers)

    def _from_rank_0(self, kind: str, round_: int, limit_s: float) -> Any:
        """Its value of this round."""
        return self._messages.from_rank_0(
            self._kind(kind),
            f"sent the {kind} of a stop",
            limit_s=limit_s,
            is_it=lambda value: value[0] == round_,
            go_on=self._go_on,
        )[1]

    def _fail(self, problem: str) -> None:
        """A rank that waits at a tick raises it; at the end of the run nobody does."""
        with self._changed:
            self._problem = problem
            self._changed.notify_all()

    def _go_on(self) -> None:
        if self._is_closed:
            raise _Closed

    def _kind(self, kind: str) -> str:
        return f"{self._name}: {kind}"


class ForcedStop(StopAgreement):
    """Also stops at a tick that all ranks know beforehand, without an agreement. Other stops are agreed on as usual."""

    _forced_at = math.inf

    def force(self) -> None:
        """Every rank calls this between the same two ticks: the next one stops."""
        self._forced_at = self._tick + 1

    @property
    def is_forced(self) -> bool:
        return self._tick >= self._forced_at

    @property
    def stopped(self) -> bool:
        return self.is_forced or super().stopped

    def should_stop(self) -> bool:
        return super().should_stop() or self.is_forced


def give_notice(messages: GangMessages, name: str = "stop") -> None:
    """Ask for a stop; any rank may, and more than once."""
    messages.to_rank_0(f"{name}: notice", None)
