"""A rung: the trials that reported at one length, ranked."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from typing import TypeAlias

Place: TypeAlias = tuple[bool, float, int, int]
"""Whether it is the worst there is, the value (smaller is better), the order of arrival, the trial."""


class Rung:
    def __init__(self, length: int) -> None:
        self.length = length
        self._arrived = 0
        self._ranked: list[Place] = []
        self._paused: list[Place] = []
        """Those that may be promoted, best first."""
        self._places: dict[int, Place] = {}

    def insert(self, trial: int, value: float) -> int:
        """How many trials are better, of those here so far. NaN is the worst value."""
        self._arrived += 1
        worst = math.isnan(value)
        place = (worst, 0.0 if worst else value, self._arrived, trial)
        self._places[trial] = place
        insort(self._ranked, place)
        return bisect_left(self._ranked, place)

    def share(self, divisor: float) -> int:
        """How many the best 1/divisor are."""
        return int(len(self._ranked) / divisor)

    def pause(self, trial: int) -> None:
        """The trial waits here for a promotion."""
        insort(self._paused, self._places[trial])

    def promotable(self, divisor: float) -> int | None:
        """The best trial that waits, if it is among the best 1/divisor of all."""
        if self._paused and bisect_left(self._ranked, self._paused[0]) < self.share(divisor):
            return self._paused[0][-1]
        return None

    def unpause(self, trial: int) -> None:
        """If it waits."""
        if trial in self._places:
            _remove(self._paused, self._places[trial])

    def forget(self, trial: int) -> None:
        """As if it had never been here."""
        self.unpause(trial)
        if place := self._places.pop(trial, None):
            _remove(self._ranked, place)


def _remove(places: list[Place], place: Place) -> None:
    i = bisect_left(places, place)
    if i < len(places) and places[i] == place:
        del places[i]
