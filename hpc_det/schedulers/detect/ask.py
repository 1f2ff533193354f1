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


def ask(run: Run, which: Which) -> Site:
    """Raises UsageError where there is no scheduler, and CommandError where it does not answer.

    Slurm comes first: it may bring commands with the names of PBS' own (its contribs/torque), which speak no JSON.
    Where PBS runs, there may be those of a Slurm that does not, so one that does not answer is not the last word.
    """
    asked = [detect for command, detect in (("sinfo", slurm.detect), ("pbsnodes", pbs.detect)) if which(command)]
    if not asked:
        raise UsageError(
            "cluster detect: neither Slurm (sinfo) nor PBS (pbsnodes) is on PATH; run it on a login node of the "
            "cluster, or write a profile by hand: see docs/clusters.md"
        )
    site = _first_answer(asked, run)
    if site.scheduler == "pbs":
        site = replace(site, start_agents_with=next(filter(which, STARTERS), None))
    found = next((runtime for runtime in ("apptainer", "podman") if which(runtime)), None)
    return site if site.runtime else replace(site, runtime=found)


def _first_answer(asked: Sequence[Callable[[Run], Site]], run: Run) -> Site:
    refusals: list[str] = []
    for detect in asked:
        try:
            return detect(run)
        except CommandError as error:
            refusals.append(str(error))
    raise CommandError("\n".join(refusals))
