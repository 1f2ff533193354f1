"""The writer of trials from before `context.get_tensorboard_writer()`."""

from __future__ import annotations

import os

from torch.utils.tensorboard import SummaryWriter

from hpc_det.store.attempt import Attempt


class TorchWriter:
    def __init__(self) -> None:
        """`writer` writes into the trial's TensorBoard folder. Raises HpcDetError outside of an experiment."""
        self.writer = SummaryWriter(str(Attempt.from_env(os.environ).trial.tensorboard))

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self.writer.flush()

    def reset(self) -> None:
        """What follows goes to a new file."""
        self.writer.close()
