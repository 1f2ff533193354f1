"""The words that users, operators and the driver share."""

from __future__ import annotations

BATCH_SIZE = "*batch_size"
"""Key of the config: the batch size of all ranks together. In an operator's `setup` it is the rank's share."""

NUM_SAMPLES = "num_samples"
"""Of a batch: how many samples it had, its weight in the means. Of a result: the samples of all batches."""

BATCH_COUNT = "batch_count"

NUM_STEPS = "__num_steps__"
USE_FP16 = "__use_fp16__"
EPOCH_IDX = "epoch_idx"
"""Keys of `info` beside the caller's own."""
