"""What has to be so in a rank before it makes its first DeepSpeed engine."""

from __future__ import annotations

import os
import warnings

import deepspeed
import deepspeed.ops
import torch.distributed as dist
from deepspeed.accelerator import real_accelerator
from deepspeed.utils import groups
from torch._C._distributed_c10d import HashStore

from hpc_det.distributed.collectives import Distributed
from hpc_det.node.network import limit_look_ups

_DEPRECATED = "all_gather_into_tensor|reduce_scatter_tensor"


def prepare(distributed: Distributed) -> None:
    """Accelerator, process group and no compiler: for any number of engines, and again after an end of the group.

    After `distributed.start()`. One rank that nobody has launched gets a process group of its own: DeepSpeed needs
    one. Whoever ends the others ends it, too (Distributed.stop).
    """
    _choose_accelerator(distributed.device.type)
    # DeepSpeed's own calls, on every rank: nothing that a user could change
    warnings.filterwarnings("ignore", rf"`torch\.distributed\.({_DEPRECATED})` is deprecated", FutureWarning)
    # For reductions in inference only; built at the first init_distributed, for a minute, and a crash without ninja.
    # Who reads the table first has DeepSpeed try the linker for each of its ops, which complains on every rank.
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    _describe(distributed)
    if not dist.is_initialized():
        _start_alone(distributed)
    _forget_ended_groups()
    deepspeed.init_distributed(auto_mpi_discovery=False)


def _choose_accelerator(kind: str) -> None:
    """DeepSpeed's, once chosen, stays; it may have been on a process' way here that has forked since."""
    if real_accelerator.get_accelerator().device_name() != kind:
        os.environ["DS_ACCELERATOR"] = kind
        real_accelerator.ds_accelerator = None
        real_accelerator.get_accelerator()


def _describe(distributed: Distributed) -> None:
    """For engines: the rank of a process is nowhere else on one that no launcher has started."""
    ours = {
        "RANK": distributed.rank,
        "WORLD_SIZE": distributed.size,
        "LOCAL_RANK": distributed.local_rank,
        "LOCAL_WORLD_SIZE": distributed.local_size,
    }
    for name, number in ours.items():
        os.environ.setdefault(name, str(number))


def _start_alone(distributed: Distributed) -> None:
    limit_look_ups(os.environ)
    backend = "cpu:gloo,cuda:nccl" if distributed.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


def _forget_ended_groups() -> None:
    """DeepSpeed makes its groups once a process; they end with the one that they are part of."""
    if groups._WORLD_GROUP not in (None, *dist.distributed_c10d._world.pg_map):
        groups._release_process_group_references()
