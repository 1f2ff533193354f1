"""The metrics of the training batches between two reports, reduced over the ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from hpc_det.distributed.metrics import MetricWindow
from hpc_det.pytorch.strategies.strategy import Strategy
from hpc_det.pytorch.trial.callback import Callbacks
from hpc_det.pytorch.trial.reducer import joined
from hpc_det.pytorch.trial.trial_context import TrialContext


class TrainingReport:
    """Collects the metrics of training batches on one rank, and reduces them at each report."""

    def __init__(
        self, context: TrialContext, strategy: Strategy, reporting: Sequence[int], callbacks: Callbacks
    ) -> None:
        """`reporting`: the ranks whose metrics count."""
        self._context = context
        self._strategy = strategy
        self._callbacks = callbacks
        self._keeps_batches = callbacks.overrides("on_training_workload_end")
        self._reporting = reporting if _averages(context) else reporting[:1]
        context.reducers.reset(training=True)
        self.window = MetricWindow(keep_batches=self._keeps_batches)
        self.add: Callable[[Any], None] = self.window.add if strategy.mpu.should_report_metrics else _ignored
        """Adds the result of `train_batch`: metrics by name, or the loss."""
        self._reported, self._began = strategy.records, time.monotonic()

    def close(self) -> tuple[dict[str, Any], dict[str, float], bool]:
        """Return the metrics, facts about the report, and whether any rank asks for a stop; then start the next report.

        Collective. The results are the same on every rank, except the facts.
        """
        gang = self._context.distributed
        # The sums of ranks that are not reported stay on the device: copying them would only make these ranks wait.
        own = self.window.sums() if gang.rank in self._reporting else None
        by_rank = gang.gather_json({"window": own, "stop": self._context.get_stop_requested()})
        stops = [rank["stop"] for rank in by_rank]
        metrics: dict[str, Any] = dict(self.window.reduced([by_rank[rank]["window"] for rank in self._reporting]))
        metrics = joined(metrics, self._context.reducers.reduce(gang, training=True), "train_batch")
        if self._keeps_batches:
            kept = gang.gather_json(self.window.kept_sums())
            batches = self.window.reduced_batches([kept[rank] for rank in self._reporting])
            self._callbacks.call("on_training_workload_end", metrics, batches)
            stops = gang.gather_json(self._context.get_stop_requested())
        self.window.reset()
        self._context.reducers.reset(training=True)
        return metrics, {"samples_per_second": self._samples_per_second()}, any(stops)

    def _samples_per_second(self) -> float:
        """Return the records per second of all ranks, extrapolated from this rank."""
        now = time.monotonic()
        records = (self._strategy.records - self._reported) * self._strategy.mpu.data_parallel_world_size
        rate = records / max(now - self._began, 1e-9)
        self._reported, self._began = self._strategy.records, now
        return rate


def _averages(context: TrialContext) -> bool:
    """Return optimizations.average_training_metrics: whether metrics are averaged over all reporting ranks.

    Otherwise they are those of the first reporting rank.
    """
    return bool(context.get_experiment_config().get("optimizations", {}).get("average_training_metrics", True))


def _ignored(metrics: Any) -> None:
    """Drop the metrics of a rank whose metrics do not count."""
