"""Which scheduler this machine has, and what it says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from hpc_det.errors import UsageError
from hpc_det.schedulers.command import CommandError, Run
from hpc_det.schedulers.detect import pbs, slurm
from hpc_det.schedulers.detect.site import Site

Which = Callable[[str], str | None]
"""Where a command lies on PATH; None for nowhere."""

STARTERS = ("pbsdsh", "pbs_tmrsh", "mpiexec")
"""What can start a process on every node of a PBS job, the best first."""


def scheduler_here(which: Which) -> str | None:
    """slurm, pbs or None. Slurm comes first: it may bring commands named as PBS' own, which speak no JSON."""
    return next(iter(schedulers_here(which)), None)


def schedulers_here(which: Which) -> list[str]:
    """Those whose commands are there, the likelier first; one may be there that does not run."""
    return [kind for kind, command in (("slurm", "sinfo"), ("pbs", "pbsnodes")) if which(command)]


def ask(run: Run, which: Which) -> Site:
    """Raises UsageError where there is no scheduler, and CommandError where none answers.

    Where PBS runs, there may be the commands of a Slurm that does not.
    """
    here = schedulers_here(which)
    if not here:
        raise UsageError(
            "cluster detect: neither Slurm (sinfo) nor PBS (pbsnodes) is on PATH; run it on a login node of the "
            "cluster, or write a profile by hand: see docs/clusters.md"
        )
    site = _first_answer(here, run)
    if site.scheduler == "pbs":
        site = replace(site, start_agents_with=next(filter(which, STARTERS), None))
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
