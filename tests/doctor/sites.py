"""Recorded sites, some with other settings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hpc_det.config.cluster import Cluster
from hpc_det.config.cluster_choice import Which
from hpc_det.doctor import Finding
from hpc_det.schedulers.pbs import detect as pbs
from hpc_det.schedulers.scheduler import CommandError, Run
from hpc_det.schedulers.slurm import detect as slurm
from tests.facts import unnamed
from tests.schedulers.recorded_sites import PBS, SLURM, replay, said

LAB, ATLAS = "slurm-22.05", "slurm-24.05"


def slurm_site(folder: str, srun: str = "", sbatch: str | None = "", **config: str) -> Run:
    """Return a recorded Slurm site with these settings in slurm.conf; if `sbatch` is None, it accepts no job."""
    recorded = replay(folder, SLURM, srun=srun)
    settings = "".join(f"{name} = {value}\n" for name, value in config.items())

    def run(command: Sequence[str]) -> str:
        if command[0] == "sbatch":
            if sbatch is None:
                raise CommandError("sbatch: refused with exit code 1: allocation failure: Invalid account")
            return sbatch
        return recorded(command) + (settings if tuple(command) == slurm.CONFIG else "")

    return run


def pbs_site(sched: str | None = None, **server: Any) -> Run:
    """Return a recorded PBS site with these server attributes (None: not set) and this answer to `list sched`."""
    recorded = replay("pbs-23.06", PBS)
    attributes = json.loads(said("pbs-23.06", "server.json"))
    (own,) = attributes["Server"].values()
    own.update(server)
    for name in [name for name, value in own.items() if value is None]:
        del own[name]

    def run(command: Sequence[str]) -> str:
        match tuple(command):
            case ("qstat", "--version"):
                return "pbs_version = 23.06.06\n"
            case pbs.SERVER:
                return json.dumps(attributes)
            case pbs.SCHEDULER if sched is not None:
                return sched
        return recorded(command)

    return run


def on_path(*names: str) -> Which:
    return lambda name: f"/usr/bin/{name}" if name in names else None


def everything(name: str) -> str:
    return f"/usr/bin/{name}"


def cluster(**keys: Any) -> Cluster:
    usual: Mapping[str, Any] = {"name": "lab", "scheduler": "slurm", "slots_per_node": 2, "slot_type": "gpu"}
    return Cluster.model_validate({**usual, **keys})


def one(findings: Iterable[Finding], *facts: object) -> Finding:
    """Return the only one whose message names each of `facts`."""
    all_of_them = list(findings)
    found = [finding for finding in all_of_them if not unnamed(finding.message, *facts)]
    assert len(found) == 1, (facts, all_of_them)
    return found[0]


def verdicts(findings: Iterable[Finding]) -> list[str]:
    return [finding.verdict for finding in findings]
