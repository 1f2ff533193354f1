"""Seconds by name, of timed functions: the time of a function within another one counts once, under its own name."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import repeat
from threading import get_ident
from typing import Any

import torch

Timed = Callable[[str, Callable[..., Any]], Callable[..., Any]]
"""Returns a function that also records its time under the name."""

CALLBACKS = "callbacks."
"""Prefix of the names of timed callbacks, as in callbacks.MyCallback.on_training_start."""


def untimed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function itself: the Timed of a training without profiling."""
    return function


class Timer:
    """Timer of the thread that calls `start`. Calls in other threads, before `start` and after `stop` are not timed."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock`: returns seconds; see `synchronized`."""
        self._clock = clock
        self._thread: int | None = None
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._inner = 0.0
        """Seconds of timed functions within the current call."""

    def start(self) -> None:
        self._thread = get_ident()

    def stop(self) -> None:
        self._thread = None

    def take(self) -> dict[str, float]:
        """Return the seconds by name since the last `take`."""
        taken = dict(self._seconds)
        self._seconds.clear()
        return taken

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls `function` and adds its time to `name`.

        The time of timed functions that it calls counts only under their own names.
        """
        clock = self._clock

        def call(*arguments: Any, **options: Any) -> Any:
            if get_ident() != self._thread:
                return function(*arguments, **options)
            outer, self._inner = self._inner, 0.0
            began = clock()
            try:
                return function(*arguments, **options)
            finally:
                took = clock() - began
                self._seconds[name] += took - self._inner
                self._inner = outer + took

        return call

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """Add the time of the block to `name`, like that of a function from `timed`."""
        outer, self._inner = self._inner, 0.0
        began = self._clock()
        try:
            yield
        finally:
            took = self._clock() - began
            self._seconds[name] += took - self._inner
            self._inner = outer + took

    def time(self, thing: object, method: str, name: str) -> None:
        """Replace the method of this object by one that is timed as `name`."""
        setattr(thing, method, self.timed(name, getattr(thing, method)))

    def timed_as_a_whole(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a timed function: functions that are timed within it count as `name`, too, except callbacks."""
        timed = self.timed(name, function)

        def call(*arguments: Any, **options: Any) -> Any:
            before, self._seconds = self._seconds, defaultdict(float)
            try:
                return timed(*arguments, **options)
            finally:
                within, self._seconds = self._seconds, before
                for each, seconds in within.items():
                    before[each if each.startswith(CALLBACKS) else name] += seconds

        return call

    def timed_batches(self, name: str, batches: Iterator[Any]) -> Iterator[Any]:
        """Return an iterator of the same batches; the time of each next() counts as `name`."""
        return map(self.timed(name, next), repeat(batches))


def synchronized(device: torch.device) -> Callable[[], float]:
    """Return a clock in seconds that first waits for the work of the GPU.

    So the time of a kernel counts for the function that has launched it. On a CPU the clock does not wait.
    """

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock if device.type == "cuda" else time.perf_counter
