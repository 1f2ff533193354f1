"""RaySGD's TorchTrainer and TrainingOperator on the nodes that Slurm, PBS or this machine give.

What users write    operator: models, data, steps; base_operator, creators, registered, precision, progress, meters,
                    timers, options, constants and errors are its parts. porting: what RaySGD's operators import
In the driver       trainer and fitting ask, arguments checks, opening opens: capacity gives nodes, nodes hears
                    them, gang forms ranks over them (ranks: it watches them), elastic goes on with another gang where
                    one is lost; failures and leaving say why. in_process: a rank that lives here. run_folder, results,
                    saved, reports: what comes of it
On a node           hpc_det.launch.elastic.node: the agent; nursery: the process that ranks are forked from
In a rank           rank is its process, worker does what the driver asks, runner trains, over data; store, broadcast:
                    how ranks meet; state: what is saved of an operator; train_loop: what functions of `fit` may call
On both sides       place: who a rank is, and what it was told; shown: what it prints; json_values, gpus
Searches            tune, over trainable
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_det.sgd.constants import BATCH_COUNT, BATCH_SIZE, NUM_SAMPLES
    from hpc_det.sgd.fitting import fit
    from hpc_det.sgd.meters import AverageMeter, AverageMeterCollection
    from hpc_det.sgd.operator import TrainingOperator
    from hpc_det.sgd.reports import Result
    from hpc_det.sgd.train_loop import (
        Checkpoint,
        get_checkpoint,
        get_context,
        prepare_data_loader,
        prepare_model,
        report,
    )
    from hpc_det.sgd.trainer import TorchTrainer
    from hpc_det.sgd.tune import tune_run

_HOMES = {
    "BATCH_COUNT": "constants",
    "BATCH_SIZE": "constants",
    "NUM_SAMPLES": "constants",
    "AverageMeter": "meters",
    "AverageMeterCollection": "meters",
    "Checkpoint": "train_loop",
    "Result": "reports",
    "TorchTrainer": "trainer",
    "TrainingOperator": "operator",
    "fit": "fitting",
    "get_checkpoint": "train_loop",
    "get_context": "train_loop",
    "prepare_data_loader": "train_loop",
    "prepare_model": "train_loop",
    "report": "train_loop",
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
