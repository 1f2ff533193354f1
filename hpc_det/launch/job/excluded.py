"""The nodes that jobs keep away from for a while: a small file for each, written by whoever saw the node fail.

ROOT/excluded/CLUSTER/HOST.json             it was lost, or failed its checks: for all experiments there
ROOT/experiments/12/excluded/HOST.json      a log policy of this experiment named it: for this one alone
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import quote

from hpc_det.node.files import make_private
from hpc_det.node.json_files import DamagedFile, made, read_json, read_map, write_json
from hpc_det.plan.job_plan import JobPlan
from hpc_det.store.attempt import failures
from hpc_det.store.folders import ExperimentFolder, TrialFolder


@dataclass(frozen=True, kw_only=True)
class ExcludedNode:
    host: str
    """As the scheduler calls it."""
    why: str
    since: float
    until: float
    """Seconds since the epoch."""


def excluded_nodes(experiment: ExperimentFolder) -> list[ExcludedNode]:
    """Those that a job of `experiment` keeps away from now, by host. What has expired is removed."""
    nodes = {node.host: node for folder in _folders(experiment) for node in _standing(folder)}
    return [nodes[host] for host in sorted(nodes)]


def excluded_hosts(experiment: ExperimentFolder) -> tuple[str, ...]:
    """For `Submission.exclude`."""
    return tuple(node.host for node in excluded_nodes(experiment))


class Exclusions:
    """What the end of an attempt excludes, for as long as the plan says."""

    def __init__(self, trial: TrialFolder, plan: JobPlan) -> None:
        self._trial = trial
        self._experiment = trial.experiment()
        self._plan = plan

    def of_ill_nodes(self, attempt: int) -> None:
        """For all jobs on the cluster: the nodes that failed their checks, or were lost.

        What more than half of a gang complains of is no matter of single nodes, and nobody is excluded for it.
        """
        found = failures(self._trial, attempt)
        ill = {failure.host: failure.message for failure in found if failure.unhealthy or failure.node_lost}
        if self._plan.nodes == 1 or len(ill) <= self._plan.nodes / 2:
            for host, why in ill.items():
                self._exclude(_of_cluster(self._experiment), host, why)

    def of_node_with_log(self, attempt: int, log: Path, why: str) -> None:
        """For this experiment: the node of the rank whose log this is. Other logs are of no single node."""
        rank = log.stem.removeprefix("rank-")
        hosts = read_json(self._trial.nodes(attempt)) or []
        if rank.isdecimal() and int(rank) < len(hosts) * self._plan.ranks_per_node:
            self._exclude(_of_experiment(self._experiment), hosts[int(rank) // self._plan.ranks_per_node], why)

    def _exclude(self, folder: Path, host: str, why: str) -> None:
        if self._plan.exclude_nodes_for_min:
            make_private(folder)
            now = time.time()
            node = ExcludedNode(host=host, why=why, since=now, until=now + 60 * self._plan.exclude_nodes_for_min)
            write_json(folder / f"{quote(host, safe='')}.json", asdict(node))


def _folders(experiment: ExperimentFolder) -> tuple[Path, Path]:
    return _of_cluster(experiment), _of_experiment(experiment)


def _of_cluster(experiment: ExperimentFolder) -> Path:
    """Clusters may share a home folder, and refuse each other's host names."""
    profile = read_map(experiment.cluster) or {}
    return experiment.root() / "excluded" / quote(profile.get("name", "unnamed"), safe="")


def _of_experiment(experiment: ExperimentFolder) -> Path:
    return experiment.path / "excluded"


def _standing(folder: Path) -> Iterator[ExcludedNode]:
    for path in sorted(folder.glob("*.json")):
        try:
            data = read_json(path)
            node = made(ExcludedNode, data, path) if data else None
        except DamagedFile:  # no reason to start no job
            continue
        if node is None:  # removed by another just now
            continue
        if node.until > time.time():
            yield node
        else:  # one that was renewed just now is forgotten with it, at the price of one more failed check
            path.unlink(missing_ok=True)
