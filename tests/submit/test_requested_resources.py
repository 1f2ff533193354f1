"""The resources that an experiment requests, as the schedulers report them of its jobs."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from hpc_det.plan.job_plan import JobArray, JobPlan
from hpc_det.store.folders import ExperimentFolder
from hpc_det.submit.render import render
from tests.facts import refused
from tests.labs.pbs_lab import PbsLab
from tests.labs.slurm import SlurmLab
from tests.plan.plans import job_plan

ONE_JOB, THREE_JOBS = JobArray(first=0, count=1), JobArray(first=0, count=3)


def script(home: Path, array: JobArray, **requests: Any) -> tuple[Path, str]:
    """Return the path and the text of a job script for one node with these requests, whose jobs do nothing."""
    experiment = ExperimentFolder(home / "experiments" / "12")
    experiment.jobs.mkdir(parents=True)
    shape = {"nodes": 1, "ranks_per_node": 1, "job_nodes": 1, "job_slots_per_node": 1, "slot_type": "cpu"}
    plan: JobPlan = job_plan(**shape, folder=str(experiment.path), python="/bin/true", cpus_per_rank=2, **requests)
    text = render(plan, array, experiment.script())
    experiment.script().write_text(text)
    return experiment.script(), text


@pytest.mark.integration
def test_pbs_reports_every_request(pbs_lab: PbsLab) -> None:
    requests = {"account": "bio", "mem_per_node": "3G", "constraint": "arch=linux", "time_limit_min": 90}
    _path, text = script(pbs_lab.home, ONE_JOB, scheduler="pbs", **requests)
    job = pbs_lab.job(pbs_lab.submit(script=text))
    assert job["Account_Name"] == "bio"
    wanted = job["Resource_List"]
    assert wanted["select"] == "1:ncpus=2:mpiprocs=1:ompthreads=2:mem=3gb:arch=linux"
    assert wanted["walltime"] == "01:30:00"


@pytest.mark.integration
@pytest.mark.parametrize(
    ("requests", "resource"),
    [({"constraint": "nvlink"}, "nvlink"), ({"qos": "high", "qos_resource": "qos"}, "Resource_List.qos")],
)
def test_pbs_refuses_a_resource_that_the_site_does_not_define(
    requests: dict[str, str], resource: str, pbs_lab: PbsLab
) -> None:
    _path, text = script(pbs_lab.home, ONE_JOB, scheduler="pbs", **requests)
    with refused(RuntimeError, f"Unknown resource{':' if '.' not in resource else ''} {resource}"):
        pbs_lab.submit(script=text)


# --- Slurm


@pytest.fixture
def accounts(slurm_lab: SlurmLab) -> Iterator[SlurmLab]:
    """Return the lab with an account, a quality of service and a feature of node2."""
    user = pwd.getpwuid(os.geteuid()).pw_name
    things = [
        ("qos", "hpcdethigh"),
        ("account", "hpcdetbio", "QOS=normal,hpcdethigh"),
        ("user", user, "account=hpcdetbio"),
    ]
    with ExitStack() as stack:
        for kind, name, *settings in things:
            slurm_lab.run("sacctmgr", "-i", "add", kind, name, *settings)
            only = ["account=hpcdetbio"] if kind == "user" else []
            stack.callback(slurm_lab.run, "sacctmgr", "-i", "delete", kind, f"name={name}", *only)
        feature = ["AvailableFeatures={}", "ActiveFeatures={}"]
        slurm_lab.run("scontrol", "update", "NodeName=node2", *(each.format("nvlink") for each in feature))
        stack.callback(slurm_lab.run, "scontrol", "update", "NodeName=node2", *(each.format("") for each in feature))
        stack.callback(slurm_lab.cancel_all)  # an account with jobs cannot be deleted
        yield slurm_lab


REQUESTS = {
    "account": "hpcdetbio",
    "qos": "hpcdethigh",
    "constraint": "nvlink",
    "mem_per_node": "300M",
    "time_limit_min": 7,
}
REPORTED = {
    "Account": "hpcdetbio",
    "QOS": "hpcdethigh",
    "Features": "nvlink",
    "MinMemoryNode": "300M",
    "TimeLimit": "00:07:00",
    "CPUs/Task": "2",
}


@pytest.mark.slurm
@pytest.mark.parametrize("array", [ONE_JOB, THREE_JOBS], ids=["one job", "an array"])
def test_slurm_reports_every_request_also_after_a_requeue(accounts: SlurmLab, array: JobArray) -> None:
    path, _text = script(accounts.folder(), array, **REQUESTS)
    job_id = accounts.run("sbatch", "--parsable", "--hold", path).strip()
    element = f"{job_id}_1" if array.count > 1 else job_id
    assert {key: accounts.job(element)[key] for key in REPORTED} == REPORTED
    accounts.run("scontrol", "release", job_id)
    assert accounts.wait_for_state(element, "COMPLETED")["NodeList"] == "node2"
    accounts.run("scontrol", "requeue", element)
    assert {key: accounts.job(element)[key] for key in REPORTED} == REPORTED
