"""The gang as one rank sees it: numbers and collectives.

The collectives carry JSON in tensors. torch's object collectives would unpickle what comes from the network.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore


@dataclass(frozen=True, kw_only=True)
class Distributed:
    """Works the same with one rank, and then without any process group."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    nodes: int = 1

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Distributed:
        """torchrun's variables; with none of them set, one rank."""
        size, local_size = int(env.get("WORLD_SIZE", 1)), int(env.get("LOCAL_WORLD_SIZE", 1))
        return cls(
            rank=int(env.get("RANK", 0)),
            size=size,
            local_rank=int(env.get("LOCAL_RANK", 0)),
            local_size=local_size,
            nodes=size // local_size,
        )

    def get_rank(self) -> int:
        return self.rank

    def get_local_rank(self) -> int:
        return self.local_rank

    def get_size(self) -> int:
        return self.size

    def get_num_agents(self) -> int:
        """Nodes."""
        return self.nodes

    @property
    def is_chief(self) -> bool:
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.local_rank) if torch.cuda.is_available() else torch.device("cpu")

    def start(self) -> None:
        """Join the process group (env:// rendezvous): gloo for CPU tensors, nccl beside it where there are GPUs."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.size > 1:
            dist.init_process_group("cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo")

    def stop(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()

    def barrier(self) -> None:
        self.sum(torch.zeros(1))

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The element-wise sum over ranks of a CPU tensor."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def gather_json(self, data: Any) -> list[Any]:
        """What every rank gave, in rank order, on every rank."""
        if self.size == 1:
            return [data]
        own = torch.frombuffer(bytearray(json.dumps(data).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(own)]))
        longest = int(max(lengths))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(own)] = own
        received = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(received, padded)
        return [json.loads(bytes(item[: int(length)].tolist())) for item, length in zip(received, lengths, strict=True)]

    def broadcast_json(self, data: Any) -> Any:
        """What rank 0 gave."""
        return self.gather_json(data if self.is_chief else None)[0]

    def side_store(self, env: Mapping[str, str]) -> Store:
        """A key-value store of all ranks on a connection of its own, for a thread that waits in it."""
        if self.size == 1:
            return HashStore()
        return TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False, timeout=timedelta(days=365))
