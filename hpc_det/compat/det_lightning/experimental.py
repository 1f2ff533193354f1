"""`determined.lightning.experimental`: a logger of Lightning that reports with core_v2."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only

from hpc_det.compat import det_core_v2

__all__ = ["DetLogger"]


class DetLogger(Logger):  # type: ignore[misc]  # lightning is not typed
    """Reports the metrics that Lightning logs as training metrics."""

    def __init__(self, **options: Any) -> None:
        """`options`: those of core_v2.init."""
        super().__init__()
        self._options = options
        self._is_open = False

    @property
    @rank_zero_experiment  # type: ignore[untyped-decorator]
    def experiment(self) -> None:
        """Enter the context at the first access."""
        if not self._is_open:
            det_core_v2.init(**self._options)
            self._is_open = True

    @property
    def name(self) -> str:
        return "DetLogger"

    @property
    def version(self) -> str:
        return "0.1"

    @rank_zero_only  # type: ignore[untyped-decorator]
    def log_hyperparams(self, params: object, *arguments: object, **options: object) -> None:
        """Do nothing: they are those of the experiment."""

    @rank_zero_only  # type: ignore[untyped-decorator]
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Report the metrics."""
        self.experiment  # noqa: B018  # enters the context
        assert det_core_v2.train
        det_core_v2.train.report_training_metrics(step or 0, metrics)

    @rank_zero_only  # type: ignore[untyped-decorator]
    def finalize(self, status: str) -> None:
        """Leave the context."""
        det_core_v2.close()
        self._is_open = False
