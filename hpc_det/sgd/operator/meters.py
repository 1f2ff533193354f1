"""What is measured in a pass: means over its batches, weighted by their samples; times; a progress bar."""

from __future__ import annotations

import contextlib
import math
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager
from typing import Any

import torch

from hpc_det.distributed.metrics import number_of, plain
from hpc_det.errors import UsageError
from hpc_det.sgd.operator.options import BATCH_COUNT, EPOCH_IDX, NUM_SAMPLES, NUM_STEPS

WINDOW = 10
"""As many of the last times make the mean."""

_NOT_TIMED = contextlib.nullcontext()


class AverageMeter:
    """The weighted mean of some values, and the last of them.

    Values on a GPU are summed there, in float64: nothing waits for the device before `val`, `sum` or `avg` is read.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._val: Any = 0.0
        self._sum: Any = 0.0
        self.count: float = 0

    def update(self, val: Any, n: float = 1) -> None:
        """A number, a tensor of one element, or whatever can be multiplied by `n` and added, such as an array."""
        number = val if type(val) is float else number_of(val)
        self._val = val if number is None else number
        self.count += n
        if isinstance(number, torch.Tensor):
            self._add_on_device(number, n)
        else:
            self._sum = self._sum + self._val * n

    def _add_on_device(self, value: torch.Tensor, n: float) -> None:
        if not isinstance(self._sum, torch.Tensor):
            self._sum = torch.full((), self._sum, dtype=torch.float64, device=value.device)
        self._sum.add_(value, alpha=n)

    @property
    def val(self) -> Any:
        """The last value."""
        return plain(self._val)

    @property
    def sum(self) -> Any:
        return plain(self._sum)

    @property
    def avg(self) -> Any:
        """NaN before the first sample."""
        return self.sum / self.count if self.count else math.nan


class AverageMeterCollection:
    """One AverageMeter for each metric of the batches."""

    def __init__(self) -> None:
        self._meters: dict[str, AverageMeter] = {}
        self._batches = 0
        self._samples: float = 0

    def update(self, metrics: Mapping[str, Any], n: float = 1) -> None:
        """One batch of `n` samples; what the metrics say under `num_samples` comes before `n`.

        Raises UsageError for anything but a dict.
        """
        if type(metrics) is not dict and not isinstance(metrics, Mapping):  # in every batch
            raise UsageError(f"metrics of a batch are {type(metrics).__name__}; return a dict with names and numbers")
        n = metrics.get(NUM_SAMPLES, n)
        self._batches += 1
        self._samples += n
        for name, value in metrics.items():
            if name != NUM_SAMPLES:
                self._meter(name).update(value, n)

    def _meter(self, name: str) -> AverageMeter:
        meter = self._meters.get(name)
        if meter is None:
            meter = self._meters[name] = AverageMeter()
        return meter

    def summary(self) -> dict[str, Any]:
        """`batch_count`, `num_samples`, and for each metric m: `m`, its mean over the samples, and `last_m`."""
        result: dict[str, Any] = {BATCH_COUNT: self._batches, NUM_SAMPLES: self._samples}
        for name, meter in self._meters.items():
            result[str(name)] = meter.avg
            result[f"last_{name}"] = meter.val
        return result


# --- times of the parts of a step, for `profile=True`


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


# --- use_tqdm: a bar over the batches of a call


def bar_over(batches: Iterable[Any], info: Mapping[str, Any]) -> Bar:
    """Titled "2/10e" for the second of `num_epochs` 10 in `info`, else "2e"; as long as is known."""
    of_all = f"/{info['num_epochs']}" if "num_epochs" in info else ""
    total = info[NUM_STEPS]
    if total is None and isinstance(batches, Sized):
        total = len(batches)
    return Bar(f"{info[EPOCH_IDX] + 1}{of_all}e", total)


class NoBar:
    def __enter__(self) -> NoBar:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def advance(self, metrics: Mapping[str, Any]) -> None:
        """One batch is done."""


class Bar(NoBar):
    """With the metrics of the last batch, which are read, and waited for, only when the bar is drawn."""

    def __init__(self, title: str, batches: int | None) -> None:
        from tqdm import tqdm

        self._bar = tqdm(desc=title, total=batches, unit="batch", leave=False)

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def advance(self, metrics: Mapping[str, Any]) -> None:
        if self._bar.update():
            self._bar.set_postfix({name: plain(value) for name, value in metrics.items()})
