"""A task of srun's becomes a rank: python3 -m hpc_det.launch.launchers.srun_rank COMMAND...

srun hands on the environment of node 0. What differs on this node comes from what its launcher published, the rank's
numbers from srun's variables (srun(1)).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from hpc_det.launch.launchers.nodes import environment_of
from hpc_det.node.process import unblock_stop_signals
from hpc_det.store.attempt import Attempt


def rank_environment(env: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables, but for the gang's tasks on a node, which the plan has made the same everywhere."""
    return {
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": env["SLURM_NTASKS"],
        "LOCAL_RANK": env["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": env["HPC_DET_RANKS_PER_NODE"],
        "MASTER_ADDR": env["HPC_DET_MASTER_ADDR"],
        "MASTER_PORT": env["HPC_DET_MASTER_PORT"],
    }


def main(command: list[str]) -> None:
    unblock_stop_signals()
    os.environ.update(environment_of(Attempt.from_env(os.environ), int(os.environ["SLURM_NODEID"])))
    os.environ.update(rank_environment(os.environ))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
