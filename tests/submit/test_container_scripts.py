"""Whole scripts of jobs with containers. Golden files are changed by hand, after a look at the difference."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_det.plan.container import PACKAGE
from hpc_det.plan.job_plan import Container, Device, JobArray, JobPlan, Mount
from hpc_det.submit.render import render
from tests.plan.plans import job_plan

GOLDEN = Path(__file__).parents[1] / "golden_containers"
CONTAINER = Container(
    runtime="pyxis",
    image="nvcr.io/nvidia/pytorch:26.01-py3",
    mounts=(Mount(source="/data/my digits", target="/digits", read_only=True, propagation="rprivate"),),
    devices=(Device(source="/dev/infiniband", target="/dev/infiniband", mode="mrw"),),
    shm_size=2**32,
    args=(),
)
ONE = JobArray(first=0, count=1)
PLANS = {
    "slurm_apptainer.sh": (job_plan(container=replace(CONTAINER, runtime="apptainer")), ONE),
    "slurm_podman.sh": (job_plan(container=replace(CONTAINER, runtime="podman")), ONE),
    "slurm_pyxis.sh": (
        job_plan(
            container=replace(CONTAINER, args=("--container-remap-root",)),
            scratch="/scratch/$SLURM_JOB_ID",
            srun_args=("--mpi=pmix",),
        ),
        ONE,
    ),
    "slurm_pyxis_shared.sh": (
        job_plan(container=CONTAINER, nodes=1, ranks_per_node=2, job_nodes=1, job_slots_per_node=4),
        JobArray(first=0, count=1, workers_each=2),
    ),
    "pbs_apptainer.sh": (
        job_plan(scheduler="pbs", container=replace(CONTAINER, runtime="apptainer"), scratch="/scratch/$PBS_JOBID"),
        ONE,
    ),
    "local_podman.sh": (
        job_plan(
            scheduler="local",
            slot_type="cpu",
            nodes=1,
            job_nodes=1,
            container=replace(CONTAINER, runtime="podman", devices=()),
        ),
        ONE,
    ),
}


def script(plan: JobPlan, array: JobArray) -> str:
    """Return the script, with a fixed path instead of the package's, which differs between machines."""
    return render(plan, array, Path(plan.folder, "jobs", "1.sh")).replace(PACKAGE, "/PACKAGE")


@pytest.mark.parametrize("name", PLANS)
def test_script(name: str) -> None:
    assert script(*PLANS[name]) == (GOLDEN / name).read_text(encoding="utf-8")


def test_every_golden_is_compared() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == set(PLANS)


@pytest.mark.integration
@pytest.mark.parametrize("name", PLANS)
def test_the_shell_can_read_the_script(name: str) -> None:
    subprocess.run(["bash", "-n"], input=script(*PLANS[name]), text=True, check=True)


@pytest.mark.parametrize("runtime", ["apptainer", "podman"])
def test_a_container_that_the_agent_starts_is_no_news_for_the_script(runtime: str) -> None:
    with_one = job_plan(container=replace(CONTAINER, runtime=runtime))
    assert script(with_one, ONE) == script(job_plan(), ONE)
