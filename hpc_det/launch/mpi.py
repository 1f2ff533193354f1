"""One mpirun for the gang, started on node 0: Open MPI, MPICH, or srun with its --mpi flag.

    python3 -m hpc_det.launch.mpi [[MPIRUN_OVERRIDES...] --] (--trial module:Class | SCRIPT ARGS...)

The cluster profile's `mpi_launcher` selects the command. The launchers that wait on the other nodes start mpirun's
daemons there (hpc_det.launch.launchers.nodes), so each rank is a descendant of the agent on its node. A Python script
runs under `python -m mpi4py`, so that an exception on one rank ends all of them. Other commands are executed unchanged.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from hpc_det.errors import UsageError, pip_install
from hpc_det.launch.launchers.arguments import Launch, is_for_python, start
from hpc_det.launch.launchers.nodes import host_name, run_gang
from hpc_det.launch.srun import step_command
from hpc_det.node.environment_archive import on_any_node
from hpc_det.node.process import block_stop_signals
from hpc_det.plan.job_plan import JobPlan
from hpc_det.store.attempt import Attempt

OF_ANOTHER_MPI = ("PMI_", "PMI2_", "PMIX_", "OMPI_COMM_WORLD_", "OMPI_MCA_orte_", "OMPI_MCA_ess", "PRTE_MCA_ess")
"""Prefixes of variables that srun or mpiexec set for the agent's process; with them ranks would join its MPI world."""
_BY_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
"""Variables that let Open MPI run as root; it refuses otherwise."""
_RESOURCE_MANAGERS = "^slurm,tm,pbs,lsf,gridengine,alps"
"""Excludes all of mpirun's resource managers, which would find all nodes of the job: the gang may have only some."""


def mpirun_command(launcher: Sequence[str], attempt: Attempt, overrides: Sequence[str], agent: str) -> list[str]:
    """Return the command line up to the rank's own command.

    `agent`: a script that mpirun runs instead of ssh. Raises UsageError for an mpirun of another vendor.
    """
    path, said = _version(launcher[0])
    match vendor(said):
        case "Open MPI":  # --version prints "mpirun (Open MPI) 4.1.4"
            flags, library = _open_mpi(attempt, agent, is_old=") 4." in said), "libmpi.so.40"
        case "MPICH":
            flags, library = _mpich(attempt, agent), "libmpi.so.12"
        case _:
            raise UsageError(
                f"cluster.mpi_launcher: {launcher[0]} is {path}, which is neither Open MPI's nor MPICH's mpirun "
                f"(--version prints {said.strip()[:80]!r}); name one of these, or srun with its --mpi flag"
            )
    return [*launcher, *flags, *overrides, *_with_library(path, library)]


def vendor(said: str) -> Literal["Open MPI", "MPICH"] | None:
    """Return the vendor of an mpirun from what its --version prints; None for one that this module cannot start."""
    if any(name in said for name in ("Open MPI", "OpenRTE", "PRRTE")):
        return "Open MPI"
    return "MPICH" if "HYDRA" in said else None


