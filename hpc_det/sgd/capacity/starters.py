"""How processes start on the hosts of the allocation that the driver runs in: srun's steps, PBS' starters, mpiexec."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Protocol

from hpc_det.errors import UsageError
from hpc_det.launch.mpi import OF_ANOTHER_MPI
from hpc_det.schedulers.pbs.hosts import STARTERS, HostFolder, hosts_of, lines_of, start_command, starter_on_path
from hpc_det.schedulers.scheduler import CommandError, Run, run_command
from hpc_det.schedulers.slurm.answers import host_names, shown
from hpc_det.sgd.elastic import agents

Process = subprocess.Popen[bytes]

LEAVE_S = 10.0
"""For node agents to leave by themselves, once the driver has hung up: they may have a snapshot to write."""
STEP_FLAGS = ("--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--cpu-bind=none", "--mpi=none")
"""Of srun: no lost node or agent ends the others (without --wait, slurm.conf's WaitTime counts), and as it is not known
yet how many ranks there will be, none is bound.
"""
HOST_FILES = (
    "HYDRA_HOST_FILE",  # MPICH, Intel MPI
    "I_MPI_HYDRA_HOST_FILE",
    "OMPI_MCA_orte_default_hostfile",  # Open MPI 4
    "PRTE_MCA_prte_default_hostfile",  # Open MPI 5
    "LSB_DJOB_HOSTFILE",  # LSF
    "PE_HOSTFILE",  # Grid Engine
)
"""Variables that name a file with a host a line, first word."""
# srun(1), INPUT ENVIRONMENT VARIABLES: the shape of the batch script's tasks, or of the step that the driver is, is
# not that of the agents' step. What is said of the job stays, for srun and for what users read.
_OF_THE_JOB = re.compile(r"SLURM_(CONF|JOB_\w+|JOBID|ARRAY_\w+|RESTART_COUNT|SUBMIT_\w+|CLUSTER_NAME)")
ASK_TIMEOUT_S = 10.0
_DEVICE = re.compile(r"\d+|(GPU|MIG)-\S+")


class Starter(Protocol):
    name: str
    """Of the allocation, in messages."""
    hosts: list[str]
    cpus: dict[str, int]
    """That the allocation has on each host."""
    gpus: int
    """That it has on each."""

    def commands(self, run: Path, slots: Mapping[str, int]) -> Iterator[tuple[tuple[str, ...], list[str]]]:
        """Command lines that start an agent on each of these hosts, with so many slots, and the hosts of each.

        As many hosts as can be by one, since whoever starts them has work with each.
        """

    def environment(self) -> dict[str, str]:
        """Of these commands."""

    def held(self) -> Collection[str]:
        """The hosts that the allocation still has."""

    def end(self, running: Collection[Process]) -> None:
        """Of what these have started, all that has not left by itself. They end soon, with it."""


def variable_of_allocation(env: Mapping[str, str]) -> str | None:
    """The one that says where this process is; None: in no allocation."""
    return next((name for name in ("SLURM_JOB_ID", "PBS_NODEFILE", *HOST_FILES) if env.get(name)), None)


def starter_of(env: Mapping[str, str]) -> Starter:
    """Raises UsageError where the environment is that of no allocation, or of one without means to start anything."""
    match variable_of_allocation(env):
        case "SLURM_JOB_ID":
            return Srun(env)
        case "PBS_NODEFILE":
            return PbsStarter(env)
        case str(name):
            return Mpiexec(env, Path(env[name]))
    raise UsageError(
        "executor 'allocation': this process is in none: there is no SLURM_JOB_ID, no PBS_NODEFILE, and no host file "
        f"of an MPI ({', '.join(HOST_FILES)}); start it inside a job, or choose 'local', 'slurm' or 'pbs'"
    )


class Srun:
    """A step of Slurm's: the first over all hosts, later ones on a host that had lost its agent."""

    def __init__(self, env: Mapping[str, str], run: Run = run_command) -> None:
        self._env = env
        self._job_id = env["SLURM_JOB_ID"]
        self.name = f"job {self._job_id}"
        self.hosts = host_names(env["SLURM_JOB_NODELIST"])
        self.cpus = dict(zip(self.hosts, cpus_per_node(env["SLURM_JOB_CPUS_PER_NODE"]), strict=True))
        self.gpus = self._gpus(run)

    def commands(self, run: Path, slots: Mapping[str, int]) -> Iterator[tuple[tuple[str, ...], list[str]]]:
        for count in sorted(set(slots.values())):
            hosts = tuple(host for host in slots if slots[host] == count)
            yield hosts, [*self._srun(hosts), *_agent(run, count)]

    def environment(self) -> dict[str, str]:
        return {n: value for n, value in self._env.items() if not n.startswith("SLURM_") or _OF_THE_JOB.fullmatch(n)}

    def held(self) -> Collection[str]:
        """A node that went down is taken out of a job that stays (sbatch --no-kill), and does not come back to it."""
        question = ["squeue", "--noheader", "--states=all", f"--jobs={self._job_id}", "--format=%N"]
        try:
            return host_names(run_command(question, timeout_s=ASK_TIMEOUT_S).strip())
        except CommandError:  # no news
            return self.hosts

    def end(self, running: Collection[Process]) -> None:
        """srun KILLs its step when it is sent TERM, and passes nothing on (measured)."""
        for process in running:
            process.terminate()

    def _srun(self, hosts: Sequence[str]) -> list[str]:
        return [
            "srun",
            f"--jobid={self._job_id}",
            "--overlap",  # with the step that the driver may be, and with each other
            f"--nodes={len(hosts)}",
            f"--ntasks={len(hosts)}",
            "--ntasks-per-node=1",
            f"--nodelist={','.join(hosts)}",
            "--export=ALL",
            *STEP_FLAGS,
        ]

    def _gpus(self, run: Run) -> int:
        """A job's processes on its nodes are told. A shell of salloc's on another host has to ask."""
        if "SLURMD_NODENAME" in self._env:
            return int(self._env.get("SLURM_GPUS_ON_NODE", 0))
        try:
            total = re.search(r"gres/gpu=(\d+)", shown(self._job_id, run).get("TRES", ""))
        except CommandError:
            return 0
        return int(total[1]) // len(self.hosts) if total else 0


def _agent(run: Path, slots: int) -> list[str]:
    """Return the command line of an agent with room for so many ranks."""
    return agents.into_log(run, [sys.executable, *agents.arguments(run, slots)])


class _ByScript:
    """One starter of PBS' for each host, so that none that is lost ends the others, with a script (HostFolder).

    Agents end when the folder that the script lies in is gone.
    """

    def __init__(self, name: str, env: Mapping[str, str], starter: str, hosts: list[str], lines: list[str]) -> None:
        """`lines`: those of PBS_NODEFILE."""
        self.name = name
        self.hosts = hosts
        self.gpus = len(gpus_here(env))
        self._env = env
        self._starter = starter
        self._lines = lines
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def commands(self, run: Path, slots: Mapping[str, int]) -> Iterator[tuple[tuple[str, ...], list[str]]]:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix=".nodes-", dir=run)
            HostFolder.made(Path(self._folder.name))
        folder, environment = HostFolder(Path(self._folder.name)), self.environment()
        scripts = {
            count: folder.write_script(_agent(run, count), environment, name=f"start-{count}")
            for count in set(slots.values())
        }
        for host, count in slots.items():
            rank = self.hosts.index(host)
            folder.forget(rank)
            yield (host,), start_command(self._starter, self._lines, host, rank, scripts[count])

    def environment(self) -> dict[str, str]:
        return dict(self._env)

    def held(self) -> Collection[str]:
        return self.hosts

    def end(self, running: Collection[Process]) -> None:
        if self._folder:
            self._folder.cleanup()
            self._folder = None


