"""A process of a launcher's becomes a rank.

    python3 -m hpc_det.launch.launchers.rank [--local_rank=K] (srun | deepspeed | script) COMMAND...

srun and DeepSpeed start their ranks so, and these set what ranks are told on their node: srun hands on the environment
of node 0, and DeepSpeed gives each rank torchrun's variables but one, and its script an argument.

A script of the user's gets a parent, `script`, that tells the agent what becomes of it: one that fails is named with
its rank and exit code, and ends the gang at once. When the agent is gone, the script is ended.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from hpc_det.launch.launchers.arguments import for_python, is_trial
from hpc_det.launch.launchers.nodes import environment_of
from hpc_det.node.agent_socket import report_exit, say_hello
from hpc_det.node.lines import Line, connect_local
from hpc_det.node.process import (
    SignalPipe,
    adopt_orphans,
    end_descendants,
    exit_code,
    signal_name,
    unblock_stop_signals,
)
from hpc_det.store.attempt import Attempt, failure_now, note_failure

LOCAL_RANK = "--local_rank="
_MODULE = "hpc_det.launch.launchers.rank"


def as_rank(command: Sequence[str]) -> list[str]:
    """The command line of one rank: of a trial class, or of a script under watch."""
    if is_trial(command):
        return [sys.executable, *command]
    return [sys.executable, "-m", _MODULE, "script", *for_python(command)]


# --- of srun


def srun_environment(env: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables from srun's (srun(1)), but for the gang's tasks on a node, which the plan has made the same
    everywhere.
    """
    return {
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": env["SLURM_NTASKS"],
        "LOCAL_RANK": env["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": env["HPC_DET_RANKS_PER_NODE"],
        "MASTER_ADDR": env["HPC_DET_MASTER_ADDR"],
        "MASTER_PORT": env["HPC_DET_MASTER_PORT"],
    }


def of_srun(command: list[str]) -> None:
    """What differs on this node comes from what its launcher published."""
    unblock_stop_signals()
    os.environ.update(environment_of(Attempt.from_env(os.environ), int(os.environ["SLURM_NODEID"])))
    os.environ.update(srun_environment(os.environ))
    os.execvp(command[0], command)


# --- of DeepSpeed


def with_local_rank(command: list[str], argument: str | None) -> list[str]:
    """`command` with DeepSpeed's `argument` where DeepSpeed would put it: right after the script."""
    script = 2 if command[0] == "-m" else 1
    return [*command[:script], *([argument] if argument else []), *command[script:]]


def of_deepspeed(command: list[str], argument: str | None) -> None:
    unblock_stop_signals()
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["HPC_DET_RANKS_PER_NODE"]
    if os.environ["HPC_DET_SLOT_TYPE"] == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # DeepSpeed numbers the slots there, and a node may have GPUs
    rank = as_rank(with_local_rank(command, argument))
    os.execv(rank[0], rank)


# --- a script under watch


def watch(command: Sequence[str], attempt: Attempt, rank: int) -> int:
    """Its exit code, or 1 when the agent is gone."""
    line, signals = connect_local(attempt.socket), SignalPipe([signal.SIGCHLD])
    script = subprocess.Popen(command)
    say_hello(line, rank, script.pid)
    with selectors.DefaultSelector() as selector:
        for source in (line.connection.fileno(), signals.fd):
            selector.register(source, selectors.EVENT_READ)
        while script.poll() is None:
            ready = {key.fd for key, _ in selector.select()}
            signals.received()
            if line.connection.fileno() in ready and line.receive_some() is None:
                end_descendants()
                return 1
    return _tell(attempt, rank, script.returncode, line)


def _tell(attempt: Attempt, rank: int, returncode: int, line: Line) -> int:
    code = exit_code(returncode)
    if code:
        ended = f"ended by signal {signal_name(-returncode)}" if returncode < 0 else f"exit code {code}"
        note_failure(attempt.trial, attempt.number, failure_now(rank, ended))
    report_exit(line, code)
    return code


def of_script(command: list[str]) -> int:
    adopt_orphans()
    try:
        return watch(command, Attempt.from_env(os.environ), int(os.environ["RANK"]))
    except OSError as error:
        print(f"entrypoint: {error.filename}: {error.strerror}", file=sys.stderr)
        return 127


def main(argv: list[str]) -> int:
    argument = argv.pop(0) if argv[0].startswith(LOCAL_RANK) else None  # DeepSpeed puts it there
    starter, *command = argv
    match starter:
        case "srun":
            of_srun(command)
        case "deepspeed":
            of_deepspeed(command, argument)
    return of_script(command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
