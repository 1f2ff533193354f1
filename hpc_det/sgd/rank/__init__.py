"""A rank: one process of the gang.

worker      the connection to the driver: receives calls, runs them, returns results
runner      the operator with its data: trains, validates, takes and restores snapshots
passes      passes over the user's loaders that continue from call to call
shards      a DataLoader that is sharded over the ranks
state       the state of an operator: saving, loading, broadcasting
store       the torch store through which ranks exchange addresses
train_loop  functions that a training loop of `fit` may call

RankPlace and RankSettings are the arguments that a rank receives at its start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class RankPlace:
    """The position of a rank in its gang."""

    rank: int
    """Number of the rank in the gang, from 0."""
    local_rank: int
    """Number of the rank on its node, from 0."""
    size: int
    """Number of ranks in the gang as it is formed now, on all nodes."""

    @property
    def is_distributed(self) -> bool:
        """True if the gang has several ranks, and so a process group."""
        return self.size > 1


@dataclass(frozen=True, kw_only=True)
class RankSettings:
    """The arguments of TorchTrainer that ranks need, sent with cloudpickle; TorchTrainer describes them."""

    operator_cls: type
    """The user's subclass of TrainingOperator."""
    config: dict[str, Any]
    """The user's config, with BATCH_SIZE divided by the size of the gang."""
    num_workers: int = 1
    """The largest number of ranks. If it is above 1, loaders are sharded even while the gang has only one rank."""
    use_gpu: bool = False
    backend: Literal["gloo", "nccl"] = "gloo"
    """Backend for tensors on GPUs; tensors on the CPU always use gloo."""
    use_fp16: bool | Literal["apex"] = False
    use_tqdm: bool = False
    wrap_ddp: bool = True
    add_dist_sampler: bool = True
    scheduler_step_freq: str | None = None
    timeout_s: float = 1800.0
    """Seconds after which a collective fails. Only a last resort: the driver notices a lost rank much earlier."""
