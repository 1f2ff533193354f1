"""Preemption and qrerun: the states of a job of `low` that is preempted, as recorded."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.labs.pbs_lab import Job, PbsLab
from tests.labs.pbs_recorded import recorded_job, recorded_names
from tests.labs.test_pbs_qstat import assert_as_recorded, names, without_dates
from tests.labs.test_pbs_signals import copy_jobs
from tests.wait import wait_for

pytestmark = pytest.mark.long

LOW = ["-q", "low", "-l", "select=3:ncpus=4:ngpus=4,place=scatter"]
OUT = ["-j", "oe", "-o", "out"]
CATCHES_TERM = """
trap 'echo TERM; while [ -e stay ]; do sleep 0.05; done; echo saved; exit 3' TERM
echo start in $TMPDIR, left there: $(ls $TMPDIR | wc -l); touch $TMPDIR/marker
while :; do sleep 0.05; done
"""


def start(lab: PbsLab, *options: str) -> str:
    """Start a job on all nodes, and return its ID when its trap is set."""
    job = lab.submit(*LOW, *OUT, *options, "-k", "oed", "-N", "victim", "--", "/bin/bash", "-c", CATCHES_TERM)
    wait_for(lambda: "start" in output_of(lab) and lab.job(job)["substate"] == 42)
    return job


def output_of(lab: PbsLab) -> str:
    path = lab.home / "out"
    return path.read_text() if path.exists() else ""


def test_requeue(pbs_lab: PbsLab) -> None:
    victim = start(pbs_lab)
    (pbs_lab.home / "stay").touch()
    high = pbs_lab.preempt(seconds=600)
    assert_as_recorded("preempt-requeue-1-after2s", when(pbs_lab, victim, "R", 60))
    (pbs_lab.home / "stay").unlink()
    pbs_lab.wait_for(high, "R")
    assert_as_recorded("preempt-requeue-2-high-running", when(pbs_lab, victim, "Q", 10))
    pbs_lab.run("qdel", high)
    assert_as_recorded("preempt-requeue-3-low-again", when(pbs_lab, victim, "R", 42))
    wait_for(lambda: output_of(pbs_lab).count("start") == 2)
    lines = re.sub(r"in \S+,", "in TMPDIR,", output_of(pbs_lab)).splitlines()
    assert [line for line in lines if line != "Terminated"] == [  # bash prints this if it was in a sleep
        *("start in TMPDIR, left there: 0", "TERM", "saved"),
        "start in TMPDIR, left there: 0",
    ]


def when(lab: PbsLab, job_id: str, state: str, substate: int) -> Job:
    """Return its attributes as soon as it is in this state with a comment of the scheduler's."""
    found: list[Job] = []

    def is_there() -> bool:
        found[:] = [lab.job(job_id)]
        seen = found[0]
        return (seen["job_state"], seen["substate"]) == (state, substate) and bool(seen["comment"])

    wait_for(is_there)
    return found[0]


def test_suspension(pbs_lab: PbsLab) -> None:
    """The only signal that can be caught is CONT; the same run continues."""
    pbs_lab.set_preempt_order("SCR")
    victim = start(pbs_lab)
    high = pbs_lab.preempt(seconds=600)
    pbs_lab.wait_for(high, "R")
    seen = pbs_lab.job(victim)
    assert_as_recorded("preempt-suspend-2-high-running", seen)
    process = Path("/proc", str(seen["session_id"]), "stat")
    wait_for(lambda: process.read_text().rpartition(")")[2].split()[0] == "T")
    pbs_lab.run("qdel", high)
    assert_as_recorded("preempt-suspend-3-low-again", when(pbs_lab, victim, "R", 42))
    assert output_of(pbs_lab).count("start") == 1
    assert "TERM" not in output_of(pbs_lab)


def test_deletion(pbs_lab: PbsLab) -> None:
    pbs_lab.set_preempt_order("D")
    victim = start(pbs_lab)
    pbs_lab.wait_for(pbs_lab.preempt(seconds=0.2), "F")
    seen, then = pbs_lab.job(victim), recorded_job("preempt-delete-2-high-running")
    assert names(seen) == names(then)
    assert (seen["job_state"], seen["substate"], seen["Exit_status"]) == ("F", 91, 3)
    assert without_dates(recorded_names(seen["comment"])) == without_dates(then["comment"])