class PbsStarter(_ByScript):
    def __init__(self, env: Mapping[str, str]) -> None:
        name, starter = f"job {env.get('PBS_JOBID', '')}", starter_on_path(env)
        if starter is None:
            raise UsageError(
                f"{name}: there is no {', '.join(STARTERS)} on PATH, and one of them must start the agents on its "
                "hosts; put the folder of PBS' commands on the PATH of the job"
            )
        super().__init__(name, env, starter, hosts_of(env), lines_of(env))
        self.cpus = dict.fromkeys(self.hosts, int(env.get("NCPUS") or len(os.sched_getaffinity(0))))


class Mpiexec(_ByScript):
    def __init__(self, env: Mapping[str, str], host_file: Path) -> None:
        super().__init__(f"the hosts of {host_file}", env, "mpiexec", _hosts_in(host_file), [])
        self.cpus = dict.fromkeys(self.hosts, len(os.sched_getaffinity(0)))
        if shutil.which("mpiexec", path=env.get("PATH")) is None:
            raise UsageError(f"{self.name}: there is no mpiexec on PATH to start the agents with")

    def environment(self) -> dict[str, str]:
        """The driver may be a rank of an MPI itself."""
        return {name: value for name, value in self._env.items() if not name.startswith(OF_ANOTHER_MPI)}


def _hosts_in(host_file: Path) -> list[str]:
    """Lines such as `node1`, `node1:4`, `node1 slots=4`, `node1 4 all.q@node1`; each host once."""
    lines = host_file.read_text(encoding="utf-8").splitlines()
    words = (line.partition("#")[0].split() for line in lines)
    hosts = list(dict.fromkeys(found[0].partition(":")[0] for found in words if found))
    if not hosts:
        raise UsageError(f"{host_file} names no host, and an MPI's environment says that it does")
    return hosts


def cpus_per_node(text: str) -> list[int]:
    """ "4(x2),8", as in SLURM_JOB_CPUS_PER_NODE, is 4, 4, 8."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(cpus) for cpus, times in found for _ in range(int(times or 1))]


def gpus_here(env: Mapping[str, str]) -> list[str]:
    """Return the GPUs that CUDA would show on this host, as CUDA_VISIBLE_DEVICES names them.

    CUDA stops at the first name that is none (CUDA C++ Programming Guide, environment variables).
    """
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(number) for number, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
    return list(takewhile(_DEVICE.fullmatch, (name.strip() for name in visible.split(","))))
