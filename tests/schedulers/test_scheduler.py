"""The contract of every scheduler, tested with each."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from socket import gethostname

import pytest

from hpc_det.plan.job_plan import JobArray
from hpc_det.resources import data_path
from hpc_det.schedulers.scheduler import Scheduler, run_command, scheduler
from hpc_det.submit.render import agent_command, render
from tests.plan.plans import job_plan
from tests.schedulers.one_job import submission
from tests.schedulers.slurm.squeue_on_paper import KNOWS_NONE
from tests.stub import Stub

NAMES = ["slurm", "pbs", "local"]
JOB_ENVIRONMENT = {
    "SLURM_JOB_ID": "4711",
    "SLURM_NODEID": "0",
    "PBS_JOBID": "4711.pbshead",
    "HPC_DET_NODE_RANK": "0",
}
ONE_JOB, SCRIPT = JobArray(first=0, count=1), Path("/home/ada/hpc_det/experiments/12/jobs/1.sh")

pytestmark = pytest.mark.parametrize("name", NAMES)


@pytest.fixture
def chosen(name: str) -> Scheduler:
    return scheduler(name)


def test_its_template_exists(chosen: Scheduler) -> None:
    assert (data_path("slurm_templates") / chosen.template).is_file()


def test_its_script_starts_the_job_with_the_command_for_agents(name: str) -> None:
    plan = job_plan(scheduler=name)
    command = render(plan, ONE_JOB, SCRIPT).rpartition("exec ")[2].replace("\\\n", "")
    job, start_agents = command.split(" -- ")
    assert shlex.split(job) == [plan.python, "-m", "hpc_det.launch.job", plan.folder, "1"]
    assert start_agents.strip().endswith(agent_command(plan))


def test_the_same_plan_gives_the_same_script(name: str) -> None:
    first, again = (render(job_plan(scheduler=name), ONE_JOB, SCRIPT) for _ in range(2))
    assert first == again


@pytest.mark.integration
def test_the_script_is_submitted_as_it_is_called(chosen: Scheduler, stub: Stub) -> None:
    stub("qstat", "echo pbs_version = 23.06.06")
    assert chosen.submit_command(submission("/a b/job.sh"))[-1] == "/a b/job.sh"


def test_an_answer_that_holds_no_job_id_is_a_value_error(chosen: Scheduler) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  any words will do
        chosen.parse_submit("error: no")


def test_the_job_knows_itself_by_the_id_that_submission_gave(chosen: Scheduler) -> None:
    job_id = chosen.job_id(JOB_ENVIRONMENT)
    assert chosen.parse_submit(f"{job_id}\n") == job_id


def test_node_0_is_the_first_node(chosen: Scheduler) -> None:
    assert chosen.node_rank(JOB_ENVIRONMENT) == 0


@pytest.mark.integration
def test_status_answers_for_every_job_that_it_was_asked_for(chosen: Scheduler, stub: Stub) -> None:
    stub("squeue", KNOWS_NONE)
    stub("qstat", "echo 'qstat: Unknown Job Id 7' >&2; echo 'qstat: Unknown Job Id 8' >&2; exit 153")
    gone = subprocess.Popen(["true"])
    gone.wait()
    job_ids = (
        [f"{gone.pid}-1@{gethostname()}", f"{os.getpid()}-1@{gethostname()}"] if not chosen.has_queue else ["7", "8"]
    )
    found = chosen.status(job_ids, run_command)
    assert [found[job_id].state.value for job_id in job_ids] == ["ended", "ended"]


@pytest.mark.integration
def test_its_module_is_imported_on_use_and_needs_no_heavy_library(name: str) -> None:
    code = f"import sys; from hpc_det.schedulers.scheduler import scheduler; scheduler({name!r}); print(*sys.modules)"
    loaded = set(subprocess.check_output([sys.executable, "-c", code], text=True).split())
    assert not loaded & {"jinja2", "pydantic", "submitit", "torch", "numpy", "yaml", "hydra"}
