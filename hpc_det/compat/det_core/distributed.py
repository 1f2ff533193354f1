"""det.core.DistributedContext: a rank's numbers, and collectives on objects.

Upstream: determined/core/_distributed.py. The connections are those of the block of `core.init`, or are opened at the
first collective before it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from hpc_det.distributed.collectives import Distributed
from hpc_det.store.attempt import Attempt

_PORT = 12360
"""Port of rank 0 outside a job, if MASTER_PORT is not set; Determined's default."""


class DistributedContext:
    """A rank's numbers, and communication between ranks. Every rank must call the collective methods."""

    def __init__(
        self,
        *,
        rank: int | None,
        size: int | None,
        local_rank: int | None,
        local_size: int | None,
        cross_rank: int | None,
        cross_size: int | None,
        chief_ip: str | None = None,
        pub_port: int = _PORT,
        pull_port: int = 12376,
        port_offset: int = 0,
        force_tcp: bool = False,
    ) -> None:
        """`chief_ip`: address of rank 0, outside a job. Ports other than `pub_port` are ignored: one suffices here.

        Raises ValueError if only some of the six numbers are given, AssertionError for several nodes without the
        address of rank 0.
        """
        given = (rank, size, local_rank, local_size, cross_rank, cross_size)
        if any(number is None for number in given) and any(number is not None for number in given):
            raise ValueError(
                "rank, size, local_rank, local_size, cross_rank and cross_size must all be given if any is given"
            )
        self.rank, self.size = rank or 0, 1 if size is None else size
        self.local_rank, self.local_size = local_rank or 0, 1 if local_size is None else local_size
        self.cross_rank, self.cross_size = cross_rank or 0, 1 if cross_size is None else cross_size
        if self.size != self.local_size and chief_ip is None and not Attempt.is_in(os.environ):
            raise AssertionError(f"{self.cross_size} nodes: chief_ip, the address of rank 0, is required")
        self._chief_ip, self._port = chief_ip, pub_port + port_offset
        self._bound: Distributed | None = None

    @classmethod
    def from_torch_distributed(cls, chief_ip: str | None = None) -> DistributedContext:
        """Return the context of torchrun's environment variables. Raises KeyError if one is not set."""
        return cls._from_env("LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", chief_ip)

    @classmethod
    def from_deepspeed(cls, chief_ip: str | None = None) -> DistributedContext:
        """Return the context of DeepSpeed's environment variables. Raises KeyError if one is not set."""
        return cls._from_env("LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", chief_ip)

    @classmethod
    def from_horovod(cls, hvd: Any, chief_ip: str | None = None) -> DistributedContext:
        """Return the context of the module `hvd`, after hvd.init()."""
        names = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
        return cls(
            **{name: getattr(hvd, name)() for name in names}, chief_ip=chief_ip or os.environ.get("DET_CHIEF_IP")
        )

    @classmethod
    def _from_env(cls, local_size: str, cross_rank: str, cross_size: str, chief_ip: str | None) -> DistributedContext:
        names = {
            "rank": "RANK",
            "size": "WORLD_SIZE",
            "local_rank": "LOCAL_RANK",
            "local_size": local_size,
            "cross_rank": cross_rank,
            "cross_size": cross_size,
        }
        numbers: dict[str, Any] = {name: int(os.environ[variable]) for name, variable in names.items()}
        return cls(**numbers, chief_ip=chief_ip or os.environ.get("DET_CHIEF_IP"))

    def get_rank(self) -> int:
        return self.rank

    def get_local_rank(self) -> int:
        return self.local_rank

    def get_size(self) -> int:
        return self.size

    def get_num_agents(self) -> int:
        """Return the number of nodes."""
        return self.cross_size

    def gather(self, stuff: Any) -> list[Any] | None:
        """Return the `stuff` of every rank, in rank order, on rank 0; None on the others."""
        return self._ranks.gather(stuff)

    def allgather(self, stuff: Any) -> list[Any]:
        """Return the `stuff` of every rank, in rank order."""
        return self._ranks.allgather(stuff)

    def broadcast(self, stuff: Any) -> Any:
        """Return the `stuff` of rank 0."""
        return self._ranks.broadcast(stuff)

    def gather_local(self, stuff: Any) -> list[Any] | None:
        """Return the `stuff` of every rank of this node on its first rank; None on the others."""
        return self._ranks.gather_local(stuff)

    def allgather_local(self, stuff: Any) -> list[Any]:
        """Return the `stuff` of every rank of this node, in rank order."""
        return self._ranks.allgather_local(stuff)

    def broadcast_local(self, stuff: Any) -> Any:
        """Return the `stuff` of the first rank of this node."""
        return self._ranks.broadcast_local(stuff)

    def close(self) -> None:
        """Do nothing: leaving the block of `core.init` closes the connections."""

    # --- used by Context

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return torchrun's variables for this rank; addresses that `env` contains are kept."""
        numbers = {
            "RANK": self.rank,
            "WORLD_SIZE": self.size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_size,
        }
        address, port = self._chief_ip or "127.0.0.1", self._port
        if Attempt.is_in(env):
            attempt = Attempt.from_env(env)
            address, port = attempt.master_addr, attempt.master_port
        addresses = {"MASTER_ADDR": env.get("MASTER_ADDR", address), "MASTER_PORT": env.get("MASTER_PORT", str(port))}
        return {**{name: str(number) for name, number in numbers.items()}, **addresses}

    def bind(self, distributed: Distributed | None) -> None:
        """Use these connections from now on."""
        self._bound = distributed

    @property
    def _ranks(self) -> Distributed:
        if self.size == 1:
            return Distributed()
        if self._bound is None:  # before the block of core.init, which then uses the same process group
            os.environ.update(self.environment(os.environ))
            self._bound = Distributed.from_env(os.environ)
            self._bound.start()
        return self._bound


class DummyDistributedContext(DistributedContext):
    """The context of a single rank."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=1, local_rank=0, local_size=1, cross_rank=0, cross_size=1)
