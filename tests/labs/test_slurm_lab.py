"""The lab behaves as a Slurm site does: the assumptions of the end-to-end tests, measured on a real Slurm."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import pytest

from tests.labs.slurm import SCRIPTS, SlurmLab, parse_fields
from tests.machine import slowness
from tests.wait import wait_for

slurm = pytest.mark.slurm

STEP = """#!/bin/bash
trap 'date +"step-TERM %s" >>signals; ((++terms == 2)) && exit' TERM
date +"step-start %s" >>signals
while :; do sleep 0.1; done
"""

PREEMPTIBLE = """#!/bin/bash
#SBATCH --partition=low --nodes=3 --ntasks-per-node=1 --gpus-per-node=1 --output=job.log
trap 'date +"batch-TERM %s" >>signals; exit' TERM
srun bash step.sh &
while :; do wait; done
"""

REQUEUES_ITSELF = """#!/bin/bash
#SBATCH --partition=low --output=job.log --open-mode=append
echo "run ${SLURM_RESTART_COUNT:-0}"
[[ ${SLURM_RESTART_COUNT:-0} == 1 ]] || { scontrol requeue $SLURM_JOB_ID && sleep 60; }
"""


GRACE_S = 30
"""The GraceTime that `slurm-up` sets for the partition `low`."""


def submit(lab: SlurmLab, folder: Path, script: str) -> str:
    (folder / "job.sh").write_text(script)
    return lab.run("sbatch", "--parsable", "job.sh", cwd=folder).strip()


def signal_times(folder: Path, event: str) -> list[int]:
    """Return the seconds at which the scripts in this folder logged this event."""
    notes = folder / "signals"
    lines = notes.read_text().splitlines() if notes.exists() else []
    return [int(line.split()[1]) for line in lines if line.startswith(event)]


def test_fields_of_a_job_may_hold_blanks_and_equals_signs() -> None:
    assert parse_fields("JobId=2 JobName=a b=c UserId=root(0) ReqB:S:C:T=0:0:*:* TRES=cpu=3,node=3 Power=\n") == {
        "JobId": "2",
        "JobName": "a b=c",
        "UserId": "root(0)",
        "ReqB:S:C:T": "0:0:*:*",
        "TRES": "cpu=3,node=3",
        "Power": "",
    }


@slurm
def test_a_second_start_leaves_the_running_lab_as_it_is(slurm_lab: SlurmLab) -> None:
    controller = slurm_lab.conf.parent.parent / "run" / "slurmctld.pid"
    before = controller.read_text()
    assert SlurmLab.start() == slurm_lab
    assert controller.read_text() == before


@slurm
def test_each_node_has_its_own_name_address_and_tmp(slurm_lab: SlurmLab) -> None:
    folder = slurm_lab.folder()
    command = "touch /tmp/of-$(hostname); echo $(hostname) $(hostname -I) $(cd /tmp; echo of-*) >$SLURM_PROCID"
    slurm_lab.run("srun", "--nodes=3", "bash", "-c", command, cwd=folder)
    assert sorted(path.read_text() for path in folder.iterdir()) == [
        "node1 10.66.0.11 of-node1\n",
        "node2 10.66.0.12 of-node2\n",
        "node3 10.66.0.13 of-node3\n",
    ]
    assert not Path("/tmp/of-node1").exists()


@slurm
def test_every_node_sees_the_checkout_and_the_python_of_the_tests(slurm_lab: SlurmLab) -> None:
    found = slurm_lab.run("srun", "--nodes=3", "ls", "-d", str(SCRIPTS), sys.executable, cwd=slurm_lab.folder())
    assert len(found.splitlines()) == 6


@slurm
def test_gpus_are_bound_to_their_step(slurm_lab: SlurmLab) -> None:
    seen = slurm_lab.run("srun", "--gpus-per-node=2", "printenv", "CUDA_VISIBLE_DEVICES", cwd=slurm_lab.folder())
    assert seen == "0,1\n"


@slurm
def test_accounting_knows_every_incarnation_of_a_job_and_a_site_may_lack_it(slurm_lab: SlurmLab) -> None:
    job_id = submit(slurm_lab, slurm_lab.folder(), REQUEUES_ITSELF)
    requeued = ["sacct", "-D", "-X", "-n", "-j", job_id, "-o", "State%20"]
    wait_for(lambda: slurm_lab.run(*requeued).split() == ["REQUEUED", "PENDING"])
    path = slurm_lab.path_without_accounting()
    assert shutil.which("sacct", path=path) is None
    assert shutil.which("sbatch", path=path)


@pytest.mark.long
@slurm
def test_preemption_reaches_the_steps_at_once_and_the_batch_shell_after_the_grace_time(slurm_lab: SlurmLab) -> None:
    folder = slurm_lab.folder()
    (folder / "step.sh").write_text(STEP)
    job_id = submit(slurm_lab, folder, PREEMPTIBLE)
    wait_for(lambda: len(signal_times(folder, "step-start")) == 3)
    asked = time.time()
    slurm_lab.preempt()
    wait_for(lambda: len(signal_times(folder, "step-TERM")) >= 3)
    assert signal_times(folder, "step-TERM")[2] - asked < min(5 * slowness(), GRACE_S / 2)
    # while the signal is on its way to a node, a running job is SIGNALING (squeue(1), JOB STATE CODES)
    job = slurm_lab.wait_for_state(job_id, "RUNNING")
    assert job["Restarts"] == "0"
    assert job["PreemptTime"] != "None"
    wait_for(lambda: signal_times(folder, "batch-TERM"))
    assert signal_times(folder, "batch-TERM")[0] - asked >= GRACE_S - 1
    assert slurm_lab.wait_for_state(job_id, "PENDING")["Restarts"] == "1"


@slurm
def test_a_job_that_requeues_itself_is_held_until_its_owner_releases_it(slurm_lab: SlurmLab) -> None:
    folder = slurm_lab.folder()
    job_id = submit(slurm_lab, folder, REQUEUES_ITSELF)
    held = {
        "Restarts": "1",
        "JobState": "PENDING",
        "Reason": "BeginTime",
    }  # set by the next scheduling cycle
    wait_for(lambda: held.items() <= slurm_lab.job(job_id).items())
    # a job that starts in the second of its requeue fails: its node still counts the credential as revoked
    requeued = time.time()
    wait_for(lambda: time.time() > requeued + 2)
    slurm_lab.run("scontrol", "update", f"JobId={job_id}", "StartTime=now")
    slurm_lab.wait_for_state(job_id, "COMPLETED")
    log = (folder / "job.log").read_text().splitlines()
    assert [line for line in log if line.startswith("run")] == ["run 0", "run 1"]