def _version(launcher: str) -> tuple[str, str]:
    """Return the path of `launcher` and what its --version prints. Raises UsageError if it is not on the PATH."""
    path = shutil.which(launcher)
    if path is None:
        raise UsageError(
            f"cluster.mpi_launcher: {launcher} was not found on this node; load the site's MPI with cluster.modules, "
            f"name it by its path, or run {pip_install('hpc_det[mpi,mpich]')}"
        )
    done = subprocess.run([path, "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return path, done.stdout + done.stderr


def _open_mpi(attempt: Attempt, agent: str, *, is_old: bool) -> list[str]:
    """Return flags for mpirun(1) of Open MPI 4, or of Open MPI 5, whose runtime is PRRTE."""
    mca, shell = ("--mca", "rsh") if is_old else ("--prtemca", "ssh")
    hosts = ",".join(f"{host_name(node)}:{attempt.ranks_per_node}" for node in range(attempt.nodes))
    return [
        *(mca, "plm", shell),
        *(mca, f"plm_{shell}_agent", f"/bin/sh {agent}"),
        *(mca, f"plm_{shell}_no_tree_spawn", "1"),  # a daemon has no way to start others on further nodes
        *(mca, "ras", _RESOURCE_MANAGERS),
        *(["--mca", "orte_leave_session_attached", "1"] if is_old else ["--leave-session-attached"]),
        *("--host", hosts),
        *("-n", str(attempt.world_size)),
        # mpirun refuses more ranks than cores, unless they may share them.
        *("--map-by", f"ppr:{attempt.ranks_per_node}:node:oversubscribe"),
        # By default each rank is bound to one core or package, and its DataLoader workers with it (mpirun(1)).
        *("--bind-to", "none"),
    ]


def _mpich(attempt: Attempt, agent: str) -> list[str]:
    """Return flags for mpiexec.hydra, as its help names them."""
    return [
        # Without a resource manager (`-rmk user`), for the reason given at _RESOURCE_MANAGERS.
        *("-launcher", "ssh", "-launcher-exec", agent, "-rmk", "user"),
        # The daemons on the other nodes connect to node 0 by this address. Ranks must not take the names in -hosts for
        # their own addresses, because those names lead nowhere (`host_name`).
        *("-localhost", attempt.master_addr, "-disable-hostname-propagation"),
        *("-hosts", ",".join(map(host_name, range(attempt.nodes)))),
        *("-ppn", str(attempt.ranks_per_node)),
        *("-n", str(attempt.world_size)),
        "-genvnone",  # otherwise all ranks get the environment of node 0
    ]


def _with_library(path: str, library: str) -> list[str]:
    """Return a command prefix that makes mpi4py load the MPI library of this mpirun."""
    # The wheel of mpi4py loads the first MPI library that it finds, and a node may have several.
    if "MPI4PY_LIBMPI" in os.environ:
        return []
    prefix = Path(path).resolve().parent.parent
    places = [str(prefix / folder / library) for folder in ("lib", "lib64")]
    return ["env", f"MPI4PY_LIBMPI={os.pathsep.join([*places, library])}"]


def rank_command(command: Sequence[str]) -> list[str]:
    """Return the command line of a rank. Raises UsageError if it is a Python script and mpi4py is missing."""
    entry = ["-m", "hpc_det.launch.launchers.mpi_rank", *command]
    if not is_for_python(command):
        return [*on_any_node(sys.executable), *entry]
    if importlib.util.find_spec("mpi4py") is None:
        raise UsageError(f"mpi4py is not installed for {sys.executable}; run {pip_install('hpc_det[mpi]')}")
    # Under -m mpi4py an exception aborts the world; otherwise the other ranks would wait for this one in MPI_Finalize.
    return [*on_any_node(sys.executable), "-m", "mpi4py", *entry]


def _write_agent(attempt: Attempt) -> str:
    """Write the script that mpirun runs instead of ssh, and return its path."""
    # mpiexec.hydra accepts the path of one executable without arguments, so the command needs a script.
    path = Path(attempt.socket).with_name("on-node")
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m hpc_det.launch.launchers.nodes "$@"\n')
    path.chmod(stat.S_IRWXU)
    return str(path)


def _begin(launch: Launch, attempt: Attempt) -> int:
    plan = JobPlan.of(attempt.trial.experiment())
    for name in [name for name in os.environ if name.startswith(OF_ANOTHER_MPI)]:
        del os.environ[name]
    os.environ.update({**attempt.store_of_ranks(), **dict.fromkeys(_BY_ROOT, "1")})

    def command() -> list[str]:
        rank = rank_command(launch.command)
        if Path(plan.mpi_launcher[0]).name == "srun":
            return [*step_command(plan.mpi_launcher, plan, launch.overrides), *rank]
        return [*mpirun_command(plan.mpi_launcher, attempt, launch.overrides, _write_agent(attempt)), *rank]

    return run_gang(attempt, command)


def main(argv: list[str]) -> int:
    block_stop_signals()
    return start("mpi", argv, _begin, about=__doc__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
