"""One process of the gang.

fork_server        the process that ranks are forked from
worker             does what the driver asks: a runner trains, over passes, and state is what is saved of it
passes             over the user's loaders; shards: those that are shared out
store              how ranks meet
train_loop         what functions of `fit` may call

RankPlace and RankSettings are what a rank is told at its start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class RankPlace:
    """Where a rank stands in its gang."""

    rank: int
    local_rank: int
    size: int
    """Ranks of the gang as it is formed now, on all nodes."""

    @property
    def is_distributed(self) -> bool:
        return self.size > 1


@dataclass(frozen=True, kw_only=True)
class RankSettings:
    """TorchTrainer's arguments, as far as ranks care. It reaches them by value."""

    operator_cls: type
    config: dict[str, Any]
    """The user's, with BATCH_SIZE divided for the size of the gang."""
    num_workers: int = 1
    """The most ranks: with several, loaders are sharded also while the gang has shrunk to one."""
    use_gpu: bool = False
    backend: Literal["gloo", "nccl"] = "gloo"
    """For tensors on GPUs; those on the CPU go by gloo."""
    use_fp16: bool | Literal["apex"] = False
    use_tqdm: bool = False
    wrap_ddp: bool = True
    add_dist_sampler: bool = True
    scheduler_step_freq: str | None = None
    timeout_s: float = 1800.0
    """Of collectives: a backstop. That a rank is gone is seen long before."""
