"""Jobs when a node is lost, the server is down, or the history is disabled: as on the recorded site."""

from __future__ import annotations

import json

import pytest

from tests.labs.pbs_lab import PbsLab
from tests.labs.pbs_recorded import Step, transcript
from tests.wait import wait_for

pytestmark = pytest.mark.long

RANKS = """
mkdir -p beats
pbsdsh -- /bin/sh -c 'trap "touch $HOME/caught" TERM
while :; do touch $HOME/beats/$PBS_NODENUM.$PPID; sleep 0.05; done'
"""
TWO = ["-q", "low", "-l", "select=2:ncpus=4:ngpus=4,place=scatter"]


def state(lab: PbsLab, job: str) -> tuple[str, object]:
    seen = lab.job(job)
    return seen["job_state"], seen.get("Exit_status")


def start(lab: PbsLab) -> str:
    job = lab.submit(*TWO, script=RANKS)
    wait_for(lambda: len(list(lab.home.glob("beats/*"))) == 2)
    return job


@pytest.mark.parametrize("pbs_lab", [{"node_fail_requeue": 310}], indirect=True)
def test_a_lost_first_node_means_a_requeue_elsewhere(pbs_lab: PbsLab) -> None:
    job = start(pbs_lab)
    first, second, third = pbs_lab.nodes
    pbs_lab.fail_node(first)
    nodes = json.loads(pbs_lab.run("pbsnodes", "-a", "-F", "json"))["nodes"]
    assert nodes[first]["state"] == "down,job-busy"
    assert nodes[first]["comment"] == "node down: communication closed"
    assert state(pbs_lab, job) == ("R", None)
    pbs_lab.run("qmgr", "-c", "set server node_fail_requeue = 1", manager=True)
    wait_for(lambda: pbs_lab.job(job).get("run_count") == 2)
    assert pbs_lab.wait_for(job, "R")["exec_host"] == f"{second}/0*4+{third}/0*4"
    assert not (pbs_lab.home / "caught").exists()
    nodes = json.loads(pbs_lab.run("pbsnodes", "-a", "-F", "json"))["nodes"]
    assert nodes[first]["state"] == "down"
    assert "down" in pbs_lab.run("pbsnodes", "-l")
    pbs_lab.repair_node(first)
    assert not pbs_lab.run("pbsnodes", "-l")


def test_a_lost_other_node_is_noticed_late(pbs_lab: PbsLab) -> None:
    job = start(pbs_lab)
    pbs_lab.fail_node(pbs_lab.nodes[1])
    pbs_lab.fail_node(pbs_lab.nodes[2])
    assert state(pbs_lab, job) == ("R", None)
    wait_for(lambda: state(pbs_lab, job) == ("Q", -14))
    assert not (pbs_lab.home / "caught").exists()
    assert pbs_lab.job(job)["comment"] == "Not Running: Not enough free nodes available"
    pbs_lab.repair_node(pbs_lab.nodes[1])
    assert pbs_lab.wait_for(job, "R")["run_count"] == 2


def test_jobs_run_on_while_the_server_is_down(pbs_lab: PbsLab) -> None:
    job = pbs_lab.submit("--", "/bin/sh", "-c", "while [ ! -e go ]; do sleep 0.05; done; touch done")
    pbs_lab.wait_for(job, "R")
    pbs_lab.stop_server()
    assert_as_recorded(pbs_lab, "misc/server-down.txt", job)
    (pbs_lab.home / "go").touch()
    wait_for((pbs_lab.home / "done").exists)
    pbs_lab.start_server()
    assert pbs_lab.wait_for(job, "F")["Exit_status"] == 0
    assert pbs_lab.job(job)["run_count"] == 1


def assert_as_recorded(lab: PbsLab, name: str, job: str) -> None:
    """Run every command of the transcript that names the job or none; only the time in JSON output may differ."""
    for step in transcript(name):
        if "|" not in step.command and "<" not in step.command and step.code:
            command = step.command.replace("221.pbshead", job).replace("223.pbshead", job)
            done = lab.ended("/bin/bash", "-c", command)
            assert (done.returncode, without_time(done.stdout.splitlines())) == (step.code, without_time(step.out))
            assert done.stderr.splitlines() == errors(step, job)


def without_time(lines: list[str]) -> list[str]:
    return [line for line in lines if "timestamp" not in line]


def errors(step: Step, job: str) -> list[str]:
    return [line.replace("221.pbshead", job).replace("223.pbshead", job) for line in step.err]


def test_without_history_an_ended_job_is_unknown(pbs_lab: PbsLab) -> None:
    pbs_lab.set_history(False)
    job = pbs_lab.submit("--", "/bin/true")
    wait_for(lambda: pbs_lab.ended("qstat", job).returncode == 153)
    assert_as_recorded(pbs_lab, "misc/history-disabled.txt", job)
    asked = pbs_lab.ended("qstat", "-x", "-f", "-F", "json", job)
    assert (asked.returncode, "Jobs" in json.loads(asked.stdout)) == (0, False)
    assert asked.stderr == f"qstat: PBS is not configured to maintain job history {job}\n"
    child = pbs_lab.submit("-W", f"depend=afterok:{job}", "--", "/bin/true")
    wait_for(lambda: pbs_lab.ended("qstat", child).returncode == 153)