@pytest.mark.parametrize(("order", "options"), [("R", ["-r", "n"]), ("C", [])])
def test_where_nothing_can_be_done_the_high_job_waits(pbs_lab: PbsLab, order: str, options: list[str]) -> None:
    pbs_lab.set_preempt_order(order)
    victim = start(pbs_lab, *options)
    high = pbs_lab.preempt()
    wait_for(lambda: pbs_lab.job(high).get("comment") == "Not Running: Not enough free nodes available")
    assert pbs_lab.job(victim)["job_state"] == "R"
    pbs_lab.run("qdel", high)


def test_qrerun_is_for_managers_and_for_rerunnable_jobs(pbs_lab: PbsLab) -> None:
    job = pbs_lab.submit(*LOW, "-r", "n", "--", "/bin/sleep", "600")
    pbs_lab.wait_for(job, "R")
    owner, manager = pbs_lab.ended("qrerun", job), pbs_lab.ended("qrerun", job, manager=True)
    assert (owner.returncode, owner.stderr) == (159, f"qrerun: Unauthorized Request  {job}\n")
    assert (manager.returncode, manager.stderr) == (190, f"qrerun: job is not rerunnable {job}\n")


def test_a_rerun_is_the_same_job_whatever_it_ended_with(pbs_lab: PbsLab) -> None:
    job = start(pbs_lab)
    first = pbs_lab.job(job)
    pbs_lab.rerun(job)
    assert "saved" in output_of(pbs_lab)
    again = pbs_lab.wait_for(job, "R")
    assert (again["run_count"], again["queue"]) == (2, first["queue"])
    assert "Exit_status" not in again


def test_output_is_invisible_until_the_end_of_the_last_run(pbs_lab: PbsLab) -> None:
    job = pbs_lab.submit(*LOW, *OUT, script='echo "a run"; touch run$(ls run* | wc -l); sleep 600\n')
    for run in (0, 1):
        wait_for((pbs_lab.home / f"run{run}").exists)
        assert not output_of(pbs_lab)
        if not run:
            pbs_lab.rerun(job)
    pbs_lab.run("qdel", job)
    pbs_lab.wait_for(job, "F")
    assert output_of(pbs_lab).count("a run") == 2


def test_a_hold_counts_once_the_job_waits_again(pbs_lab: PbsLab) -> None:
    job = pbs_lab.submit(*LOW, "--", "/bin/sleep", "600")
    pbs_lab.wait_for(job, "R")
    pbs_lab.run("qhold", job)
    assert (pbs_lab.job(job)["job_state"], pbs_lab.job(job)["Hold_Types"]) == ("R", "u")
    pbs_lab.rerun(job)
    held = pbs_lab.job(job)
    assert (held["job_state"], held["Hold_Types"], held["run_count"]) == ("H", "u", 1)
    pbs_lab.run("qrls", job)
    assert pbs_lab.wait_for(job, "R")["run_count"] == 2


def test_a_launcher_that_leaves_on_term_cuts_the_grace_of_the_other_ranks(pbs_lab: PbsLab) -> None:
    """Whatever kill_delay is, the low job is back in the queue long before it."""
    copy_jobs(pbs_lab)
    pbs_lab.set_kill_delay("low", 60)
    tracer = [sys.executable, str(pbs_lab.home / "w" / "tracer.py"), str(pbs_lab.home / "log"), "rank", "never"]
    victim = pbs_lab.submit(*LOW, "--", f"{pbs_lab.site.bin}/pbsdsh", "--", *tracer)
    wait_for(lambda: (pbs_lab.home / "log").exists() and (pbs_lab.home / "log").read_text().count("start") == 3)
    high = pbs_lab.preempt(seconds=600)
    pbs_lab.wait_for(high, "R", deadline_s=30)
    assert pbs_lab.job(victim)["job_state"] == "Q"
    pbs_lab.run("qdel", victim)
