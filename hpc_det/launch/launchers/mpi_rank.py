"""Turns a process that mpirun has started into a rank.

    python3 -m mpi4py -m hpc_det.launch.launchers.mpi_rank COMMAND...

The rank's numbers come from MPI itself and are compared with the plan, because an MPI library under another vendor's
mpirun may report no error and make N worlds of one rank each. The process sets torchrun's variables and runs the trial
or the script itself, so a script may use mpi4py, torch.distributed, or both. A command that is not for Python is
executed with the numbers from mpirun's variables.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_det.distributed.rank_process import note_error
from hpc_det.errors import HpcDetError, UsageError, count
from hpc_det.launch import rank as trial_rank
from hpc_det.launch.launchers.arguments import is_for_python, is_trial
from hpc_det.node.agent_socket import report_exit, say_hello
from hpc_det.node.forking import leave
from hpc_det.node.frame_modules import modules_from_frames
from hpc_det.node.import_bundle import import_from_bundle
from hpc_det.node.lines import connect_local
from hpc_det.node.network import free_port
from hpc_det.node.process import unblock_stop_signals
from hpc_det.store.attempt import Attempt, failure_now, note_failure

if TYPE_CHECKING:
    from mpi4py import MPI

_NUMBERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)
"""The variables with a rank's number, the world size and the local rank, of Open MPI, MPICH and srun."""


def check_world(attempt: Attempt, size: int, local_size: int, library: str) -> None:
    """Raise UsageError with both values if MPI's world differs from the plan. `library`: MPI's version text."""
    if size != attempt.world_size:
        raise UsageError(
            f"MPI's world has {count(size, 'rank')}, but the plan has {attempt.world_size} "
            f"({count(attempt.nodes, 'node')} x {attempt.ranks_per_node}). The MPI library is {library}: if "
            "cluster.mpi_launcher is of another vendor, name that library's own mpirun; if the entrypoint sets a "
            "number of ranks, remove it"
        )
    if local_size != attempt.ranks_per_node:
        raise UsageError(
            f"MPI has {count(local_size, 'rank')} on this node, but the plan has {attempt.ranks_per_node} on each; "
            "remove hosts and mapping from the overrides"
        )


def numbers(env: Mapping[str, str]) -> tuple[int, int, int]:
    """Return rank, world size and local rank from the environment. Raises UsageError if no launcher has set them."""
    for names in _NUMBERS:
        if all(name in env for name in names):
            rank, size, local_rank = (int(env[name]) for name in names)
            return rank, size, local_rank
    raise UsageError("mpirun has set no rank number for this process; start it with Open MPI, MPICH or srun")


def _environment(attempt: Attempt, rank: int, local_rank: int, meeting: tuple[str, int]) -> dict[str, str]:
    """Return torchrun's variables for a rank. `meeting`: address and port of the store."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(attempt.world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(attempt.ranks_per_node),
        "MASTER_ADDR": meeting[0],
        "MASTER_PORT": str(meeting[1]),
    }


def _meeting(attempt: Attempt) -> tuple[str, int]:
    """Return address and port of torch.distributed's store, on the node of rank 0. Only rank 0 calls this."""
    if attempt.node_rank == 0:
        return attempt.master_addr, attempt.master_port
    # The overrides may have put rank 0 on another node than node 0, but `master_addr` is node 0's address.
    return attempt.address, free_port()


def _join(attempt: Attempt, world: MPI.Intracomm) -> dict[str, str]:
    """Compare MPI's world with the plan and return the rank's environment. Collective. Raises UsageError."""
    from mpi4py import MPI

    # Ranks with the same agent are on the same node.
    local = world.Split(attempt.node_rank, world.rank)
    check_world(attempt, world.size, local.size, MPI.Get_library_version().splitlines()[0].strip())
    meeting = world.bcast(_meeting(attempt) if world.rank == 0 else None)
    return _environment(attempt, world.rank, local.rank, meeting)


def _run(attempt: Attempt, command: Sequence[str]) -> int:
    """Run the trial or the script in this process and return the exit code."""
    if is_trial(command):
        return trial_rank.main(command[2])
    rank = int(os.environ["RANK"])
    line = connect_local(attempt.socket)
    # A child that kept the connection open would hide the rank's exit from the agent.
    os.register_at_fork(after_in_child=line.connection.close)
    say_hello(line, rank, os.getpid())
    code = _run_script(attempt, rank, command)
    report_exit(line, code)
    return code


def _run_script(attempt: Attempt, rank: int, command: Sequence[str]) -> int:
    """Run the script and return its exit code; note a failure."""
    try:
        with modules_from_frames():
            _as_main(command)
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if code:
            note_failure(attempt.trial, attempt.number, failure_now(rank, f"exit code {code}"))
        return code
    except BaseException as error:
        traceback.print_exc()
        note_error(attempt, rank, error)
        return 1
    return 0


def _as_main(command: Sequence[str]) -> None:
    """Run the script as `python script.py` or `python -m module` does."""
    if command[0] == "-m":
        sys.argv[:] = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = command
        sys.path[0] = str(Path(command[0]).resolve().parent)
        runpy.run_path(command[0], run_name="__main__")


def _world() -> MPI.Intracomm:
    """Return MPI's world. Raises UsageError if mpi4py cannot load an MPI library."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UsageError(
            f"mpi4py found no usable MPI library: {str(error).splitlines()[-1]}; its wheel needs libmpi.so.12 (MPICH) "
            f"or libmpi.so.40 (Open MPI), on LD_LIBRARY_PATH or named by MPI4PY_LIBMPI"
        ) from None
    return MPI.COMM_WORLD


def _refuse(attempt: Attempt, error: HpcDetError) -> None:
    """Note and print an error that keeps this process from becoming a rank."""
    note_error(attempt, None, error)
    print(f"hpc-det: {error}", file=sys.stderr, flush=True)


def _exec(attempt: Attempt, command: list[str]) -> None:
    """Replace this process by the command, with torchrun's variables in its environment. Raises UsageError."""
    rank, size, local_rank = numbers(os.environ)
    check_world(attempt, size, attempt.ranks_per_node, "unknown")
    meeting = attempt.master_addr, attempt.master_port
    os.execvpe(command[0], command, {**os.environ, **_environment(attempt, rank, local_rank, meeting)})


def main(command: list[str]) -> None:
    """Become a rank that runs `command`; this process exits with the rank's exit code."""
    unblock_stop_signals()
    attempt = Attempt.from_env(os.environ)
    try:
        if not is_for_python(command):
            _exec(attempt, command)
        import_from_bundle(os.environ)
        world = _world()
    except UsageError as error:
        _refuse(attempt, error)
        leave(1)
    try:
        os.environ.update(_join(attempt, world))
        code = _run(attempt, command)
    except UsageError as error:
        _refuse(attempt, error)
        code = 1
    _end_world(world, code)
    leave(code)


def _end_world(world: MPI.Intracomm, code: int) -> None:
    """Leave MPI's world; after a failure abort it, so that the other ranks end, too."""
    from mpi4py import MPI

    sys.stdout.flush()
    if MPI.Is_finalized():
        return
    if code:
        world.Abort(code)
    # Open MPI treats a rank that exits without MPI_Finalize as failed, and the other ranks wait for it.
    MPI.Finalize()


if __name__ == "__main__":
    main(sys.argv[1:])
