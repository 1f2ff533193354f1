"""The agreement to stop: all ranks end their loops at the same tick, without a collective in each step.

A tick is one call of `should_stop`; every rank makes the same calls. The protocol has rounds:

1. A notice (from the agent, or of a signal) is sent to rank 0.
2. Rank 0 proposes a tick: in round n, its current tick + 2**n. So after a few rounds the tick is far enough ahead for
   every rank to receive the proposal before it reaches the tick, however short a step is.
3. Each rank answers whether it has reached that tick already.
4. Rank 0 sends the verdict to all: stop at that tick if no rank was late. Otherwise the next round begins.

A rank that reaches a proposed tick waits there for the verdict, so no rank runs ahead alone. While no stop is proposed,
a tick costs one comparison.
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
"""Seconds within which a rank answers a proposal. An otherwise idle thread answers, so training does not delay it."""


class _Closed(Exception):
    """Raised in the agreement's thread when the agreement is closed."""


class StopAgreement:
    """One rank's part in the agreement. `name` distinguishes it from other agreements over the same messages."""

    def __init__(self, messages: GangMessages, name: str = "stop") -> None:
        self._messages = messages
        self._name = name
        self._tick = 0
        self._phase: Phase = "between steps"
        self._borders = 0
        """Starts and ends of loops so far; see `_border`."""
        self._began = 0
        """Ticks and borders at the latest border."""
        self._alone = 0
        """Calls of `step` since the latest border."""
        self._first = 0
        """Number of the first batch of the current loop."""
        self._warm: set[Phase] = set()
        """Phases of which a loop was completed. The first step of a phase may take long, such as for compiling."""
        self._stop_at: float = math.inf
        """The proposed or settled tick; infinity if there is none."""
        self._settled = False
        """Whether all ranks have agreed on `_stop_at`."""
        self._noticed = False
        self.deadline: float | None = None
        """Time at which this process is expected to be killed, in seconds since the epoch; None if not known."""
        self._changed = threading.Condition()
        self._problem: str | None = None
        """The reason why no agreement is possible; None while there is none."""
        self._is_closed = False
        self._thread = threading.Thread(target=self._agree, name="stop-agreement", daemon=True)
        self._thread.start()

    @property
    def ticks(self) -> int:
        """Number of calls of `should_stop`."""
        return self._tick

    @property
    def stopped(self) -> bool:
        """Whether `should_stop` has returned True."""
        # Settled alone is not enough: the settled tick may be beyond the end of training, and never be reached.
        return self._settled and self._tick >= self._stop_at

    def should_stop(self) -> bool:
        """Return whether to stop now. Every rank calls this at the same points and gets the same answer at each."""
        self._tick = tick = self._tick + 1
        return tick >= self._stop_at and self._verdict()

    @contextmanager
    def steps(self, phase: Phase, first: int = 0) -> Iterator[None]:
        """Mark a loop over batches, from number `first` on, that calls `should_stop` or `step` once per batch.

        Every rank runs the loop.
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
        """Count a step of a loop in which ranks may have different numbers of steps, so that ticks do not count it."""
        self._alone += 1

    def _border(self) -> None:
        """Count a loop's start or end as a step: the hang detector then sees which ranks are before, in or after it."""
        self._borders += 1
        self._began, self._alone = self._tick + self._borders, 0

    @property
    def progress(self) -> Progress:
        """This rank's progress, read by another thread."""
        steps = self._tick + self._borders
        # The first tick of a loop may come before its first step, so one tick does not yet show that a step is done.
        warm = self._phase in self._warm or self._alone > 0 or steps > self._began + 1
        batch = self._first + (self._alone or steps - self._began)
        return Progress(self._phase, steps, self._alone, warm and self._phase != "between steps", batch)

    @property
    def noticed(self) -> bool:
        """Whether a stop has been proposed. Ranks see it at different times, so a rank must not act on it alone."""
        return self._noticed

    def wait_for_proposal(self) -> None:
        """Wait until a stop has been proposed, after `give_notice`.

        If every rank calls this between the same two ticks, all of them stop at the next tick. Raises RankGone if a
        rank has exited, so that no agreement is possible.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._noticed or self._problem)
        if self._problem and not self._noticed:
            raise RankGone(f"the ranks cannot agree where to stop: {self._problem}")

    def close(self) -> None:
        """End the agreement's thread. Call after the last tick of all ranks."""
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
        """Run one round; return True if it settled the tick."""
        if self._messages.rank == 0:
            self._messages.to_all(self._kind("proposal"), [round_, self._tick + 2**round_])
        tick = self._from_rank_0("proposal", round_, FOREVER)
        self._stop_at = tick
        with self._changed:
            self._noticed = True  # after `_stop_at`, since the tick after `wait_for_proposal` compares with it
            self._changed.notify_all()
        # The main thread increments its tick and then compares; this thread sets `_stop_at` and then compares. In
        # whatever order they run, at least one of them sees the other's change.
        self._messages.to_rank_0(self._kind("answer"), [round_, self._tick >= tick])
        if self._messages.rank == 0:
            self._messages.to_all(self._kind("verdict"), [round_, self._judge(round_)])
        # Twice the limit: rank 0 itself waits up to ANSWER_S for the answers before it sends the verdict.
        verdict = self._from_rank_0("verdict", round_, 2 * ANSWER_S)
        if isinstance(verdict, str):  # rank 0 did not get all answers
            raise RankGone(verdict)
        with self._changed:
            self._settled = verdict
            self._stop_at = tick if verdict else math.inf
            self._changed.notify_all()
        return self._settled

    def _judge(self, round_: int) -> bool | str:
        """Return whether no rank was late, or the reason why answers are missing. On rank 0 only."""
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
        """Return rank 0's value of this kind in this round."""
        return self._messages.from_rank_0(
            self._kind(kind),
            f"sent the {kind} of a stop",
            limit_s=limit_s,
            is_it=lambda value: value[0] == round_,
            go_on=self._go_on,
        )[1]

    def _fail(self, problem: str) -> None:
        """Record why no agreement is possible; a rank that waits at a tick then raises RankGone with this reason."""
        with self._changed:
            self._problem = problem
            self._changed.notify_all()

    def _go_on(self) -> None:
        if self._is_closed:
            raise _Closed

    def _kind(self, kind: str) -> str:
        return f"{self._name}: {kind}"


class ForcedStop(StopAgreement):
    """An agreement that can also stop at a tick that all ranks know beforehand. Other stops are agreed on as usual."""

    _forced_at = math.inf

    def force(self) -> None:
        """Make the next tick stop. Every rank calls this between the same two ticks."""
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
    """Ask for a stop. Any rank may call this, also repeatedly."""
    messages.to_rank_0(f"{name}: notice", None)
