"""`ray.tune.trainable`."""

from __future__ import annotations

from hpc_det.sgd.tune import Trainable

__all__ = ["Trainable"]
