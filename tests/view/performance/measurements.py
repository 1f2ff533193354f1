"""Measurements of an experiment on four slots, and their results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hpc_det.view.performance.short_trainings import Aim, Measurement, Throughput

BASELINE = Measurement(aim=Aim.BASELINE, slots=4, batch_size=64, aggregation_frequency=1)
FIRST_BATCH = replace(BASELINE, aim=Aim.INPUT, trains_on="first batch")
RARE = replace(BASELINE, aim=Aim.COMMUNICATION, aggregation_frequency=1000)
OUT_OF_MEMORY = "ERROR: rank 0 on node1: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


def on(slots: int) -> Measurement:
    return replace(BASELINE, aim=Aim.SLOTS, slots=slots, batch_size=16 * slots)


def batches_of(size: int) -> Measurement:
    return replace(BASELINE, aim=Aim.BATCH_SIZE, batch_size=size)


def measured(measurement: Measurement, samples_per_s: float, **more: Any) -> Throughput:
    return Throughput(measurement=measurement, samples_per_s=samples_per_s, **more)


def failed(measurement: Measurement, failure: str) -> Throughput:
    return Throughput(measurement=measurement, samples_per_s=None, failure=failure)
