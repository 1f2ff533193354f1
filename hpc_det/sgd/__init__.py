"""RaySGD's TorchTrainer and TrainingOperator on the nodes that Slurm, PBS or this machine give.

operator   what users write: models, data, steps
driver     what their program talks to: it asks ranks, and goes on with others where some are lost
rank       what one process of the gang does
capacity   where the nodes come from: this machine, the allocation, gang jobs, pools
tune       searches over trainers

On a node runs the agent of hpc_det.sgd.elastic.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_det.sgd.driver.fitting import Result, fit
    from hpc_det.sgd.driver.trainer import TorchTrainer
    from hpc_det.sgd.operator.meters import AverageMeter, AverageMeterCollection
    from hpc_det.sgd.operator.options import BATCH_COUNT, BATCH_SIZE, NUM_SAMPLES
    from hpc_det.sgd.operator.training_operator import TrainingOperator
    from hpc_det.sgd.rank.train_loop import (
        Checkpoint,
        get_checkpoint,
        get_context,
        prepare_data_loader,
        prepare_model,
        report,
    )
    from hpc_det.sgd.tune import tune_run

_HOMES = {
    "BATCH_COUNT": "operator.options",
    "BATCH_SIZE": "operator.options",
    "NUM_SAMPLES": "operator.options",
    "AverageMeter": "operator.meters",
    "AverageMeterCollection": "operator.meters",
    "Checkpoint": "rank.train_loop",
    "Result": "driver.fitting",
    "TorchTrainer": "driver.trainer",
    "TrainingOperator": "operator.training_operator",
    "fit": "driver.fitting",
    "get_checkpoint": "rank.train_loop",
    "get_context": "rank.train_loop",
    "prepare_data_loader": "rank.train_loop",
    "prepare_model": "rank.train_loop",
    "report": "rank.train_loop",
    "tune_run": "tune",
}

__all__ = [
    "BATCH_COUNT",
    "BATCH_SIZE",
    "NUM_SAMPLES",
    "AverageMeter",
    "AverageMeterCollection",
    "Checkpoint",
    "Result",
    "TorchTrainer",
    "TrainingOperator",
    "fit",
    "get_checkpoint",
    "get_context",
    "prepare_data_loader",
    "prepare_model",
    "report",
    "tune_run",
]


def __getattr__(name: str) -> Any:
    """On first use: node agents, and trials of a search, wait for no library that they do not need."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
