"""Simulation of a search without training: workers take work and report values, in virtual time."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from hpc_det.search.method import SearchMethod, Work

Value = Callable[[Work], float]
"""A function that returns the value which a trial reports after this work."""


@dataclass(frozen=True, kw_only=True)
class Played:
    """The result of a simulation."""

    reached: dict[int, int | None]
    """The length that each trial was trained to; None for work without a length."""
    decisions: int
    """Number of decisions that the search method made."""
    seconds: float
    """Virtual seconds until the end."""
    busy: float
    """The fraction of all workers' time in which they trained, 0 to 1."""


def at_random() -> Value:
    """Return a function with random values that are the same in every simulation."""
    draws = random.Random(0)
    return lambda work: draws.random()


def simulate(
    method: SearchMethod,
    value: Value,
    *,
    workers: int,
    unit_s: float = 1.0,
    latency_s: float = 0.0,
    ends_s: float = math.inf,
) -> Played:
    """Simulate `method` with `workers` workers until it is finished, or until `ends_s` virtual seconds have passed.

    Training one unit of length takes `unit_s` seconds; work without a length is one unit. Each decision takes
    `latency_s` seconds, and the decisions for all workers are made one after another. A report and the next work of the
    same worker are one decision. `value` returns the reported values.
    """
    return _Play(method, value, workers, unit_s, latency_s).until(ends_s)


class _Play:
    def __init__(self, method: SearchMethod, value: Value, workers: int, unit_s: float, latency_s: float) -> None:
        self._method = method
        self._value = value
        self._workers = self._idle = workers
        self._unit_s = unit_s
        self._latency_s = latency_s
        self._decisions = 0
        self._decided_s = 0.0
        """Virtual time of the last decision, in seconds."""
        self._running: list[tuple[float, int, float, Work]] = []
        """A heap of (end, order, start, work), sorted by end."""
        self._trained_s = 0.0
        self._reached: dict[int, int | None] = {}

    def until(self, ends_s: float) -> Played:
        now = 0.0
        self._hand_out(self._decide(now))
        while self._running and self._running[0][0] <= ends_s:
            now, _, began, work = heapq.heappop(self._running)
            self._trained_s += now - began
            self._reached[work.trial] = work.until
            at = self._decide(now)
            self._method.report(work.trial, self._value(work))
            self._idle += 1
            self._hand_out(at)
        seconds = now if math.isinf(ends_s) else ends_s
        unfinished_s = sum(max(seconds - began, 0) for _, _, began, _ in self._running)
        return Played(
            reached=self._reached,
            decisions=self._decisions,
            seconds=seconds,
            busy=(self._trained_s + unfinished_s) / (self._workers * seconds),
        )

    def _decide(self, asked_s: float) -> float:
        """Return the virtual time at which a decision that is requested at `asked_s` is made, in seconds."""
        self._decisions += 1
        self._decided_s = max(self._decided_s, asked_s) + self._latency_s
        return self._decided_s

    def _hand_out(self, at: float) -> None:
        """Assign work to the worker whose decision is made at `at`, then to all other idle workers."""
        while self._idle and (work := self._method.next_work()):
            self._method.start(work)
            self._idle -= 1
            end = at + self._unit_s * ((work.until or 1) - (self._reached.get(work.trial) or 0))
            heapq.heappush(self._running, (end, self._decisions, at, work))
            if self._idle:
                at = self._decide(at)
