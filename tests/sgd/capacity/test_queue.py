"""The driver's queries to the scheduler about the jobs of its node agents."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest

from hpc_det.sgd.capacity.job import Jobs, Queue
from tests.stub import Stub
from tests.stub import stub as stub


class Job:
    def __init__(self, job_id: str) -> None:
        self.job_id = job_id


@pytest.mark.integration
def test_a_suspended_job_is_known_by_what_its_processes_call_it(
    stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPC_DET_ROOT", str(tmp_path))
    stub("squeue", "printf '12_0|SUSPENDED|None\\n12_1|RUNNING|None\\n'")
    jobs = Jobs.__new__(Jobs)
    jobs._queue = Queue("slurm")
    jobs._jobs = [Job("12_0"), Job("12_1")]  # type: ignore[list-item]
    assert [jobs.is_suspended(job) for job in ("12_0", "12_1", "13")] == [True, False, False]


def test_ids_of_pbs_are_told_as_submitit_has_them() -> None:
    assert [Queue("pbs").id_of(job) for job in ("12.server", "12[3].server")] == ["12", "12_3"]


def test_a_second_ctrl_c_does_not_keep_jobs_from_being_cancelled() -> None:
    done: list[str] = []

    class OfJobs:
        def withdraw(self, jobs: object) -> None:
            done.append("withdraw")

        def end(self, jobs: object) -> None:
            done.append("end")

        def status(self, jobs: object) -> NoReturn:
            raise KeyboardInterrupt

    jobs = Jobs.__new__(Jobs)
    jobs._queue, jobs._jobs = OfJobs(), [Job("12")]  # type: ignore[assignment, list-item]
    with pytest.raises(KeyboardInterrupt):
        jobs.stop()
    assert done == ["withdraw", "end"]
