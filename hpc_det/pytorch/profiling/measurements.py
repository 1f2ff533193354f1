"""Which batches are measured, and what of the loop counts as what."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hpc_det.distributed.collectives import Distributed
from hpc_det.node.files import make_folder
from hpc_det.pytorch.loop.progress import Progress
from hpc_det.pytorch.profiling.communication import Exchange
from hpc_det.pytorch.profiling.lines import Lines
from hpc_det.pytorch.profiling.system import SystemMetrics
from hpc_det.pytorch.profiling.timer import Timer, synchronized
from hpc_det.pytorch.profiling.timings import Timings
from hpc_det.pytorch.strategies.ddp import DataParallel
from hpc_det.pytorch.trial.context import PyTorchTrialContext
from hpc_det.store.folders import TrialFolder

if TYPE_CHECKING:
    from hpc_det.pytorch.loop.training_report import TrainingReport
    from hpc_det.pytorch.loop.validation import Validation
    from hpc_det.pytorch.strategies.strategy import Strategy
    from hpc_det.pytorch.trial.trial_context import TrialContext
    from hpc_det.pytorch.trial.trial_data import TrialData


class Measurements:
    """Of one rank; its node's, too, where it is the first there."""

    def __init__(
        self, profiling: Mapping[str, Any], trial: TrialFolder, attempt: int, distributed: Distributed
    ) -> None:
        """`profiling`: the section of the config."""
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
        """Of the batches that are measured now."""
        self._system: SystemMetrics | None = None
        self.time, self.timed = self._timer.time, self._timer.timed

    def measure(
        self, strategy: Strategy, context: TrialContext, data: TrialData, report: TrainingReport, validation: Validation
    ) -> None:
        """These objects have timed functions from now on. Before anybody asks for batches."""
        timer, load = self._timer, data.training.batches
        _replace(data.training, "batches", lambda position: timer.timed_batches("dataloader_next", load(position)))
        context.move = timer.timed("to_device", context.move)
        timer.time(report.window, "sums", "from_device")
        _replace(validation, "run", timer.timed_as_a_whole("validation", validation.run))
        self._report, self._shares = report, strategy.mpu.data_parallel_world_size
        if isinstance(context, PyTorchTrialContext):
            if context.scheduled_steps:
                timer.time(strategy, "end_batch", "step_lr_schedulers")
            self._measure_exchange(strategy, context)

    def _measure_exchange(self, strategy: Strategy, context: PyTorchTrialContext) -> None:
        models = [model for model in context.wrapped_models if isinstance(model, DataParallel)]
        if not models:
            return
        exchange, end_batch = Exchange(models, context.aggregation_frequency), strategy.end_batch

        def end(number: int) -> None:
            exchange.end_batch(number)
            end_batch(number)

        self._exchange = exchange
        _replace(strategy, "end_batch", end)

    def at(self, progress: Progress) -> float:
        """Training goes on at this batch, and at the number that is returned something begins or ends."""
        if self._timings:
            self._timings.at(progress, self._report.records)
        if self._first <= progress.steps < self._end:
            if not self._timings:
                self._begin(progress)
            return self._end
        self.end(progress)
        return self._first if progress.steps < self._first else math.inf

    def _begin(self, progress: Progress) -> None:
        folder, rank, local_size = self._trial.profile, self._distributed.rank, self._distributed.local_size
        make_folder(folder)
        timings = Lines(self._trial.timings(rank))
        self._timings = Timings(self._timer, self._exchange, timings, self._facts, self._shares)
        if self._distributed.local_rank == 0:
            self._system = SystemMetrics(Lines(self._trial.system_metrics(rank // local_size)), self._facts)
        self._timings.begin(progress, self._report.records)

    def end(self, progress: Progress) -> None:
        """All is written; nothing where nothing has begun."""
        if self._timings:
            self._timings.end(progress, self._report.records)
        if self._system:
            self._system.close()
        self._timings = self._system = None


def _replace(thing: object, method: str, function: Callable[..., Any]) -> None:
    setattr(thing, method, function)
