"""Which scheduler this machine has, and what it says."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from hpc_det.errors import UsageError
from hpc_det.schedulers.pbs import detect as pbs
from hpc_det.schedulers.scheduler import CommandError, Run
from hpc_det.schedulers.site import Site
from hpc_det.schedulers.slurm import detect as slurm

Which = Callable[[str], str | None]
"""Where a command lies on PATH; None for nowhere."""

STARTERS = ("pbsdsh", "pbs_tmrsh", "mpiexec")
"""What can start a process on every node of a PBS job, the best first."""
_COMMANDS = {"slurm": "sinfo", "pbs": "pbsnodes"}


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
            return slurm.detect(run) if kind == "slurm" else pbs.detect(run)
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
