"""The ranks of a run, for Lightning's Trainer and Fabric."""

from __future__ import annotations

import os

from lightning.fabric.plugins.environments import ClusterEnvironment, SLURMEnvironment
from lightning.pytorch import Trainer

from hpc_det.core import Core
from hpc_det.errors import UsageError, count


class HpcDetEnvironment(ClusterEnvironment):
    """The ranks of an hpc_det run, for `Trainer(plugins=[...])` and `Fabric(plugins=[...])`.

    In a Slurm job without a launcher of hpc_det, Lightning would count Slurm's tasks, of which hpc_det has one on each
    node.
    """

    def __init__(self, core: Core) -> None:
        self._gang = core.distributed

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """The port of the environment; 0, any free one, for one rank. Several ranks have a process group already."""
        return int(os.environ.get("MASTER_PORT", 0))

    @staticmethod
    def detect() -> bool:
        """Return False: it is passed explicitly, since it needs the Core."""
        return False

    def world_size(self) -> int:
        return self._gang.size

    def global_rank(self) -> int:
        return self._gang.rank

    def local_rank(self) -> int:
        return self._gang.local_rank

    def node_rank(self) -> int:
        return self._gang.rank // self._gang.local_size

    def set_world_size(self, size: int) -> None:
        """Do nothing; see `validate_settings`."""

    def set_global_rank(self, rank: int) -> None:
        """Do nothing; see `validate_settings`."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raise UsageError if `devices` and `num_nodes` are not those of the run."""
        gang = self._gang
        if (num_devices, num_nodes) != (gang.local_size, gang.nodes):
            raise UsageError(
                f"lightning: devices={num_devices} and num_nodes={num_nodes}, but the run has "
                f"{count(gang.local_size, 'rank')} on each of {count(gang.nodes, 'node')}; use "
                "devices=core.distributed.local_size and num_nodes=core.distributed.nodes"
            )


def check_ranks(trainer: Trainer, core: Core) -> None:
    """Raise UsageError for a Trainer that has other ranks than the run, or requeues the job itself."""
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        raise UsageError(
            "lightning: SLURMEnvironment(auto_requeue=True) would requeue the job beside hpc_det; use "
            "Trainer(plugins=[HpcDetEnvironment(core)])"
        )
    if (trainer.world_size, trainer.global_rank) != (core.distributed.size, core.distributed.rank):
        raise UsageError(
            f"lightning: the Trainer has rank {trainer.global_rank} of {trainer.world_size}, but the run has rank "
            f"{core.distributed.rank} of {core.distributed.size}; use Trainer(devices=core.distributed.local_size, "
            f"num_nodes=core.distributed.nodes, plugins=[HpcDetEnvironment(core)])"
        )
