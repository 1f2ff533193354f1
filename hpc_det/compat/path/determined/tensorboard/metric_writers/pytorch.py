"""The TensorBoard writer of older trials, which do not call `context.get_tensorboard_writer()`."""

from __future__ import annotations

import os

from torch.utils.tensorboard import SummaryWriter

from hpc_det.store.attempt import Attempt


class TorchWriter:
    """A SummaryWriter, as its attribute `writer`, on the trial's TensorBoard folder."""

    def __init__(self) -> None:
        """Raises HpcDetError outside of an experiment."""
        self.writer = SummaryWriter(str(Attempt.from_env(os.environ).trial.tensorboard))

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self.writer.flush()

    def reset(self) -> None:
        """Close the current file; the next value opens a new one."""

        self.writer.close()
