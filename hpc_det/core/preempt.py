"""The agreement to stop: all ranks leave their loops at the same tick, without a collective in the step.

A tick is one call of `should_stop`; every rank makes the same calls. A notice (from the agent, or a signal) reaches
rank 0 through a store that threads wait in. Rank 0 proposes a tick a little ahead; each rank answers whether it is past
it already; the last to answer writes the verdict, "stop" only if nobody was late. Otherwise rank 0 proposes again,
twice as far ahead. A rank that comes to a proposed tick waits there for the verdict, so no rank can run on alone.
Between notices the cost is one comparison.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store

from hpc_det.launch.watch.heartbeat import Phase, Progress

_FOREVER = timedelta(days=365)


class StopAgreement:
    """`store` must be this rank's own connection, since a thread of it waits in there."""

    def __init__(self, rank: int, size: int, store: Store, prefix: str) -> None:
        self._rank = rank
        self._size = size
        self._store = PrefixStore(prefix, store)
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
        """Whoever is before a loop, in it and behind it can be told apart."""
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
        """Collective, after the last tick of all ranks and one more notice: the threads settle on a tick that never
        comes, and end. One that waits in the store while the interpreter ends could abort it.
        """
        self._thread.join()

    def _verdict(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._settled or self._tick < self._stop_at)
        return self.stopped

    def _agree(self) -> None:
        try:
            if self._rank == 0:
                self._store.wait(["notice"], _FOREVER)
            round_ = 0
            while not self._propose(round_):
                round_ += 1
        except RuntimeError:  # the store ends with its server, at the end of the run
            return

    def _propose(self, round_: int) -> bool:
        """One round; True when it settled the tick."""
        store = self._store
        if self._rank == 0:
            store.set(f"proposal/{round_}", str(self._tick + 2**round_))
        store.wait([f"proposal/{round_}"], _FOREVER)
        self._noticed = True
        tick = int(store.get(f"proposal/{round_}"))
        self._stop_at = tick
        # The main thread counts first and compares then, we compare in the other order: one of us sees the other.
        if self._tick >= tick:
            store.add(f"late/{round_}", 1)
        if store.add(f"answers/{round_}", 1) == self._size:
            store.set(f"verdict/{round_}", "again" if store.add(f"late/{round_}", 0) else "stop")
        store.wait([f"verdict/{round_}"], _FOREVER)
        settled: bool = store.get(f"verdict/{round_}") == b"stop"
        with self._changed:
            self._settled = settled
            self._stop_at = tick if settled else math.inf
            self._changed.notify_all()
        return settled


def give_notice(store: Store, prefix: str) -> None:
    """Ask for a stop; any rank may, and more than once."""
    PrefixStore(prefix, store).set("notice", "1")
