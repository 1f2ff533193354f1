"""A batch inference that takes its time, for tests that stop it: `inference_script.py MARKER`.

It creates the file MARKER in its third round.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from hpc_det.pytorch import TorchBatchProcessor, TorchBatchProcessorContext, torch_batch_process

RECORDS = 400
PAUSE_S = 0.05


class Doubles(TorchBatchProcessor):
    def __init__(self, context: TorchBatchProcessorContext) -> None:
        self.context = context
        self.count = context.wrap_reducer(sum, name="count")

    def process_batch(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        (numbers,) = batch
        self.count.update(len(numbers))  # type: ignore[attr-defined]
        if batch_idx == 2:
            Path(sys.argv[1]).touch()
        if batch_idx < 100:
            time.sleep(PAUSE_S)
        return 2 * numbers


if __name__ == "__main__":
    numbers = TensorDataset(torch.arange(RECORDS))
    workers = {"num_workers": 1}
    torch_batch_process(Doubles, numbers, batch_size=2, checkpoint_interval=3, dataloader_kwargs=workers)
