"""The effect of containers and pools on a plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_det.config.cluster import Cluster
from hpc_det.config.schema import Experiment
from hpc_det.errors import UsageError
from hpc_det.plan.job_plan import Container, Device, JobPlan, Mount
from hpc_det.plan.planner import placement, plan_jobs
from hpc_det.plan.pool import in_its_pool, pool_problems
from hpc_det.store.folders import ExperimentFolder
from tests.facts import refused, unnamed
from tests.plan.sites import cluster, experiment

FOLDER = "/state/experiments/12"


def plan(experiment: Experiment, cluster: Cluster, folder: str = FOLDER) -> JobPlan:
    there = in_its_pool(experiment, cluster)
    place = placement(experiment, there, trials=1)
    return plan_jobs(experiment, there, ExperimentFolder(Path(folder)), place, python="/opt/venv/bin/python")


def test_an_image_makes_a_container_with_all_that_it_is_to_see() -> None:
    asked = experiment(
        environment={"image": {"cuda": "site/cuda:1", "cpu": "site/cpu:1"}},
        bind_mounts=[
            {"host_path": "/data", "container_path": "/data", "read_only": True},
            {"host_path": "/models", "container_path": "models", "propagation": "rshared"},
        ],
        resources={"shm_size": "1 GiB", "devices": ["/dev/infiniband:/dev/infiniband:rw"]},
        checkpoint_storage={"type": "shared_fs", "host_path": "/checkpoints"},
    )
    site = cluster(containers={"runtime": "podman", "args": ["--pull=never"]}, scratch="/scratch/$USER")
    found = plan(asked, site)
    assert found.container == Container(
        runtime="podman",
        image="site/cuda:1",
        mounts=(
            Mount(source="/checkpoints", target="/checkpoints", read_only=False, propagation="rprivate"),
            Mount(source="/data", target="/data", read_only=True, propagation="rprivate"),
            Mount(
                source="/models",
                target="/state/experiments/12/code/models",
                read_only=False,
                propagation="rshared",
            ),
        ),
        devices=(Device(source="/dev/infiniband", target="/dev/infiniband", mode="rw"),),
        shm_size=2**30,
        args=("--pull=never",),
    )
    assert found.scratch == "/scratch/$USER"
    assert found.entrypoint[0] == "python3"  # the python3 of the image
    assert JobPlan.from_json(found.to_json()) == found


def test_without_an_image_for_these_slots_there_is_no_container() -> None:
    site = cluster(containers={"runtime": "podman"})
    assert plan(experiment(), site).container is None
    assert plan(experiment(environment={"image": {"cpu": "site/cpu:1"}}), site).container is None


def test_a_state_folder_that_cannot_be_mounted_is_refused() -> None:
    site = cluster(containers={"runtime": "podman"})
    with refused(UsageError, "HPC_DET_ROOT", "'/a:b/experiments/12'", "':'"):
        plan(experiment(environment={"image": "a"}), site, "/a:b/experiments/12")


def test_the_pool_gives_the_nodes() -> None:
    site = cluster(pools={"low": {"slots_per_node": 8, "gpu_type": "h100", "cpus_per_slot": 6}})
    found = plan(experiment(resources={"slots_per_trial": 16, "resource_pool": "low"}), site)
    assert (found.nodes, found.ranks_per_node, found.gpu_type, found.cpus_per_rank) == (2, 8, "h100", 6)


IN_RESULTS = {"type": "directory", "container_path": "/results/a"}


def test_a_directory_for_checkpoints_is_mounted_at_its_own_path_too() -> None:
    mount = {"host_path": "/scratch/me", "container_path": "/results"}
    asked = experiment(environment={"image": "site/cuda:1"}, bind_mounts=[mount], checkpoint_storage=IN_RESULTS)
    found = plan(asked, cluster(containers={"runtime": "podman"})).container
    assert found is not None
    assert [(mount.source, mount.target) for mount in found.mounts] == [
        ("/scratch/me/a", "/scratch/me/a"),
        ("/scratch/me", "/results"),
    ]


@pytest.mark.parametrize("mounts", [[], [{"host_path": "/s", "container_path": "/results", "read_only": True}]])
def test_a_directory_that_goes_with_the_container_is_refused(mounts: list[dict[str, object]]) -> None:
    asked = experiment(environment={"image": "site/cuda:1"}, bind_mounts=mounts, checkpoint_storage=IN_RESULTS)
    (problem,) = pool_problems(asked, cluster(containers={"runtime": "podman"}))
    assert not unnamed(problem, "checkpoint_storage.container_path", "'/results/a'", "bind_mounts")
