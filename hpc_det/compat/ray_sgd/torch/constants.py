"""`ray.util.sgd.torch.constants`: keys of `info` and values of `scheduler_step_freq`."""

from __future__ import annotations

import os

from hpc_det.sgd.operator.options import NUM_STEPS, SCHEDULER_STEP_FREQS, USE_FP16

__all__ = [
    "NCCL_TIMEOUT_S",
    "NUM_STEPS",
    "SCHEDULER_STEP_BATCH",
    "SCHEDULER_STEP_EPOCH",
    "SCHEDULER_STEP_MANUAL",
    "USE_FP16",
    "VALID_SCHEDULER_STEP",
]

NCCL_TIMEOUT_S = int(os.environ.get("NCCL_TIMEOUT_S", "1800"))
"""Seconds after which a collective of ranks with GPUs fails."""
SCHEDULER_STEP_BATCH, SCHEDULER_STEP_EPOCH, SCHEDULER_STEP_MANUAL = SCHEDULER_STEP_FREQS
VALID_SCHEDULER_STEP = set(SCHEDULER_STEP_FREQS)
