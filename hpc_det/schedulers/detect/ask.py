"""Which scheduler this machine has, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
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
    return "slurm" if which("sinfo") else "pbs" if which("pbsnodes") else None


def ask(run: Run, which: Which) -> Site:
    """Raises UsageError where there is no scheduler, and CommandError where it does not answer."""
    kind = scheduler_here(which)
    if kind is None:
        raise UsageError(
            "cluster detect: neither Slurm (sinfo) nor PBS (pbsnodes) is on PATH; run it on a login node of the "
            "cluster, or write a profile by hand: see docs/clusters.md"
        )
    site = _slurm(run, which) if kind == "slurm" else _pbs(run, which)
    found = next((runtime for runtime in ("apptainer", "podman") if which(runtime)), None)
    return site if site.runtime else replace(site, runtime=found)


def _slurm(run: Run, which: Which) -> Site:
    """Its commands may lie on machines that have no Slurm, but PBS."""
    try:
        return slurm.detect(run)
    except CommandError:
        with suppress(CommandError):
            if which("pbsnodes"):
                return _pbs(run, which)
        raise


def _pbs(run: Run, which: Which) -> Site:
    return replace(pbs.detect(run), start_agents_with=next(filter(which, STARTERS), None))
