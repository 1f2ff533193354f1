"""Turns a process that another launcher has started into a rank.

    python3 -m hpc_det.launch.launchers.rank [--local_rank=K] (srun | deepspeed | script) COMMAND...

srun and DeepSpeed start their ranks with this module, which sets the variables that they do not set: srun gives all
ranks the environment of node 0 and sets none of torchrun's variables. DeepSpeed sets all of torchrun's variables except
LOCAL_WORLD_SIZE, and passes --local_rank.

`script` is the parent process of a user's script. It reports a failure with rank and exit code to the agent, which ends
the gang at once. If the agent dies, it ends the script.
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
from hpc_det.node.environment_archive import on_any_node
from hpc_det.node.lines import Line, connect_local
from hpc_det.node.oom import OomWatch
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
    """Return the command line of a rank: of a trial class, or of a script with its parent process."""
    if is_trial(command):
        return [*on_any_node(sys.executable), *command]
    program, *rest = for_python(command)
    return [*on_any_node(sys.executable), "-m", _MODULE, "script", *on_any_node(program), *rest]


# --- ranks that srun has started


def srun_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables from srun's (srun(1))."""
    return {
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": env["SLURM_NTASKS"],
        "LOCAL_RANK": env["SLURM_LOCALID"],
        # From the plan, which puts the same number of ranks on every node.
        "LOCAL_WORLD_SIZE": env["HPC_DET_RANKS_PER_NODE"],
        "MASTER_ADDR": env["HPC_DET_MASTER_ADDR"],
        "MASTER_PORT": env["HPC_DET_MASTER_PORT"],
    }


def of_srun(command: list[str]) -> None:
    """Replace this process by `command`, with the variables of its node and its rank."""
    unblock_stop_signals()
    # srun has started this process with node 0's environment.
    for name, value in environment_of(Attempt.from_env(os.environ), int(os.environ["SLURM_NODEID"])).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    os.environ.update(srun_environment(os.environ))
    os.execvp(command[0], command)


# --- ranks that DeepSpeed has started


def with_local_rank(command: list[str], argument: str | None) -> list[str]:
    """Return `command` with `argument` right after the script, where DeepSpeed puts it."""
    script = 2 if command[0] == "-m" else 1
    return [*command[:script], *([argument] if argument else []), *command[script:]]


def of_deepspeed(command: list[str], argument: str | None) -> None:
    """Replace this process by the rank's command, with the variables that DeepSpeed does not set."""
    unblock_stop_signals()
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["HPC_DET_RANKS_PER_NODE"]
    if os.environ["HPC_DET_SLOT_TYPE"] == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # DeepSpeed puts slot numbers here, which may be those of real GPUs
    rank = as_rank(with_local_rank(command, argument))
    os.execv(rank[0], rank)


# --- the parent process of a script


def watch(command: Sequence[str], attempt: Attempt, rank: int) -> int:
    """Run the script and report its end to the agent; return its exit code, or 1 if the agent has died."""
    line, signals = connect_local(attempt.socket), SignalPipe([signal.SIGCHLD])
    oom, script = OomWatch(), subprocess.Popen(command)
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
    return _report(attempt, rank, script.returncode, line, oom)


def _report(attempt: Attempt, rank: int, returncode: int, line: Line, oom: OomWatch) -> int:
    """Note a failure, report the exit to the agent, and return the exit code."""
    code = exit_code(returncode)
    if code:
        ended = f"ended by signal {signal_name(-returncode)}" if returncode < 0 else f"exit code {code}"
        killer = oom.killer() if returncode == -signal.SIGKILL else ""
        failure = failure_now(rank, "; ".join(filter(None, [ended, killer])), code=returncode)
        note_failure(attempt.trial, attempt.number, failure)
    report_exit(line, code)
    return code


def of_script(command: list[str]) -> int:
    """Run the script as this rank and return its exit code; 127 if it cannot be executed."""
    adopt_orphans()
    try:
        return watch(command, Attempt.from_env(os.environ), int(os.environ["RANK"]))
    except OSError as error:
        print(f"entrypoint: {error.filename}: {error.strerror}", file=sys.stderr)
        return 127


def main(argv: list[str]) -> int:
    argument = argv.pop(0) if argv[0].startswith(LOCAL_RANK) else None  # DeepSpeed puts it right after the module
    starter, *command = argv
    match starter:
        case "srun":
            of_srun(command)
        case "deepspeed":
            of_deepspeed(command, argument)
    return of_script(command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
