"""Detects the scheduler of this machine, queries it for nodes and pools, and writes a cluster profile."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from hpc_det.config.cluster_choice import COMMANDS, Which, schedulers_here
from hpc_det.config.local_slots import CPU_RANKS, in_words, torch_has_cuda
from hpc_det.errors import UsageError, count
from hpc_det.node.gpus import Device, NvmlError, cuda_devices
from hpc_det.schedulers.pbs.hosts import STARTERS
from hpc_det.schedulers.scheduler import CommandError, Run

NO_SCHEDULER = "neither Slurm (sinfo) nor PBS (pbsnodes) is on PATH"


@dataclass(frozen=True, kw_only=True)
class FoundPool:
    """A partition or queue as the scheduler reports it. None: the scheduler does not report the value, or sets no
    limit.
    """

    name: str
    default: bool = False
    slots_per_node: int | None = None
    slot_type: str | None = None
    cpus_per_slot: int | None = None
    max_cpus_per_node: int | None = None
    max_memory_per_node: str | None = None
    gpu_type: str | None = None
    max_nodes: int | None = None
    max_time_limit: str | None = None
    preempt_mode: str | None = None
    grace_time_s: int | None = None
    remark: str = ""
    """A note for the person who checks the profile."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """A scheduler's answers about its cluster."""

    scheduler: str
    version: str
    name: str
    pools: tuple[FoundPool, ...]
    """The partitions or queues; at least one."""
    max_array_size: int | None
    """The largest number of elements of a job array; None if the scheduler sets no limit."""
    start_agents_with: str | None = None
    """The command that starts agents on the nodes of a PBS job; None if none was found, and on Slurm."""
    gpu_flag: str | None = None
    """The form of the flag that requests GPUs from Slurm; None on PBS."""
    gpu_flag_why: str = ""
    """The reason for `gpu_flag`, written as a comment beside it."""
    runtime: str | None = None
    """The container runtime: pyxis, apptainer or podman; None if none was found."""

    @property
    def usual(self) -> FoundPool:
        """The default pool, or the first if none is the default."""
        return next((pool for pool in self.pools if pool.default), self.pools[0])


def scheduler_here(which: Which) -> str | None:
    """Return "slurm" or "pbs", or None if neither is installed."""
    return next(iter(schedulers_here(which)), None)


class ThisMachine(NamedTuple):
    """The GPUs and CPUs of a machine without a scheduler."""

    name: str
    gpus: tuple[Device, ...]
    """The GPUs that CUDA shows."""
    cpus: int
    """The CPUs that this process may use."""
    problem: str = ""
    """Reason why the GPUs cannot be used; empty if they can, or without a driver."""

    @classmethod
    def look(cls, env: Mapping[str, str]) -> ThisMachine:
        """Return this machine, with the GPUs that processes with this environment see."""
        name = socket.gethostname().partition(".")[0]
        cpus = len(os.sched_getaffinity(0))
        try:
            gpus = tuple(cuda_devices(env))
        except NvmlError as error:
            return cls(name, (), cpus, str(error))
        if gpus and not torch_has_cuda():
            return cls(name, gpus, cpus, "the installed torch is built without CUDA; install torch's CUDA build")
        return cls(name, gpus, cpus)

    @property
    def in_words(self) -> str:
        """Its GPUs and CPUs, such as "2 GPUs, NVIDIA H200, 141 GiB each, and 16 CPUs"."""
        sizes = dict.fromkeys(f"{device.memory / 2**30:.0f} GiB each" for device in self.gpus if device.memory)
        gpus = ", ".join([in_words(self.gpus), *sizes]) if self.gpus else "no NVIDIA GPU"
        return f"{gpus}, and {count(self.cpus, 'CPU')}"

    def to_yaml(self, name: str) -> str:
        """Return the text of a profile called `name` for this machine."""
        slots = len(self.gpus) or CPU_RANKS
        lines = [
            f"# Written by `hpc-det cluster detect`. This machine has no scheduler; it has {self.in_words}.",
            f"name: {_value(name)}",
            "scheduler: local",
            "max_nodes: 1",
            f"slots_per_node: {slots}",
            f"slot_type: {'gpu' if self.gpus else 'cpu'}",
            f"cpus_per_slot: {max(self.cpus // slots, 1)}",
            "",
            "containers:",
            "  runtime: null  # apptainer or podman, for experiments that name an image",
            "",
            "# scratch: /scratch/$USER     # a folder on a fast disk, for $TMPDIR",
            "# setup: [ulimit -n 65536]    # shell lines, run in the job",
        ]
        return "".join(f"{line}\n" for line in lines)


