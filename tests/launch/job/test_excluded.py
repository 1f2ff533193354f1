"""The list of nodes that jobs keep away from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_det.launch.job.excluded import Exclusions, excluded_hosts, excluded_nodes
from hpc_det.node.json_files import write_json
from hpc_det.store.attempt import Failure, failure_now, note_failure
from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.folders import ExperimentFolder
from tests.plan.plans import job_plan


@pytest.fixture
def experiment(tmp_path: Path) -> ExperimentFolder:
    return on_cluster(tmp_path, 1, "alpha")


def on_cluster(root: Path, number: int, cluster: str) -> ExperimentFolder:
    experiment = ExperimentStore(root).folder(number)
    experiment.trial().path.mkdir(parents=True)
    write_json(experiment.cluster, {"name": cluster})
    return experiment


def exclusions(experiment: ExperimentFolder, **plan: Any) -> Exclusions:
    return Exclusions(experiment.trial(), job_plan(**plan))


def ill(host: str) -> Failure:
    return Failure(rank=None, host=host, time=1.0, message="2 of 4 GPUs", unhealthy=True)


def test_an_ill_node_is_excluded_for_all_experiments_of_its_cluster(
    experiment: ExperimentFolder, tmp_path: Path
) -> None:
    for failure in (ill("node3"), failure_now(4, "collateral")):
        note_failure(experiment.trial(), 1, failure)
    exclusions(experiment, nodes=4).of_ill_nodes(1)
    (node,) = excluded_nodes(experiment)
    assert (node.host, node.why, node.until - node.since) == ("node3", "2 of 4 GPUs", 24 * 3600)
    assert excluded_hosts(on_cluster(tmp_path, 2, "alpha")) == ("node3",)
    assert excluded_hosts(on_cluster(tmp_path, 3, "beta")) == ()


def test_what_most_of_a_gang_complains_of_is_no_matter_of_single_nodes(experiment: ExperimentFolder) -> None:
    for host in ("node1", "node2", "node3"):
        note_failure(experiment.trial(), 1, ill(host))
    exclusions(experiment, nodes=4).of_ill_nodes(1)
    assert excluded_hosts(experiment) == ()


def test_the_only_node_of_a_gang_may_be_ill(experiment: ExperimentFolder) -> None:
    note_failure(experiment.trial(), 1, ill("node1"))
    exclusions(experiment, nodes=1).of_ill_nodes(1)
    assert excluded_hosts(experiment) == ("node1",)


def test_an_exclusion_ends(experiment: ExperimentFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    note_failure(experiment.trial(), 1, ill("node1"))
    monkeypatch.setattr("time.time", lambda: 1000.0)
    exclusions(experiment, nodes=1, exclude_nodes_for_min=1).of_ill_nodes(1)
    monkeypatch.setattr("time.time", lambda: 1059.0)
    assert excluded_hosts(experiment) == ("node1",)
    monkeypatch.setattr("time.time", lambda: 1061.0)
    assert excluded_hosts(experiment) == ()
    monkeypatch.setattr("time.time", lambda: 1059.0)
    assert excluded_hosts(experiment) == ()


def test_no_time_is_no_exclusion(experiment: ExperimentFolder) -> None:
    note_failure(experiment.trial(), 1, ill("node1"))
    exclusions(experiment, nodes=1, exclude_nodes_for_min=0).of_ill_nodes(1)
    assert excluded_hosts(experiment) == ()


@pytest.mark.parametrize(("log", "excluded"), [("rank-5.log", ("node2",)), ("job.log", ()), ("rank-9.log", ())])
def test_a_log_names_the_node_of_its_rank_for_this_experiment_alone(
    experiment: ExperimentFolder, tmp_path: Path, log: str, excluded: tuple[str, ...]
) -> None:
    nodes = experiment.trial().nodes(1)
    nodes.parent.mkdir()
    write_json(nodes, ["node1", "node2"])
    exclusions(experiment, nodes=2, ranks_per_node=4).of_node_with_log(1, experiment.trial().logs / log, "ECC")
    assert excluded_hosts(experiment) == excluded
    assert excluded_hosts(on_cluster(tmp_path, 2, "alpha")) == ()
