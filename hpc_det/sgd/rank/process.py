"""A rank's process, as the nursery forks it: what it prints, which signals it hears, how it ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hpc_det.distributed.rank_process import leave, log_to
from hpc_det.node.network import variables
from hpc_det.node.process import STOP_SIGNALS
from hpc_det.sgd.rank.worker import Worker
from hpc_det.sgd.shown import show_too


def run(order: dict[str, Any]) -> int:
    """Its exit code."""
    log_to(Path(order["log"]))
    _ignore_stops()
    os.environ.update(_variables(order))
    worker = Worker(order, on_end=lambda: leave(1))
    if order["rank"] == 0:
        show_too(worker.line.send)
    worker.serve()
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def _ignore_stops() -> None:
    """They are the agent's business; a DataLoader's worker has the defaults again."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, frame: None)
    os.register_at_fork(after_in_child=_hear_stops)


def _hear_stops() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def _variables(order: dict[str, Any]) -> dict[str, str]:
    """torchrun's, for libraries that ask who they are; and which interface gloo and NCCL shall take."""
    numbers = {"RANK": order["rank"], "WORLD_SIZE": order["size"], "LOCAL_RANK": order["local_rank"]}
    return {name: str(number) for name, number in numbers.items()} | (
        variables(order["interface"]) if order["interface"] else {}
    )
