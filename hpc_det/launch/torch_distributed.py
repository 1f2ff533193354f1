"""torchrun, PyTorch's own launcher, on every node of the gang.

    python3 -m hpc_det.launch.torch_distributed [[TORCH_OVERRIDES...] --] (--trial module:Class | SCRIPT ARGS...)

SCRIPT is a Python file or a command, such as `python3 train.py`. The rendezvous is static: the plan numbers the ranks.
Overrides come after the flags set here and so take precedence. A gang of one rank without overrides runs without
torchrun (hpc_det.launch.direct): its rank starts a second earlier, and a search starts many such gangs.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from hpc_det.launch.direct import run
from hpc_det.launch.launchers.arguments import Launch, for_python, is_for_python, start, with_bundle
from hpc_det.node.network import allow_many_files
from hpc_det.store.attempt import Attempt


def torchrun_command(launch: Launch, attempt: Attempt) -> list[str]:
    """Return the command line of torchrun, with flags as torch.distributed.run documents them."""
    return [
        *for_python(["-m", "torch.distributed.run"]),
        f"--nnodes={attempt.nodes}",
        f"--nproc-per-node={attempt.ranks_per_node}",
        f"--node-rank={attempt.node_rank}",
        f"--master-addr={attempt.master_addr}",
        f"--master-port={attempt.master_port}",
        "--max-restarts=0",  # the job process restarts a gang, as a new attempt
        # The agent, not torchrun, handles the scheduler's signals: see hpc_det.node.process.ignore_stop_signals.
        "--signals-to-handle=SIGQUIT",
        *([] if is_for_python(launch.command) else ["--no-python"]),
        *launch.overrides,
        *with_bundle(launch.command),
    ]


def _become_torchrun(launch: Launch, attempt: Attempt) -> NoReturn:
    allow_many_files()  # torchrun's store has one connection for each rank
    command = torchrun_command(launch, attempt)
    os.execv(command[0], command)


def _begin(launch: Launch, attempt: Attempt) -> int:
    os.environ.update(attempt.store_of_ranks())
    if attempt.world_size == 1 and not launch.overrides:
        return run(launch, attempt)
    _become_torchrun(launch, attempt)


def main(argv: list[str]) -> int:
    return start("torch_distributed", argv, _begin, about=__doc__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
