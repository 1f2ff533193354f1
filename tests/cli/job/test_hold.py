"""hpc-det job hold and release."""

from __future__ import annotations

from tests.cli.conftest import Command
from tests.cli.job.conftest import records
from tests.cli.slurm_on_paper import SlurmOnPaper
from tests.facts import each_names, unnamed
from tests.stub import stub as stub


def test_a_job_is_held_and_released(hpc_det: Command, queue: SlurmOnPaper) -> None:
    assert hpc_det("job", "hold", "4712").succeeds("hpc-det job release 4712")
    assert [record["state"] for record in records(hpc_det)][-1] == "HELD"
    refused = hpc_det("job", "update", "4714", "--behind-of", "4712")
    assert refused.fails(2, "job 4712", "JobHeldUser", "hpc-det job release 4712")
    assert hpc_det("job", "release", "4712").succeeds("Released", "job 4712")
    assert queue.order()[-1] == "4712"


def test_release_lifts_the_wait_after_a_requeue(hpc_det: Command, queue: SlurmOnPaper) -> None:
    queue.jobs["4712"].reason = "BeginTime"
    assert hpc_det("job", "release", "4712").succeeds("Released", "job 4712")
    assert queue.changes == ["scontrol update JobId=4712 StartTime=now"]


def test_an_arrays_id_is_all_of_its_jobs_that_wait(hpc_det: Command, queue: SlurmOnPaper) -> None:
    for job_id in ("4716_3", "4716_5"):
        queue.queue(job_id, reason="BeginTime")
    queue.queue("4716_4", state="RUNNING")
    assert hpc_det("job", "update", "4716", "--priority", "60").code == 0
    assert [queue.jobs[f"4716_{index}"].nice for index in (3, 4, 5)] == [1800, 0, 1800]
    assert hpc_det("job", "release", "4716").succeeds("Released", "job 4716")
    assert [queue.jobs[f"4716_{index}"].reason for index in (3, 5)] == ["Priority", "Priority"]
    assert hpc_det("job", "update", "4716_5", "--ahead-of", "4716_3").code == 0


def test_release_says_when_nothing_is_held(hpc_det: Command, queue: SlurmOnPaper) -> None:
    shown = hpc_det("job", "release", "4711,4712").out
    each_names(shown.splitlines(), ["Job 4711", "held", "running"], ["Job 4712", "held", "queued", "Resources"])


def test_a_hold_of_the_site_is_its_operators_to_lift(hpc_det: Command, queue: SlurmOnPaper) -> None:
    queue.jobs["4712"].reason = "JobHeldAdmin"
    code, _, err = hpc_det("job", "release", "4712")
    assert (code, unnamed(err, "4712", "operators")) == (1, [])


def test_a_running_job_is_not_held(hpc_det: Command, queue: SlurmOnPaper) -> None:
    assert hpc_det("job", "hold", "4711").code == 2
    assert queue.changes == []
