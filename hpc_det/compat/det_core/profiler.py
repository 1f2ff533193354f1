"""det.core.ProfilerContext and the experimental part of the context, which have no effect here."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("determined.core")


class ProfilerContext:
    """System metrics, which an experiment measures with `profiling: {enabled: true}` instead."""

    def on(self, sampling_interval: float = 1, samples_per_report: int = 10) -> None:
        """Log that this has no effect. Raises ValueError for values that Determined refuses."""
        if sampling_interval < 0.1:
            raise ValueError(f"sampling_interval: expected 0.1 s or more, got {sampling_interval}")
        if type(samples_per_report) is not int or samples_per_report < 1:
            raise ValueError(f"samples_per_report: expected a whole number from 1, got {samples_per_report}")
        logger.warning("profiler.on has no effect; set `profiling: {enabled: true}` in the experiment file")

    def off(self) -> None:
        """Do nothing."""


class ExperimentalCoreContext:
    """Links between a task and the models that it uses, which hpc_det does not record."""

    def report_task_using_checkpoint(self, checkpoint: Any) -> None:
        """Do nothing."""

    def report_task_using_model_version(self, model_version: Any) -> None:
        """Do nothing."""
