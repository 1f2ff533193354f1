"""Starters, which start node agents on the hosts of the driver's own job with srun, commands of PBS, or mpiexec."""

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
"""Seconds for node agents to exit after the driver has asked them to: they may have a snapshot to write."""
STEP_FLAGS = ("--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--cpu-bind=none", "--mpi=none")
"""Flags of srun with which a lost node or agent does not end the others, and no process is bound to CPUs, because the
number of ranks is not known yet. Without --wait, WaitTime of slurm.conf would apply.
"""
HOST_FILES = (
    "HYDRA_HOST_FILE",  # MPICH, Intel MPI
    "I_MPI_HYDRA_HOST_FILE",
    "OMPI_MCA_orte_default_hostfile",  # Open MPI 4
    "PRTE_MCA_prte_default_hostfile",  # Open MPI 5
    "LSB_DJOB_HOSTFILE",  # LSF
    "PE_HOSTFILE",  # Grid Engine
)
"""Variables that contain the path of a host file: one host per line, as its first word."""
# srun reads its options from SLURM_* variables (srun(1), INPUT ENVIRONMENT VARIABLES). Those about tasks describe the
# batch script or the driver's step, and would change the agents' step. Only variables about the job are passed on.
_OF_THE_JOB = re.compile(r"SLURM_(CONF|JOB_\w+|JOBID|ARRAY_\w+|RESTART_COUNT|SUBMIT_\w+|CLUSTER_NAME)")
ASK_TIMEOUT_S = 10.0
"""Timeout in seconds of squeue."""
_DEVICE = re.compile(r"\d+|(GPU|MIG)-\S+")
"""A valid entry of CUDA_VISIBLE_DEVICES: an index or a UUID."""


class Starter(Protocol):
    """The hosts of an allocation, and the commands that start agents on them."""

    name: str
    """Name of the allocation in messages."""
    hosts: list[str]
    """Names of the hosts, each once."""
    cpus: dict[str, int]
    """CPUs of the allocation on each host."""
    gpus: int
    """GPUs of the allocation on each host."""

    def commands(self, run: Path, slots: Mapping[str, int]) -> Iterator[tuple[tuple[str, ...], list[str]]]:
        """Yield command lines, each with its hosts, that start an agent on every host in `slots`.

        `slots`: number of slots by host. One command starts agents on as many hosts as possible, because each command
        costs the scheduler time.
        """

    def environment(self) -> dict[str, str]:
        """Return the environment of these commands."""

    def held(self) -> Collection[str]:
        """Return the hosts that the allocation still has."""

    def end(self, running: Collection[Process]) -> None:
        """End everything that the `running` commands have started and that has not exited; they then end too."""


def variable_of_allocation(env: Mapping[str, str]) -> str | None:
    """Return the name of the variable that identifies the allocation this process is in; None outside of any."""
    return next((name for name in ("SLURM_JOB_ID", "PBS_NODEFILE", *HOST_FILES) if env.get(name)), None)


def starter_of(env: Mapping[str, str]) -> Starter:
    """Return the starter for the allocation that this process is in.

    Raises UsageError outside of any allocation, and if no command to start processes is found.
    """
    match variable_of_allocation(env):
        case "SLURM_JOB_ID":
            return Srun(env)
        case "PBS_NODEFILE":
            return PbsStarter(env)
        case str(name):
            return Mpiexec(env, Path(env[name]))
    raise UsageError(
        "executor 'allocation': this process is not in a job: neither SLURM_JOB_ID nor PBS_NODEFILE nor the host file "
        f"of an MPI ({', '.join(HOST_FILES)}) is set; start it inside a job, or use 'local', 'slurm' or 'pbs'"
    )


class Srun:
    """Starts agents as Slurm job steps: the first step on all hosts, later ones on hosts that have lost their agent."""

    def __init__(self, env: Mapping[str, str], run: Run = run_command) -> None:
        self._env = env
        self._job_id = env["SLURM_JOB_ID"]
        self.name = f"job {self._job_id}"
        self.hosts = host_names(env["SLURM_JOB_NODELIST"])
        self.cpus = dict(zip(self.hosts, cpus_per_node(env["SLURM_JOB_CPUS_PER_NODE"]), strict=True))
        self.gpus = self._gpus(run)

    def commands(self, run: Path, slots: Mapping[str, int]) -> Iterator[tuple[tuple[str, ...], list[str]]]:
        # A step for all hosts with the same number of slots, because the number is an argument of the agent.
        for count in sorted(set(slots.values())):
            hosts = tuple(host for host in slots if slots[host] == count)
            yield hosts, [*self._srun(hosts), *_agent(run, count)]

    def environment(self) -> dict[str, str]:
        return {n: value for n, value in self._env.items() if not n.startswith("SLURM_") or _OF_THE_JOB.fullmatch(n)}

    def held(self) -> Collection[str]:
        """Return the hosts that the job still has; all of them if squeue fails."""
        # Slurm removes a failed node from a job that continues without it (sbatch --no-kill), for good.
        question = ["squeue", "--noheader", "--states=all", f"--jobs={self._job_id}", "--format=%N"]
        try:
            return host_names(run_command(question, timeout_s=ASK_TIMEOUT_S).strip())
        except CommandError:  # the state is unknown: assume no change
            return self.hosts

    def end(self, running: Collection[Process]) -> None:
        """End the steps by sending SIGTERM to srun."""
        # srun then kills its step with SIGKILL, and does not pass the signal on (measured).
        for process in running:
            process.terminate()

    def _srun(self, hosts: Sequence[str]) -> list[str]:
        return [
            "srun",
            f"--jobid={self._job_id}",
            "--overlap",  # share the CPUs with the driver's own step, if it is one, and with other agents' steps
            f"--nodes={len(hosts)}",
            f"--ntasks={len(hosts)}",
            "--ntasks-per-node=1",
            f"--nodelist={','.join(hosts)}",
            "--export=ALL",
            *STEP_FLAGS,
        ]

    def _gpus(self, run: Run) -> int:
        """Return the GPUs of the job on each node."""
        if "SLURMD_NODENAME" in self._env:
            return int(self._env.get("SLURM_GPUS_ON_NODE", 0))
        # In a shell of salloc on a login node SLURM_GPUS_ON_NODE is not set; the job's description has the total.
        try:
            total = re.search(r"gres/gpu=(\d+)", shown(self._job_id, run).get("TRES", ""))
        except CommandError:
            return 0
        return int(total[1]) // len(self.hosts) if total else 0


