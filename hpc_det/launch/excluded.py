"""The nodes that jobs keep away from for a while: a small file for each, written by whoever saw the node fail.

ROOT/excluded/CLUSTER/HOST.json             it failed its checks: for all experiments of the user there
ROOT/experiments/12/excluded/HOST.json      a log policy of this experiment named it: for this one alone
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import quote

from hpc_det.launch.failure import Failure
from hpc_det.store.files import make_private, read_json, write_json
from hpc_det.store.folders import ExperimentFolder


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


def exclude_ill_nodes(
    experiment: ExperimentFolder, failures: Iterable[Failure], nodes: int, minutes: int
) -> tuple[str, ...]:
    """Keep all jobs away from the nodes that failed their checks in one attempt of a gang of `nodes`; their hosts.

    What more than half of a gang complains of is no matter of single nodes, and nobody is excluded for it.
    """
    ill = {failure.host: failure for failure in failures if failure.unhealthy}
    if nodes > 1 and len(ill) > nodes / 2:
        return ()
    for host, failure in ill.items():
        _exclude(_of_cluster(experiment), host, failure.message, minutes)
    return tuple(ill) if minutes else ()


def exclude_for_experiment(experiment: ExperimentFolder, host: str, why: str, minutes: int) -> None:
    """Keep the jobs of this experiment away from `host`."""
    _exclude(_of_experiment(experiment), host, why, minutes)


def _exclude(folder: Path, host: str, why: str, minutes: int) -> None:
    if minutes:
        make_private(folder)
        now = time.time()
        node = ExcludedNode(host=host, why=why, since=now, until=now + 60 * minutes)
        write_json(folder / f"{quote(host, safe='')}.json", asdict(node))


def _folders(experiment: ExperimentFolder) -> tuple[Path, Path]:
    return _of_cluster(experiment), _of_experiment(experiment)


def _of_cluster(experiment: ExperimentFolder) -> Path:
    """Clusters may share a home folder, and refuse each other's host names."""
    profile = read_json(experiment.cluster) or {}
    return experiment.store().root / "excluded" / quote(profile.get("name", "unnamed"), safe="")


def _of_experiment(experiment: ExperimentFolder) -> Path:
    return experiment.path / "excluded"


def _standing(folder: Path) -> Iterator[ExcludedNode]:
    for path in sorted(folder.glob("*.json")):
        data = read_json(path)
        if data is None:  # removed by another just now
            continue
        node = ExcludedNode(**data)
        if node.until > time.time():
            yield node
        else:  # one that was renewed just now is forgotten with it, at the price of one more failed check
            path.unlink(missing_ok=True)
