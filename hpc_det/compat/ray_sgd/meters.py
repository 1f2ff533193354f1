"""`ray.util.sgd.utils`: keys of results, meters, timers and `override`."""

from __future__ import annotations

import time
from typing import Any

from hpc_det.compat.ray_core import NoTasks
from hpc_det.sgd.operator import meters
from hpc_det.sgd.operator.meters import WINDOW, AverageMeter, AverageMeterCollection, TimerCollection
from hpc_det.sgd.operator.options import BATCH_COUNT, BATCH_SIZE, NUM_SAMPLES
from hpc_det.sgd.operator.porting import find_free_port, override

__all__ = [
    "BATCH_COUNT",
    "BATCH_SIZE",
    "NUM_SAMPLES",
    "AverageMeter",
    "AverageMeterCollection",
    "TimerCollection",
    "TimerStat",
    "check_for_failure",
    "find_free_port",
    "override",
]


class TimerStat(meters.TimerStat):
    """The most recent durations of a code block in seconds; `with timer:` measures one."""

    def __init__(self, window_size: int = WINDOW) -> None:
        super().__init__(window_size)

    def __enter__(self) -> None:
        self._begun = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.push(time.perf_counter() - self._begun)


def check_for_failure(remote_values: Any) -> bool:
    """Raise NoTasks: TorchTrainer notices lost ranks itself."""
    raise NoTasks(
        "check_for_failure: hpc_det has no remote values; TorchTrainer notices lost ranks and repeats the call"
    )
