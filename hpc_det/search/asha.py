"""Asynchronous successive halving: many trials train briefly, the best 1/divisor of them train longer, and so on.

Li et al., "A System for Massively Parallel Hyperparameter Tuning" (MLSys 2020). The rule has two forms, as in
Determined: with promotion, a trial pauses at each rung until it is among the best; with stopping (`stop_once`), it
continues or ends as soon as it reaches the rung.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from typing import TypeAlias

from hpc_det.search.method import Exit, Trials, Work

NEARLY_DONE = 0.99
"""The progress reported while a search still runs after it has trained as much as it expected to."""


def rung_lengths(rungs: int, divisor: float, max_length: int) -> list[int]:
    """Return the lengths of the rungs in ascending order, the last is `max_length`. Equal lengths become one rung."""
    return sorted({max(int(max_length / divisor ** (rungs - i - 1)), 1) for i in range(rungs)})


class AsyncHalving:
    """Asynchronous successive halving as a search method."""

    def __init__(
        self, lengths: list[int], max_trials: int, *, divisor: float, smaller_is_better: bool, stop_once: bool
    ) -> None:
        self.trials_expected = max_trials
        self._rungs = [Rung(length, divisor) for length in lengths]
        self._steps = list(zip(self._rungs, self._rungs[1:], strict=False))[::-1]
        """Pairs of a rung and the one above it, the highest first."""
        self._sign = 1 if smaller_is_better else -1
        self._stop_once = stop_once
        self._trials = Trials(max_trials)
        self._rung_of: dict[int, int] = {}
        """Index of the rung that a trial trains for or pauses at."""
        self._trained = 0
        """The length that all trials together have trained."""
        self.length_expected = sum(int(max_trials / divisor**i) * self._stretch(i) for i in range(len(lengths)))
        """The length of all trials together if each rung promotes as many trials as the rule intends."""

    def next_work(self) -> Work | None:
        """Return work that was decided before, else the highest possible promotion, else a new trial."""
        return self._trials.waiting_work() or self._promotion() or self._new_trial()

    def start(self, work: Work) -> None:
        if work.trial not in self._rung_of:
            self._rung_of[work.trial] = 0
        elif not self._trials.is_under_way(work.trial):
            self._rung(work.trial).unpause(work.trial)
            self._rung_of[work.trial] += 1
        assert work.until == self._rung(work.trial).length, work
        self._trials.start(work)

    def report(self, trial: int, value: float) -> None:
        """Let the trial pause, continue or stop at its rung; after the last rung it is closed."""
        del self._trials.working[trial]
        here = self._rung_of[trial]
        self._trained += self._stretch(here)
        if here + 1 == len(self._rungs):
            self._trials.close(trial)
        elif self._stop_once:
            self._go_on_or_stop(trial, self._sign * value)
        else:
            self._rungs[here].pause(trial, self._sign * value)

    def _go_on_or_stop(self, trial: int, value: float) -> None:
        """Queue the trial's next work if it is among the best of its rung now, else close it."""
        rung = self._rung(trial)
        # The first trials always continue: with fewer than `divisor` trials, the share would be 0.
        if rung.settle(trial, value) < max(rung.share, 1):
            self._rung_of[trial] += 1
            self._trials.queue(Work(trial, self._rung(trial).length))
        else:
            self._trials.close(trial)

    def end(self, trial: int, how: Exit) -> None:
        """Close the trial. If it has work, it counts as the worst of its rung.

        A trial with invalid hyperparameters is replaced, and its earlier results are removed from all rungs.
        """
        if self.is_closed(trial):
            return
        if how is Exit.INVALID_HP:
            for rung in self._rungs[: self._rung_of[trial] + 1]:
                rung.forget(trial)
            self._trials.replace(trial)
            return
        if self._trials.is_under_way(trial):
            self._trained += self._stretch(self._rung_of[trial])
            # As the worst value, it still counts in the number of trials that reached the rung.
            self._rung(trial).settle(trial, math.nan)
        else:
            self._rung(trial).unpause(trial)
        self._trials.close(trial)

    def give_back(self, trial: int) -> None:
        self._trials.give_back(trial)

    @property
    def lengths(self) -> list[int]:
        """The lengths of the rungs, in ascending order."""
        return [rung.length for rung in self._rungs]

    def rung_of(self, trial: int) -> int:
        """Return the index of the rung that the trial trains for, or that it reached last."""
        return self._rung_of[trial]

    def is_closed(self, trial: int) -> bool:
        """Return whether the trial will get no more work. A paused trial may be promoted until the search is
        finished.
        """
        return trial in self._trials.closed or (trial in self._rung_of and self.finished)

    @property
    def working(self) -> int:
        """The number of trials that train now."""
        return len(self._trials.working)

    @property
    def finished(self) -> bool:
        return not self._trials.working and self.next_work() is None

    @property
    def progress(self) -> float:
        # More trials may be promoted than the rule intends, so the estimate may exceed 1.
        return 1.0 if self.finished else min(self._trained / self.length_expected, NEARLY_DONE)

    def _new_trial(self) -> Work | None:
        new = self._trials.new_trial()
        return Work(new, self._rungs[0].length) if new else None

    def _promotion(self) -> Work | None:
        """Return work for a paused trial that may be promoted, from the highest rung that has one, or None."""
        for rung, above in self._steps:
            if rung.promotable:
                return Work(rung.promotable, above.length)
        return None

    def _rung(self, trial: int) -> Rung:
        return self._rungs[self._rung_of[trial]]

    def _stretch(self, rung: int) -> int:
        """Return the length that a trial trains from the rung below to this one."""
        return self._rungs[rung].length - (self._rungs[rung - 1].length if rung else 0)