def _agent(run: Path, slots: int) -> list[str]:
    """Return the command line of an agent with `slots` slots."""
    return agents.into_log(run, [sys.executable, *agents.arguments(run, slots)])


class _ByScript:
    """Starts agents with one command per host, which runs a script there (HostFolder).

    A single command for all hosts could end the other agents when a host is lost. The agents end when the folder of the
    script is deleted.
    """

    def __init__(self, name: str, env: Mapping[str, str], starter: str, hosts: list[str], lines: list[str]) -> None:
        """`starter`: name of the command; `lines`: the lines of PBS_NODEFILE, or none."""
        self.name = name
        self.hosts = hosts
        self.gpus = len(gpus_here(env))  # all hosts are assumed to have as many as this one
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
        """Return all hosts; hosts that the allocation has lost are not looked up."""
        return self.hosts

    def end(self, running: Collection[Process]) -> None:
        if self._folder:
            self._folder.cleanup()
            self._folder = None


class PbsStarter(_ByScript):
    """Starts agents with the first of pbsdsh, pbs_tmrsh and mpiexec that is on PATH (hosts.STARTERS)."""

    def __init__(self, env: Mapping[str, str]) -> None:
        name, starter = f"job {env.get('PBS_JOBID', '')}", starter_on_path(env)
        if starter is None:
            raise UsageError(
                f"{name}: none of {', '.join(STARTERS)} is on PATH, and one of them is needed to start the agents on "
                "the job's hosts; add the folder of PBS' commands to the PATH of the job"
            )
        super().__init__(name, env, starter, hosts_of(env), lines_of(env))
        self.cpus = dict.fromkeys(self.hosts, int(env.get("NCPUS") or len(os.sched_getaffinity(0))))


class Mpiexec(_ByScript):
    """Starts agents with mpiexec, on the hosts of a host file."""

    def __init__(self, env: Mapping[str, str], host_file: Path) -> None:
        super().__init__(f"the hosts of {host_file}", env, "mpiexec", _hosts_in(host_file), [])
        # All hosts are assumed to have as many CPUs as this process may use here.
        self.cpus = dict.fromkeys(self.hosts, len(os.sched_getaffinity(0)))
        if shutil.which("mpiexec", path=env.get("PATH")) is None:
            raise UsageError(f"{self.name}: mpiexec, which starts the agents, is not on PATH; add its folder to PATH")

    def environment(self) -> dict[str, str]:
        """Return the environment without the variables that an MPI sets in its ranks."""
        # The driver may itself be an MPI rank.
        return {name: value for name, value in self._env.items() if not name.startswith(OF_ANOTHER_MPI)}


def _hosts_in(host_file: Path) -> list[str]:
    """Return the hosts in a host file, each once.

    Lines are such as `node1`, `node1:4`, `node1 slots=4` or `node1 4 all.q@node1`. Raises UsageError for no hosts.
    """
    lines = host_file.read_text(encoding="utf-8").splitlines()
    words = (line.partition("#")[0].split() for line in lines)
    hosts = list(dict.fromkeys(found[0].partition(":")[0] for found in words if found))
    if not hosts:
        raise UsageError(f"{host_file}: this host file, which a variable of an MPI names, contains no host")
    return hosts


def cpus_per_node(text: str) -> list[int]:
    """Return the CPUs of each node from text as in SLURM_JOB_CPUS_PER_NODE: "4(x2),8" gives [4, 4, 8]."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(cpus) for cpus, times in found for _ in range(int(times or 1))]


def gpus_here(env: Mapping[str, str]) -> list[str]:
    """Return the GPUs that CUDA would show on this host, as CUDA_VISIBLE_DEVICES names them.

    CUDA ignores the list from the first invalid name on (CUDA C++ Programming Guide, environment variables).
    """
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(number) for number, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
    return list(takewhile(_DEVICE.fullmatch, (name.strip() for name in visible.split(","))))
