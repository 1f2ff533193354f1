"""What users, operators and the driver share: keys of configs and results, errors, and the options of operators.

Each error is also of the built-in kind which RaySGD raised for that mistake.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

from hpc_det.errors import UsageError, nearest, shown

BATCH_SIZE = "*batch_size"
"""Key of the config: the batch size of all ranks together. In an operator's `setup` it is the rank's share."""

NUM_SAMPLES = "num_samples"
"""Of a batch: how many samples it had, its weight in the means. Of a result: the samples of all batches."""

BATCH_COUNT = "batch_count"

NUM_STEPS = "__num_steps__"

USE_FP16 = "__use_fp16__"

EPOCH_IDX = "epoch_idx"
"""Keys of `info` beside the caller's own."""

SCHEDULER_STEP_FREQS = ("batch", "epoch", "manual")


class BadArgument(UsageError, ValueError):
    """A value that an argument cannot have."""


class BadModel(UsageError, AssertionError):
    """What was registered as a model is none."""


class NotSet(UsageError, RuntimeError):
    """A default loop needs something that `setup` has not put there."""


class MissingLoader(NotSet, ValueError):
    """Training or validation without the loader for it."""


class MissingApex(UsageError, ImportError):
    """use_fp16="apex" without apex."""


def check_options(*, use_fp16: Any, use_tqdm: Any, scheduler_step_freq: Any) -> None:
    """Raises BadArgument, a ValueError, with all that cannot be."""
    if problems := [*problems_of(use_fp16, use_tqdm, scheduler_step_freq)]:
        raise BadArgument(problems)


def problems_of(use_fp16: Any, use_tqdm: Any, scheduler_step_freq: Any) -> Iterator[str]:
    if not isinstance(use_fp16, bool) and use_fp16 != "apex":
        yield f"use_fp16: {shown(use_fp16)}; use True, False or 'apex'"
    if use_tqdm and importlib.util.find_spec("tqdm") is None:
        yield f"use_tqdm: tqdm is not installed; run {sys.executable} -m pip install 'hpc_det[tqdm]'"
    if scheduler_step_freq not in (None, *SCHEDULER_STEP_FREQS):
        meant = nearest(str(scheduler_step_freq), SCHEDULER_STEP_FREQS)
        known = ", ".join(map(repr, SCHEDULER_STEP_FREQS))
        yield f"scheduler_step_freq: {shown(scheduler_step_freq)}; use {known} or None. {meant}".rstrip(" .")