Standing: TypeAlias = tuple[bool, float, int, int]
"""A key that ranks trials: whether the value is NaN (worst), the value (smaller is better), order of arrival, trial."""


class Rung:
    """The ranking of the trials that reported at one length."""

    def __init__(self, length: int, divisor: float) -> None:
        self.length = length
        self.promotable: int | None = None
        """The best waiting trial if it is among the best 1/divisor of all trials here, else None.

        Computed when the rung changes, because a search reads it for every rung at every report.
        """
        self._divisor = divisor
        self._arrived = 0
        self._standings: dict[int, Standing] = {}
        self._paused: list[Standing] = []
        """Trials that may be promoted, as a heap."""
        self._settled: list[Standing] = []
        """Trials that continued or stopped, sorted."""

    def settle(self, trial: int, value: float) -> int:
        """Add a trial that continues or stops at once; return how many of the settled trials are better.

        Values are compared as "smaller is better"; NaN is the worst.
        """
        standing = self._arrive(trial, value)
        better = bisect_left(self._settled, standing)
        self._settled.insert(better, standing)
        self._update()
        return better

    def pause(self, trial: int, value: float) -> None:
        """Add a trial that waits for a promotion."""
        heapq.heappush(self._paused, self._arrive(trial, value))
        self._update()

    @property
    def share(self) -> int:
        """The number of trials in the best 1/divisor of this rung, rounded down."""
        return int(len(self._standings) / self._divisor)

    def unpause(self, trial: int) -> None:
        """Mark a waiting trial as one that continued or stopped; it keeps its rank."""
        standing = self._standings[trial]
        self._leave(standing)
        insort(self._settled, standing)
        self._update()

    def forget(self, trial: int) -> None:
        """Remove the trial, as if it had never reported here."""
        if standing := self._standings.pop(trial, None):
            i = bisect_left(self._settled, standing)
            if self._settled[i : i + 1] == [standing]:
                del self._settled[i]
            else:
                self._leave(standing)
        self._update()

    def _update(self) -> None:
        share, settled, paused = self.share, self._settled, self._paused
        # All trials that are better than the first paused one have settled, so it is enough to compare with those.
        is_promotable = paused and share and (len(settled) < share or paused[0] < settled[share - 1])
        self.promotable = paused[0][-1] if is_promotable else None

    def _arrive(self, trial: int, value: float) -> Standing:
        self._arrived += 1
        worst = math.isnan(value)
        standing = self._standings[trial] = (worst, 0.0 if worst else value, self._arrived, trial)
        return standing

    def _leave(self, standing: Standing) -> None:
        """Remove a trial from the paused ones."""
        if standing == self._paused[0]:
            heapq.heappop(self._paused)
        else:  # rare: a trial ended while it was paused
            self._paused.remove(standing)
            heapq.heapify(self._paused)
