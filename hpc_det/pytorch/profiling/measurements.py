"""Time spent in training: the measured batches, the names of timings, and a line for each stretch, on each rank."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpc_det.core.profile import Timings
from hpc_det.core.progress import Progress
from hpc_det.core.system_metrics import BufferedLines, SystemMetrics
from hpc_det.core.timer import Timer, synchronized
from hpc_det.distributed.collectives import Distributed
from hpc_det.node.files import make_folder
from hpc_det.pytorch.strategies.ddp import DataParallel
from hpc_det.pytorch.trial.pytorch_context import PyTorchTrialContext
from hpc_det.store.folders import TrialFolder

if TYPE_CHECKING:
    from hpc_det.pytorch.loop.training_report import TrainingReport
    from hpc_det.pytorch.loop.validation import Validation
    from hpc_det.pytorch.strategies.strategy import Strategy
    from hpc_det.pytorch.trial.trial import BuiltTrial
    from hpc_det.pytorch.trial.trial_data import TrialData


class Measurements:
    """The measurements of one rank, and of its node on the first rank there."""

    def __init__(
        self, profiling: Mapping[str, Any], trial: TrialFolder, attempt: int, distributed: Distributed
    ) -> None:
        """`profiling`: the section of that name in the configuration."""
        last = profiling.get("end_after_batch")
        self._first: int = profiling.get("begin_on_batch", 0)
        self._end = math.inf if last is None else last + 1
        self._trial = trial
        self._distributed = distributed
        self._facts = {"attempt": attempt, "host": socket.gethostname()}
        device = distributed.device
        self._timer = Timer(synchronized(device)) if profiling.get("sync_timings", True) else Timer()
        self._exchange: Exchange | None = None
        self._timings: Timings | None = None
        """Timings of the current stretch of batches."""
        self._system: SystemMetrics | None = None
        self.time, self.timed = self._timer.time, self._timer.timed

    def measure(self, built: BuiltTrial, data: TrialData, report: TrainingReport, validation: Validation) -> None:
        """Replace methods of these objects by timed ones, before any batch is requested."""
        context, strategy = built.context, built.strategy
        timer, load = self._timer, data.training.batches
        _replace(data.training, "batches", lambda position: timer.timed_batches("dataloader_next", load(position)))
        context.move = timer.timed("to_device", context.move)
        timer.time(report.window, "sums", "from_device")
        _replace(validation, "run", timer.timed_as_a_whole("validation", validation.run))
        self._strategy, self._shares = strategy, strategy.mpu.data_parallel_world_size
        if isinstance(context, PyTorchTrialContext):
            if context.scheduled_steps:
                timer.time(strategy, "end_batch", "step_lr_schedulers")
            self._measure_exchange(strategy, context)

    def _measure_exchange(self, strategy: Strategy, context: PyTorchTrialContext) -> None:
        models = [model for model in context.wrapped_models if isinstance(model, DataParallel)]
        if not models or not all(map(_has_times, models)):  # another torch may have no such times
            return
        self._exchange = Exchange(models, context.aggregation_frequency)
        strategy.batch_ends.insert(0, self._exchange.end_batch)

    def at(self, progress: Progress) -> float:
        """Note that training has reached a batch, and return the number of batches at which measuring starts or ends
        next.
        """
        if self._timings:
            self._timings.at(progress, self._strategy.records)
        if self._first <= progress.steps < self._end:
            if not self._timings:
                self._begin(progress)
            return self._end
        self.end(progress)
        return self._first if progress.steps < self._first else math.inf

    def _begin(self, progress: Progress) -> None:
        folder, rank, local_size = self._trial.profile, self._distributed.rank, self._distributed.local_size
        make_folder(folder)
        timings = BufferedLines(self._trial.timings(rank))
        self._timings = Timings(self._timer, self._exchange, timings, self._facts, self._shares)
        if self._distributed.local_rank == 0:
            self._system = SystemMetrics(BufferedLines(self._trial.system_metrics(rank // local_size)), self._facts)
        self._timings.begin(progress, self._strategy.records)

    def end(self, progress: Progress) -> None:
        """Write everything, if measuring has started."""
        if self._timings:
            self._timings.end(progress, self._strategy.records)
        if self._system:
            self._system.close()
        self._timings = self._system = None


def _replace(thing: object, method: str, function: Callable[..., Any]) -> None:
    setattr(thing, method, function)


EXCHANGES_PER_TIMED_ONE = 10
"""DDP times one exchange in this many. On a GPU it waits for the end of a timed exchange, and reading the times takes
microseconds.
"""


class Exchange:
    """Measures how long a rank waits for gradients after it has computed its own: the exposed part of their exchange.

    DistributedDataParallel measures this for some of its exchanges, as backward_comm_time and
    backward_compute_comm_overlap_time of its logger (torch/csrc/distributed/c10d/logger.cpp, in nanoseconds).
    """

    def __init__(self, models: Sequence[DataParallel], aggregation: int) -> None:
        """`aggregation`: batches for each exchange."""
        self._models = models
        self._aggregation = aggregation
        self._exposed: list[float] = []
        self._time_some()

    def end_batch(self, number: int) -> None:
        """Record the exchange of a batch, before buckets are resized."""
        if not (number + 1) % (self._aggregation * EXCHANGES_PER_TIMED_ONE):
            self._exposed.append(sum(map(exposed_s, self._models)))
            self._time_some()

    def _time_some(self) -> None:
        """Set DDP's sample rate, again after each timed exchange, since DDP resets it when it makes new buckets."""
        for model in self._models:
            model._set_ddp_runtime_logging_sample_rate(EXCHANGES_PER_TIMED_ONE)  # type: ignore[no-untyped-call]

    def take(self, batches: int) -> float | None:
        """Return the exposed seconds of `batches` batches; None if no exchange was timed since the last `take`.

        They are extrapolated from the mean of the timed exchanges.
        """
        taken, self._exposed = self._exposed, []
        return sum(taken) / len(taken) * batches / self._aggregation if taken else None


def _has_times(model: DataParallel) -> bool:
    return hasattr(model, "_set_ddp_runtime_logging_sample_rate") and hasattr(model.logger, "_get_ddp_logging_data")


def exposed_s(model: DataParallel) -> float:
    """Return the seconds of the last timed exchange; 0 before the first."""
    logger: Any = model.logger
    times: dict[str, int] = logger._get_ddp_logging_data().ints_map
    return (times.get("backward_comm_time", 0) - times.get("backward_compute_comm_overlap_time", 0)) / 1e9
