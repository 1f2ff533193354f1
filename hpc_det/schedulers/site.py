"""The site of this machine: which scheduler it has, what that says of itself, and the profile that follows from it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from importlib import import_module
from pathlib import Path

from hpc_det.errors import UsageError
from hpc_det.schedulers.pbs.hosts import STARTERS
from hpc_det.schedulers.scheduler import CommandError, Run

Which = Callable[[str], str | None]
"""Where a command lies on PATH; None for nowhere."""

_COMMANDS = {"slurm": "sinfo", "pbs": "pbsnodes"}


@dataclass(frozen=True, kw_only=True)
class FoundPool:
    """A partition or queue. None: the scheduler does not say, or sets no bound."""

    name: str
    default: bool = False
    slots_per_node: int | None = None
    slot_type: str | None = None
    cpus_per_slot: int | None = None
    gpu_type: str | None = None
    max_nodes: int | None = None
    max_time_limit: str | None = None
    preempt_mode: str | None = None
    grace_time_s: int | None = None
    remark: str = ""
    """What a person should know of it."""


@dataclass(frozen=True, kw_only=True)
class Site:
    scheduler: str
    version: str
    name: str
    pools: tuple[FoundPool, ...]
    """At least one."""
    max_array_size: int | None
    start_agents_with: str | None = None
    gpu_flag: str | None = None
    gpu_flag_why: str = ""
    runtime: str | None = None

    @property
    def usual(self) -> FoundPool:
        """The default pool, or the first."""
        return next((pool for pool in self.pools if pool.default), self.pools[0])


def scheduler_here(which: Which) -> str | None:
    """slurm, pbs or None. Slurm comes first: it may bring commands named as PBS' own, which speak no JSON."""
    return next(iter(schedulers_here(which)), None)


def schedulers_here(which: Which) -> list[str]:
    """Those whose commands are there, the likelier first; one may be there that does not run."""
    return [kind for kind, command in _COMMANDS.items() if which(command)]


def ask(run: Run, which: Which, only: str | None = None) -> Site:
    """Of the scheduler `only`; None: of the first that answers, as where PBS runs, there may be the commands of a Slurm
    that does not. Raises UsageError where there is no scheduler, and CommandError where none answers.
    """
    here = [kind for kind in schedulers_here(which) if only in (None, kind)]
    if only and not here:
        raise UsageError(
            f"cluster detect: --scheduler {only}: {_COMMANDS[only]} is not on PATH; run it on a login node of the "
            "cluster, or choose the other scheduler"
        )
    if not here:
        raise UsageError(
            "cluster detect: neither Slurm (sinfo) nor PBS (pbsnodes) is on PATH; run it on a login node of the "
            "cluster, or write a profile by hand: see docs/clusters.md"
        )
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
    """Those on PATH that start processes as part of a job."""
    return [name for name in STARTERS if which(name) and (name != "mpiexec" or not why_not_mpiexec(run, which))]


def why_not_mpiexec(run: Run, which: Which) -> str:
    """Why the mpiexec on PATH cannot start agents; "" if it can. One that was not built for PBS logs in to the nodes of
    a job with ssh, if it knows them at all, and PBS does not see its processes.
    """
    path = which("mpiexec") or ""
    if Path(path).is_relative_to(sys.prefix):
        return f"{path} belongs to this Python environment and not to the site"
    try:
        said = run([path, "--version"])
        if "HYDRA" in said:
            is_built = re.search(r"^ *Launchers available:.*\bpbs\b", said, re.MULTILINE)
        elif any(name in said for name in ("Open MPI", "OpenRTE", "PRRTE")):
            is_built = re.search(r"\b(plm|ras): tm\b", run([str(Path(path).with_name("ompi_info"))]))
        else:
            return ""  # such as a vendor's for this very machine
    except CommandError as error:
        return str(error)
    return "" if is_built else f"{path} was not built for PBS"


def to_yaml(site: Site, name: str) -> str:
    """A profile called `name` with all that was found, commented, for a person to complete."""
    return "".join(f"{line}\n" for line in _lines(site, name))


def _lines(site: Site, name: str) -> Iterator[str]:
    usual = site.usual
    yield f"# Written by `hpc-det cluster detect`, which asked {site.version}. Check it, and complete it."
    yield f"name: {_value(name)}"
    yield f"scheduler: {site.scheduler}"
    yield ""
    yield f"# Nodes: as in {usual.name!r}, {'the default pool' if usual.default else 'the first pool'}."
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
    yield "# What each pool has of its own. `default` is where jobs go that name none."
    yield "pools:"
    for pool in site.pools:
        yield from _pool(pool)
    yield ""
    yield "containers:"
    yield f"  runtime: {_value(site.runtime)}  # apptainer, podman or pyxis, for experiments that name an image"
    yield ""
    yield "# What no scheduler tells:"
    yield "# account: physics            # who pays"
    yield '# time_limit: "04:00:00"      # where an experiment sets none'
    yield "# scratch: /scratch/$USER     # a folder of each node's own, for $TMPDIR"
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
    """JSON is YAML, and quotes keep a text such as 1:30:00 or `on` a text."""
    return json.dumps(value, ensure_ascii=False)
