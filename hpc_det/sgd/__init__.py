"""RaySGD's TorchTrainer and TrainingOperator, running on Slurm, on PBS or on the local machine.

operator   TrainingOperator, the class that users derive from: models, data, training steps
driver     the user's program: TorchTrainer and fit, which send calls to the ranks and replace lost gangs
rank       one process of the gang: it runs the operator
elastic    the node agent: it starts and ends the ranks of one node, and is connected to the driver
capacity   sources of nodes: this machine, the current allocation, gang jobs, pools of one-node jobs
tune       hyperparameter searches over trainers
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
    """Import a public name on first use, so that node agents and search trials do not load torch needlessly."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
