"""The Trainer form for DeepSpeed: a script of the user's own, under any launcher or none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hpc_det.distributed.collectives import Distributed
from hpc_det.pytorch.deepspeed.context import DeepSpeedTrialContext
from hpc_det.pytorch.deepspeed.failures import explained
from hpc_det.pytorch.loop.run import Run
from hpc_det.pytorch.loop.trainer import Trainer, context_of_script

__all__ = ["Trainer", "TrainerContext", "init"]


class TrainerContext(DeepSpeedTrialContext):
    """A context that knows where it runs, for the Trainer."""

    def __init__(self, run: Run) -> None:
        super().__init__(run.spec, run.distributed, run.folder)
        self.run = run


@contextmanager
def init(
    *,
    hparams: dict[str, Any] | None = None,
    exp_conf: dict[str, Any] | None = None,
    distributed: Distributed | None = None,
    enable_tensorboard_logging: bool = True,
) -> Iterator[TrainerContext]:
    """As `hpc_det.pytorch.init`, for a DeepSpeedTrial. Enter it before deepspeed.initialize."""
    where = (hparams, exp_conf, distributed, enable_tensorboard_logging)
    with context_of_script(TrainerContext, *where) as context, explained():
        yield context
