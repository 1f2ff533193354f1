"""The queue of PBS, from answers recorded on OpenPBS 23.06."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpc_det.schedulers.pbs.queue import PbsQueue
from hpc_det.schedulers.queue import QueuedJob
from hpc_det.schedulers.scheduler import JobState

RECORDED = Path(__file__).parent / "recorded"
SITE = Path(__file__).parents[1] / "recorded_sites" / "pbs-23.06"
QUEUE = PbsQueue()


def recorded(command: Sequence[str]) -> str:
    assert list(command) == ["qstat", "-f", "-F", "json"]
    return (RECORDED / "list-all.json").read_text()


@pytest.fixture
def jobs() -> dict[str, QueuedJob]:
    return {job.name: job for job in QUEUE.jobs(recorded)}


def test_what_runs_comes_first_and_the_rest_as_qstat_lists_it(jobs: dict[str, QueuedJob]) -> None:
    assert list(jobs) == ["gang", "arr", "bigwait", "never", "never2", "held", "later", "dep"]
    assert [job.name for job in QUEUE.jobs(recorded, pool="low")] == ["bigwait"]


def test_a_job_is_read_whole(jobs: dict[str, QueuedJob]) -> None:
    job = jobs["bigwait"]
    assert (job.job_id, job.user, job.pool, job.state) == ("48.pbshead", "alice", "low", JobState.QUEUED)
    assert job.reason == "Not Running: Insufficient amount of resource: ncpus (R: 12 A: 8 T: 12)"
    assert (job.priority, job.starts, job.path) == (42, None, "/home/alice/w/bigwait.o48")
    assert jobs["gang"].submitted == jobs["gang"].starts


def test_slots_are_gpus_or_cpus_of_the_jobs_of_an_array_together(jobs: dict[str, QueuedJob]) -> None:
    found = {name: (job.slots, job.waiting, job.running) for name, job in jobs.items()}
    assert [found[name] for name in ("gang", "bigwait", "never", "arr")] == [
        (4, 0, 1),
        (12, 1, 0),
        (64, 1, 0),
        (1, 6, 2),
    ]


def test_a_suspended_job_is_told_from_one_that_runs() -> None:
    said = (RECORDED / "preempt-suspend-2-high-running.json").read_text()
    found = {job.job_id: (job.state, job.is_suspended) for job in QUEUE.jobs(lambda command: said)}
    assert found["130.pbshead"] == (JobState.RUNNING, True)


def test_only_a_hold_of_the_user_is_one_to_lift(jobs: dict[str, QueuedJob]) -> None:
    assert [name for name, job in jobs.items() if job.state is JobState.HELD] == ["held"]


def test_a_start_is_what_pbs_expects(jobs: dict[str, QueuedJob]) -> None:
    """Sites that estimate starts report them in qstat -f, in the text format of its other times."""
    said = json.loads((RECORDED / "list-all.json").read_text())
    said["Jobs"]["48.pbshead"]["estimated"] = {"start_time": "Fri Nov 20 10:44:00 2026"}
    job = next(job for job in QUEUE.jobs(lambda command: json.dumps(said)) if job.name == "bigwait")
    assert job.starts == jobs["later"].starts


def test_the_default_pool_is_the_servers() -> None:
    def run(command: Sequence[str]) -> str:
        return (SITE / ("server.json" if "-B" in command else "queues.json")).read_text()

    assert QUEUE.pools(run) == {"workq": True, "low": False, "high": False}


def test_a_priority_is_one_of_qalter_that_can_be_taken_back(jobs: dict[str, QueuedJob]) -> None:
    (change,) = QUEUE.prioritize(jobs["bigwait"], 10)
    assert change.command == ("qalter", "-p", "320", "48.pbshead")
    assert change.undo == ("qalter", "-p", "0", "48.pbshead")


def test_a_job_changes_places_with_one_after_the_other(jobs: dict[str, QueuedJob]) -> None:
    first, second, third = (jobs[name] for name in ("never", "never2", "held"))
    ahead, behind = QUEUE.put_ahead(third, first, [second]), QUEUE.put_behind(first, third, [second])
    assert [change.command[1:] for change in ahead] == [("51.pbshead", "50.pbshead"), ("51.pbshead", "49.pbshead")]
    assert [change.command[1:] for change in behind] == [("49.pbshead", "50.pbshead"), ("49.pbshead", "51.pbshead")]
    assert [change.undo for change in ahead] == [change.command for change in ahead]
