"""How long the parts of a step take, for `profile=True`."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch

WINDOW = 10
"""As many of the last times make the mean."""


class TimerStat:
    """The last times of one part, in seconds."""

    def __init__(self, window: int = WINDOW) -> None:
        self._times: deque[float] = deque(maxlen=window)

    def push(self, seconds: float) -> None:
        self._times.append(seconds)

    @property
    def mean(self) -> float:
        """NaN before the first one."""
        return sum(self._times) / len(self._times) if self._times else float("nan")


_NOT_TIMED = contextlib.nullcontext()


class TimerCollection:
    """Timers by name. Off, as they are at first, they cost next to nothing.

    On, and with a GPU, each part waits for the device when it begins and when it ends: a GPU works behind the program,
    and otherwise the first part to wait would show the time of all. Training under a profile is slower for that.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device if device is not None and device.type == "cuda" else None
        self._timers: defaultdict[str, TimerStat] = defaultdict(TimerStat)
        self._on = False

    def enable(self) -> None:
        self._on = True

    def disable(self) -> None:
        self._on = False

    def reset(self) -> None:
        """Forget all times."""
        self._timers.clear()

    def record(self, name: str) -> AbstractContextManager[None]:
        """Around a part of the work."""
        return self._timed(name) if self._on else _NOT_TIMED

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        self._wait_for_device()
        begun = time.perf_counter()
        yield
        self._wait_for_device()
        self._timers[name].push(time.perf_counter() - begun)

    def _wait_for_device(self) -> None:
        if self._device:
            torch.cuda.synchronize(self._device)

    def stats(self) -> dict[str, float]:
        """`mean_NAME_s` for each name."""
        return {f"mean_{name}_s": timer.mean for name, timer in self._timers.items()}
