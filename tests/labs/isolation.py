"""Isolate a lab from schedulers of this machine: their commands and their variables are removed.

A machine may have a Slurm or a PBS already, and tests may run inside a job of it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, MutableMapping
from pathlib import Path

ACCOUNTING_COMMANDS = ("sacct", "sacctmgr", "sreport")
SLURM_COMMANDS = (
    *("salloc", "sattach", "sbatch", "sbcast", "scancel", "scontrol", "sdiag", "sinfo", "sprio", "squeue", "srun"),
    *("sshare", "sstat", "strigger"),
    *ACCOUNTING_COMMANDS,
)
PBS_COMMANDS = (
    *("qsub", "qstat", "qdel", "qsig", "qalter", "qmove", "qorder", "qhold", "qrls", "qrerun", "qselect", "qrun"),
    *("qmgr", "pbsnodes", "pbsdsh", "pbs_tmrsh", "pbs_rsub", "pbs_rstat", "pbs_attach"),
)

_SCHEDULERS = ("SLURM", "SBATCH_", "SALLOC_", "SQUEUE_", "SINFO_", "SACCT", "SCANCEL_", "SCONTROL_", "PBS_")
_LAUNCHERS = ("PMI", "OMPI_", "MPICH_", "HYDRA_", "TORCHELASTIC_", "GROUP_", "ROLE_", "SUBMITIT_")
_RANK = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_OF_TESTS = {"HPC_DET_LAB", "HPC_DET_LAB_OPERATOR", "HPC_DET_REAL_PBS", "HPC_DET_TEST_ID", "HPC_DET_BENCH_SHAPED"}


def forget_other_schedulers(env: MutableMapping[str, str], *, keep_pbs: bool) -> None:
    """Remove the variables of schedulers, launchers, hpc_det and the desktop. `keep_pbs`: the tests use the machine's
    PBS.
    """
    prefixes = tuple(prefix for prefix in _SCHEDULERS if not (keep_pbs and prefix == "PBS_"))
    for name in set(env) - _OF_TESTS:
        if name in _RANK or name.startswith((*prefixes, *_LAUNCHERS, "HPC_DET_", "XDG_")):
            del env[name]


def forget_commands(env: MutableMapping[str, str], folder: Path) -> None:
    """Remove the commands of this machine's schedulers from PATH, so that it is no login node of a cluster.

    `folder`: for links to its other commands.
    """
    env["PATH"] = path_without((*SLURM_COMMANDS, *PBS_COMMANDS), env["PATH"], folder)


def path_with_only(scheduler: Path, path: str, folder: Path) -> str:
    """Return `path` with the commands of `scheduler` first, and without those of others; unchanged if it already has
    them.
    """
    if str(scheduler) in path.split(os.pathsep):
        return path
    return os.pathsep.join([str(scheduler), path_without((*SLURM_COMMANDS, *PBS_COMMANDS), path, folder)])


def path_without(commands: Collection[str], path: str, folder: Path) -> str:
    """Return `path` without these commands: a part of it that has one is replaced by a folder of links below
    `folder`.
    """
    parts = [Path(part) for part in path.split(os.pathsep)]
    return os.pathsep.join(str(_links(part, commands, folder) if _has_any(part, commands) else part) for part in parts)


def _has_any(folder: Path, commands: Collection[str]) -> bool:
    return any((folder / command).exists() for command in commands)


def _links(folder: Path, without: Collection[str], below: Path) -> Path:
    links = below / str(folder.absolute()).strip("/").replace("/", "-")
    if not links.exists():
        links.mkdir(parents=True)
        for command in set(os.listdir(folder)) - set(without):
            (links / command).symlink_to(folder.absolute() / command)
    return links
