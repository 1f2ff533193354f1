"""A rung: the trials that reported at one length, ranked."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from typing import TypeAlias

Place: TypeAlias = tuple[bool, float, int, int]
"""Whether it is the worst there is, the value (smaller is better), the order of arrival, the trial."""


class Rung:
    def __init__(self, length: int) -> None:
        self.length = length
        self._arrived = 0
        self._places: dict[int, Place] = {}
        self._paused: list[Place] = []
        """A heap: those that may be promoted."""
        self._settled: list[Place] = []
        """In order: those that went on or stopped."""

    def settle(self, trial: int, value: float) -> int:
        """The trial goes on or stops; how many of those before it are better. NaN is the worst value."""
        place = self._arrive(trial, value)
        better = bisect_left(self._settled, place)
        self._settled.insert(better, place)
        return better

    def pause(self, trial: int, value: float) -> None:
        """The trial waits for a promotion."""
        heapq.heappush(self._paused, self._arrive(trial, value))

    def share(self, divisor: float) -> int:
        """How many the best 1/divisor are."""
        return int(len(self._places) / divisor)

    def promotable(self, divisor: float) -> int | None:
        """The best trial that waits, if it is among the best 1/divisor of all: who is better has settled."""
        if not self._paused:
            return None
        share, settled = self.share(divisor), self._settled
        if share and (len(settled) < share or self._paused[0] < settled[share - 1]):
            return self._paused[0][-1]
        return None

    def unpause(self, trial: int) -> None:
        """The trial waits no longer, and keeps its place."""
        place = self._places[trial]
        self._leave(place)
        insort(self._settled, place)

    def forget(self, trial: int) -> None:
        """As if it had never been here."""
        if place := self._places.pop(trial, None):
            i = bisect_left(self._settled, place)
            if self._settled[i : i + 1] == [place]:
                del self._settled[i]
            else:
                self._leave(place)

    def _arrive(self, trial: int, value: float) -> Place:
        self._arrived += 1
        worst = math.isnan(value)
        place = self._places[trial] = (worst, 0.0 if worst else value, self._arrived, trial)
        return place

    def _leave(self, place: Place) -> None:
        if place == self._paused[0]:
            heapq.heappop(self._paused)
        else:  # rare: a trial ended that nobody worked on
            self._paused.remove(place)
            heapq.heapify(self._paused)
