"""A process of DeepSpeed's becomes a rank.

    python3 -m hpc_det.launch.launchers.deepspeed_rank [--local_rank=K] COMMAND...

DeepSpeed gives each rank torchrun's variables but one, and its script an argument, which a script of the user's gets.
"""

from __future__ import annotations

import os
import sys

from hpc_det.launch.launchers.watched import as_rank
from hpc_det.node.process import unblock_stop_signals


def with_local_rank(words: list[str]) -> list[str]:
    """The argument where DeepSpeed would put it: right after the script."""
    if not words[0].startswith("--local_rank="):
        return words
    local_rank, *command = words
    script = 2 if command[0] == "-m" else 1
    return [*command[:script], local_rank, *command[script:]]


def main(words: list[str]) -> None:
    unblock_stop_signals()
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["HPC_DET_RANKS_PER_NODE"]
    if os.environ["HPC_DET_SLOT_TYPE"] == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # DeepSpeed numbers the slots there, and a node may have GPUs
    command = as_rank(with_local_rank(words))
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
