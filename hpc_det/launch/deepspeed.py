"""DeepSpeed's own launcher on every node of the gang, without ssh.

    python3 -m hpc_det.launch.deepspeed [[DEEPSPEED_OVERRIDES...] --] (--trial module:Class | SCRIPT ARGS...)

`deepspeed` would start its per-node launcher through pdsh. Here each node's agent starts it. The plan numbers the
ranks. Scripts get `--local_rank=K`, as from DeepSpeed, unless the overrides contain `--no_local_rank`.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from typing import NoReturn

from hpc_det.errors import UsageError, pip_install
from hpc_det.launch.launchers.arguments import Launch, is_for_python, is_trial, start
from hpc_det.node.process import block_stop_signals
from hpc_det.store.attempt import Attempt

_OF_THE_RUNNER = ("-H", "--hostfile", "-i", "--include", "-e", "--exclude", "--num_nodes", "--num_gpus", "--launcher")
"""Flags of `deepspeed` that set where ranks run; here the plan determines that."""


def launch_command(launch: Launch, attempt: Attempt, env: Mapping[str, str]) -> list[str]:
    """Return the command line of deepspeed.launcher.launch, with the flags that its --help names.

    Raises UsageError if the overrides contain flags of the runner `deepspeed`.
    """
    if wrong := [word for word in launch.overrides if word.partition("=")[0] in _OF_THE_RUNNER]:
        raise UsageError(
            f"hpc_det.launch.deepspeed: {', '.join(wrong)}: the job determines nodes and ranks; remove the flags and "
            f"set resources.slots_per_trial"
        )
    return [
        *(sys.executable, "-m", "deepspeed.launcher.launch"),
        f"--world_info={_world_info(attempt, env)}",
        f"--node_rank={attempt.node_rank}",
        f"--master_addr={attempt.master_addr}",
        f"--master_port={attempt.master_port}",
        *([] if _takes_local_rank(launch) else ["--no_local_rank"]),
        "--log_level=warning",  # at info, every node logs all nodes and all ranks
        *launch.overrides,
        *("--module", "hpc_det.launch.launchers.rank", "deepspeed", *launch.command),
    ]


def _takes_local_rank(launch: Launch) -> bool:
    return is_for_python(launch.command) and not is_trial(launch.command)


def _world_info(attempt: Attempt, env: Mapping[str, str]) -> str:
    """Return the devices of each node as base64-encoded JSON, the value of --world_info."""
    given = [device for device in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
    # launch.py sets CUDA_VISIBLE_DEVICES of each rank from this node's list, so it must be the scheduler's devices. It
    # only counts those of the other nodes.
    devices = given if len(given) == attempt.ranks_per_node else list(map(str, range(attempt.ranks_per_node)))
    world = {f"node-{node}": devices for node in range(attempt.nodes)}
    return base64.urlsafe_b64encode(json.dumps(world).encode()).decode()


def _begin(launch: Launch, attempt: Attempt) -> NoReturn:
    if importlib.util.find_spec("deepspeed") is None:
        raise UsageError(f"deepspeed is not installed for {sys.executable}; run {pip_install('hpc_det[deepspeed]')}")
    os.environ.update(attempt.store_of_ranks())
    command = launch_command(launch, attempt, os.environ)
    os.execv(command[0], command)


def main(argv: list[str]) -> int:
    # DeepSpeed's launch.py ends its ranks one after another on TERM, and exits without ending them on USR1 (measured).
    block_stop_signals()
    return start("deepspeed", argv, _begin, about=__doc__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
