"""DeepSpeed's process group, joined without compiling anything."""

from __future__ import annotations

import os

import deepspeed
import deepspeed.ops
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from hpc_det.core.distributed import Distributed


def prepare(distributed: Distributed) -> None:
    """Whatever DeepSpeed needs before the first engine; a second call changes nothing."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if distributed.size == 1:
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        os.environ.update({name: value for name, value in alone.items() if name not in os.environ})
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed(auto_mpi_discovery=False)
