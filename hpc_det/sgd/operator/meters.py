"""Measurements of a training or validation call: sample-weighted means of metrics, timers, a progress bar."""

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
"""Number of most recent durations over which a timer averages, as in RaySGD."""

_NOT_TIMED = contextlib.nullcontext()


class AverageMeter:
    """The weighted mean of a series of values, and the last value.

    Tensors on a GPU are summed there in float64; only reading `val`, `sum` or `avg` waits for the device.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Remove all values."""
        self._val: Any = 0.0
        self._sum: Any = 0.0
        self.count: float = 0
        """Sum of the weights."""

    def update(self, val: Any, n: float = 1) -> None:
        """Add a value.

        Args:
            val: A number, a tensor of one element, or an object that can be multiplied by `n` and added, such as a
                numpy array.
            n: Weight of the value, usually the number of samples in the batch.
        """
        number = val if type(val) is float else number_of(val)
        self._val = val if number is None else number
        self.count += n
        if isinstance(number, torch.Tensor):
            self._add_on_device(number, n)
        else:
            self._sum = self._sum + self._val * n

    def _add_on_device(self, value: torch.Tensor, n: float) -> None:
        """Add a tensor to the sum without copying it to the CPU, which would wait for the device."""
        # float64, because a float32 sum that has reached 2**24 does not change when 1 is added.
        if not isinstance(self._sum, torch.Tensor):
            self._sum = torch.full((), self._sum, dtype=torch.float64, device=value.device)
        self._sum.add_(value, alpha=n)

    @property
    def val(self) -> Any:
        """The last value."""
        return plain(self._val)

    @property
    def sum(self) -> Any:
        """The weighted sum of all values."""
        return plain(self._sum)

    @property
    def avg(self) -> Any:
        """The weighted mean of all values; NaN if there is none."""
        return self.sum / self.count if self.count else math.nan


class AverageMeterCollection:
    """One AverageMeter per metric name, for the metrics of a series of batches."""

    def __init__(self) -> None:
        self._meters: dict[str, AverageMeter] = {}
        self._batches = 0
        self._samples: float = 0

    def update(self, metrics: Mapping[str, Any], n: float = 1) -> None:
        """Add the metrics of one batch.

        Args:
            metrics: Values by name. The key `num_samples`, if present, is the weight and not a metric.
            n: Weight of the batch if `metrics` has no `num_samples`.

        Raises:
            UsageError: `metrics` is not a mapping.
        """
        # This runs for every batch: `type(...) is dict` is much cheaper than isinstance with the Mapping ABC.
        if type(metrics) is not dict and not isinstance(metrics, Mapping):
            raise UsageError(
                f"the metrics of a batch are {type(metrics).__name__}, not a dict; return a dict of names and numbers"
            )
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
        """Return `batch_count`, `num_samples`, and for each metric m its mean over samples, `m`, and `last_m`."""
        result: dict[str, Any] = {BATCH_COUNT: self._batches, NUM_SAMPLES: self._samples}
        for name, meter in self._meters.items():
            result[str(name)] = meter.avg
            result[f"last_{name}"] = meter.val
        return result


# --- timers of the parts of a step, for `profile=True`


class TimerStat:
    """The most recent durations of one part of a step, in seconds."""

    def __init__(self, window: int = WINDOW) -> None:
        self._times: deque[float] = deque(maxlen=window)

    def push(self, seconds: float) -> None:
        """Add a duration, and drop the oldest one if there are more than `window`."""
        self._times.append(seconds)

    @property
    def mean(self) -> float:
        """The mean of the durations in seconds; NaN if there is none."""
        return sum(self._times) / len(self._times) if self._times else float("nan")


class TimerCollection:
    """Timers by name. They are disabled until `enable` is called, and cost almost nothing then.

    Enabled timers on a GPU synchronize with the device before and after each part, so training is slower.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device if device is not None and device.type == "cuda" else None
        self._timers: defaultdict[str, TimerStat] = defaultdict(TimerStat)
        self._on = False

    def enable(self) -> None:
        """Measure all parts from now on."""
        self._on = True

    def disable(self) -> None:
        """Measure nothing from now on; keep the recorded times."""
        self._on = False

    def reset(self) -> None:
        """Remove all times."""
        self._timers.clear()

    def record(self, name: str) -> AbstractContextManager[None]:
        """Return a context manager that measures the part `name` if the timers are enabled."""
        return self._timed(name) if self._on else _NOT_TIMED

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        self._wait_for_device()
        begun = time.perf_counter()
        yield
        self._wait_for_device()
        self._timers[name].push(time.perf_counter() - begun)

    def _wait_for_device(self) -> None:
        # CUDA kernels run asynchronously: without a synchronization, the time of a part would be charged to the next
        # part that waits for the device.
        if self._device:
            torch.cuda.synchronize(self._device)

    def stats(self) -> dict[str, float]:
        """Return the mean duration of each part in seconds, under the key `mean_NAME_s`."""
        return {f"mean_{name}_s": timer.mean for name, timer in self._timers.items()}


# --- the progress bar over the batches of a call (use_tqdm)


def bar_over(batches: Iterable[Any], info: Mapping[str, Any]) -> Bar:
    """Return a progress bar titled "2/10e" (second epoch of `info["num_epochs"]`), or "2e" without that key.

    Its total is `info["__num_steps__"]`, else the length of `batches` if that has one.
    """
    of_all = f"/{info['num_epochs']}" if "num_epochs" in info else ""
    total = info[NUM_STEPS]
    if total is None and isinstance(batches, Sized):
        total = len(batches)
    return Bar(f"{info[EPOCH_IDX] + 1}{of_all}e", total)


class NoBar:
    """A progress bar that shows nothing."""

    def __enter__(self) -> NoBar:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def advance(self, metrics: Mapping[str, Any]) -> None:
        """Advance by one finished batch, and show its metrics; this class does neither."""


class Bar(NoBar):
    """A tqdm progress bar that shows the metrics of the last batch."""

    def __init__(self, title: str, batches: int | None) -> None:
        from tqdm import tqdm  # an optional dependency

        self._bar = tqdm(desc=title, total=batches, unit="batch", leave=False)

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def advance(self, metrics: Mapping[str, Any]) -> None:
        if self._bar.update():  # true if tqdm has drawn the bar: only then read the metrics, which waits for the GPU
            self._bar.set_postfix({name: plain(value) for name, value in metrics.items()})
