"""PyTorch's own launcher on every node of the gang.

    python3 -m hpc_det.launch.torch_distributed [[TORCH_OVERRIDES...] --] (--trial module:Class | SCRIPT ARGS...)

SCRIPT is a Python file or a command, such as `python3 train.py`. Rendezvous is static: rank numbers follow from the
plan. Overrides come after our defaults, so torchrun takes theirs. A gang of one rank needs no launcher, unless somebody
has overrides for it: the rank starts a second earlier, and a search starts many.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from hpc_det.errors import HpcDetError
from hpc_det.launch.arguments import Launch, parse_or_note
from hpc_det.launch.attempt import Attempt

COMMAND_NOT_FOUND = 127
"""As sh(1) says it."""


def torchrun_command(launch: Launch, attempt: Attempt) -> list[str]:
    """torchrun(1)'s flags, as torch.distributed.run documents them."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nnodes={attempt.nodes}",
        f"--nproc-per-node={attempt.ranks_per_node}",
        f"--node-rank={attempt.node_rank}",
        f"--master-addr={attempt.master_addr}",
        f"--master-port={attempt.master_port}",
        "--max-restarts=0",
        # torchrun must not answer the scheduler's signals, the agent does: see hpc_det.launch.signals.shielded
        "--signals-to-handle=SIGQUIT",
        *([] if _is_for_python(launch.command) else ["--no-python"]),
        *launch.overrides,
        *launch.command,
    ]


def rank_command(launch: Launch) -> list[str]:
    """The only rank itself."""
    return [sys.executable, *launch.command] if _is_for_python(launch.command) else list(launch.command)


def rank_environment(attempt: Attempt) -> dict[str, str]:
    """torchrun's variables for the only rank."""
    return {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": attempt.master_addr,
        "MASTER_PORT": str(attempt.master_port),
    }


def _is_for_python(command: tuple[str, ...]) -> bool:
    """A file or a module; all else is a command, which is what upstream's launcher takes."""
    return command[0] == "-m" or command[0].endswith(".py")


def main(argv: list[str]) -> NoReturn:
    try:
        attempt = Attempt.from_env(os.environ)
        launch = parse_or_note(argv, "torch_distributed", attempt)
    except HpcDetError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    if attempt.nodes * attempt.ranks_per_node == 1 and not launch.overrides:
        command = rank_command(launch)
        os.environ.update(rank_environment(attempt))
    else:
        command = torchrun_command(launch, attempt)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"entrypoint: {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(COMMAND_NOT_FOUND)


if __name__ == "__main__":
    main(sys.argv[1:])