def ask(run: Run, which: Which, only: str | None = None) -> Site:
    """Query the scheduler `only`, or the first that answers if None.

    Raises UsageError if no scheduler is installed, and CommandError if none answers.
    """
    here = [kind for kind in schedulers_here(which) if only in (None, kind)]
    if only and not here:
        raise UsageError(
            f"cluster detect: --scheduler {only}: {COMMANDS[only]} is not on PATH; run this on a login node of the "
            "cluster, or choose the other scheduler"
        )
    if not here:
        raise UsageError(
            f"{NO_SCHEDULER}; run this on a login node of the cluster, or write a profile by hand: see "
            "docs/how-to/set-up-a-cluster.md"
        )
    # A PBS site may also have the commands of a Slurm that does not run, so a scheduler that does not answer is
    # skipped.
    site = _first_answer(here, run)
    if site.scheduler == "pbs":
        site = replace(site, start_agents_with=next(iter(starters(run, which)), None))
    found = next((runtime for runtime in ("apptainer", "podman") if which(runtime)), None)
    return site if site.runtime else replace(site, runtime=found)


def _first_answer(here: Sequence[str], run: Run) -> Site:
    refusals: list[str] = []
    for kind in here:
        try:
            found: Site = import_module(f"hpc_det.schedulers.{kind}.detect").detect(run)
            return found
        except CommandError as error:
            refusals.append(str(error))
    raise CommandError("\n".join(refusals))


def starters(run: Run, which: Which) -> list[str]:
    """Return the commands on PATH that can start processes as part of a PBS job, the preferred first."""
    return [name for name in STARTERS if which(name) and (name != "mpiexec" or not why_not_mpiexec(run, which))]


def why_not_mpiexec(run: Run, which: Which) -> str:
    """Return why the mpiexec on PATH cannot start agents; "" if it can."""
    path = which("mpiexec") or ""
    if Path(path).is_relative_to(sys.prefix):
        return f"{path} belongs to this Python environment and not to the site"
    try:
        said = run([path, "--version"])
        if "HYDRA" in said:
            # An mpiexec that was not built for PBS starts processes with ssh, if it finds the nodes of the job at all;
            # PBS then does not see these processes.
            is_built = re.search(r"^ *Launchers available:.*\bpbs\b", said, re.MULTILINE)
        elif any(name in said for name in ("Open MPI", "OpenRTE", "PRRTE")):
            is_built = re.search(r"\b(plm|ras): tm\b", run([str(Path(path).with_name("ompi_info"))]))
        else:
            return ""  # such as the vendor's mpiexec for this machine
    except CommandError as error:
        return str(error)
    return "" if is_built else f"{path} was not built for PBS"


def to_yaml(site: Site, name: str) -> str:
    """Return the text of a cluster profile called `name` with all detected values and comments, for a person to
    complete.
    """
    return "".join(f"{line}\n" for line in _lines(site, name))


def _lines(site: Site, name: str) -> Iterator[str]:
    usual = site.usual
    yield f"# Written by `hpc-det cluster detect` from the answers of {site.version}. Check and complete it."
    yield f"name: {_value(name)}"
    yield f"scheduler: {site.scheduler}"
    yield ""
    yield f"# Nodes: those of {usual.name!r}, {'the default pool' if usual.default else 'the first pool'}."
    yield f"slots_per_node: {usual.slots_per_node or 1}"
    yield f"slot_type: {usual.slot_type or 'cpu'}"
    yield f"cpus_per_slot: {usual.cpus_per_slot or 1}"
    if site.gpu_flag:
        yield f"gpu_flag: {site.gpu_flag}  # {site.gpu_flag_why}"
    if site.start_agents_with:
        yield f"start_agents_with: {site.start_agents_with}"
    if site.max_array_size is not None:
        yield f"max_array_size: {site.max_array_size}"
    yield ""
    yield "# Settings of each pool. `default: true` marks the pool of jobs that name none."
    yield "pools:"
    for pool in site.pools:
        yield from _pool(pool)
    yield ""
    yield "containers:"
    yield f"  runtime: {_value(site.runtime)}  # apptainer, podman or pyxis, for experiments that name an image"
    yield ""
    yield "# Settings that the scheduler does not report:"
    yield "# account: physics            # the account to charge"
    yield '# time_limit: "04:00:00"      # for experiments that set none'
    yield "# scratch: /scratch/$USER     # a node-local folder, for $TMPDIR"
    yield "# modules: [cuda/12.4]        # loaded in the job"
    yield "# setup: [ulimit -n 65536]    # shell lines, run in the job"
    if site.scheduler == "slurm":
        yield "# srun_args: [--mpi=pmix]"


def _pool(pool: FoundPool) -> Iterator[str]:
    found = {field.name: getattr(pool, field.name) for field in fields(pool) if field.name not in ("name", "remark")}
    said = {key: value for key, value in found.items() if value is not None and value is not False}
    yield f"  {_value(pool.name)}:" + ("" if said else " {}") + (f"  # {pool.remark}" if pool.remark else "")
    yield from (f"    {key}: {_value(value)}" for key, value in said.items())


def _value(value: str | int | None) -> str:
    """Return the value as JSON, which is also YAML."""
    # The quotes keep a text such as 1:30:00 or `on` a string; YAML 1.1 would read a number and a boolean.
    return json.dumps(value, ensure_ascii=False)
