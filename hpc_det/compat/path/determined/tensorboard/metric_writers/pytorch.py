"""The TensorBoard writer of older trials, which do not call `context.get_tensorboard_writer()`."""

from __future__ import annotations

import os

from torch.utils.tensorboard import SummaryWriter

from hpc_det.core.tensorboard import TensorBoard
from hpc_det.store.attempt import Attempt


class TorchWriter:
    """A SummaryWriter, as its attribute `writer`, on the trial's TensorBoard folder."""

    def __init__(self) -> None:
        """Outside of an experiment the folder is a temporary one, which a note on stderr names."""
        trial = Attempt.from_env(os.environ).trial if Attempt.is_in(os.environ) else None
        self.writer = SummaryWriter(str(TensorBoard(trial.tensorboard if trial else None).folder))

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self.writer.flush()

    def reset(self) -> None:
        """Close the current file; the next value opens a new one."""

        self.writer.close()
