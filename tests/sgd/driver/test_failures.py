"""The classification of failures: whether an error that a rank reports comes from the gang or from the user's code."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hpc_det.sgd.driver.failures import Raised, back_into_queue
from tests.facts import unnamed


@pytest.mark.parametrize(
    ("said", "is_its"),
    [
        ("RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer", True),
        ("DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:94, remote process exited", True),
        ("DistStoreError: waited 300 s for gang/0", True),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", False),  # an error of the user's download
        ("TimeoutError: timed out", False),
        ("ValueError: nccl", False),
        ("RuntimeError: my loss is NaN", False),
    ],
)
def test_a_connection_of_the_users_own_is_no_failure_of_the_gang(said: str, is_its: bool) -> None:
    assert Raised(0, said, "", b"").is_of_the_gang == is_its


ENV = {"SLURM_JOB_ID": "7"}
PREEMPTED = "JobId=7 JobState=COMPLETING PreemptTime=2026-11-21T13:00:41 Requeue=1"


class Slurm:
    def __init__(self, job: str) -> None:
        self.job = job
        self.asked: list[list[str]] = []

    def __call__(self, command: Sequence[str]) -> str:
        self.asked.append(list(command))
        return f"{self.job}\n" if "show" in command else ""

    @property
    def requeues(self) -> bool:
        return ["scontrol", "requeue", "7"] in self.asked


def test_a_preempted_job_goes_back_into_the_queue() -> None:
    slurm = Slurm(PREEMPTED)
    assert unnamed(back_into_queue(ENV, slurm), "job 7") == []
    assert slurm.requeues


def test_one_that_somebody_has_requeued_is_not_called_cancelled() -> None:
    slurm = Slurm("JobId=7 JobState=COMPLETING PreemptTime=None Requeue=1 Restarts=1")
    said = back_into_queue(ENV, slurm)
    assert unnamed(said, "job 7") == []
    assert "cancelled" not in said
    assert not slurm.requeues, "it may run again by now"


@pytest.mark.parametrize(
    ("job", "is_cancelled"),
    [
        (PREEMPTED.replace("Requeue=1", "Requeue=0"), False),
        ("JobId=7 JobState=CANCELLED PreemptTime=None Requeue=1", True),
    ],
)
def test_one_that_nobody_wants_back_does_not(job: str, is_cancelled: bool) -> None:
    slurm = Slurm(job)
    said = back_into_queue(ENV, slurm)
    assert unnamed(said, "job 7") == []
    assert ("cancelled" in said) is is_cancelled
    assert not slurm.requeues
