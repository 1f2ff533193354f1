"""A simulated Slurm in this process: only its queue, which behaves like Slurm 22.05 with priority/basic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from hpc_det.schedulers.scheduler import CommandError
from hpc_det.schedulers.slurm.queue import FIELDS

PARTITIONS = "PartitionName=low Default=YES State=UP\nPartitionName=high Default=NO State=UP\n"


@dataclass
class PaperJob:
    job_id: str
    priority: int
    user: str
    name: str = "digits"
    partition: str = "low"
    state: str = "PENDING"
    reason: str = "Priority"
    nice: int = 0
    folder: str = "/tmp"
    dependency: str = "(null)"

    def row(self) -> dict[str, str]:
        return {
            "JobArrayID": self.job_id,
            "Name": self.name,
            "UserName": self.user,
            "Partition": self.partition,
            "State": self.state,
            "Reason": self.reason,
            "SubmitTime": "2026-11-20T10:02:05",
            "StartTime": "2026-11-20T12:00:00" if self.reason == "Resources" else "N/A",
            "Nice": str(self.nice),
            "PriorityLong": str(self.priority),
            "tres-alloc": "cpu=8,node=1,billing=8,gres/gpu=2",
            "WorkDir": self.folder,
            "Dependency": self.dependency,
        }


@dataclass
class SlurmOnPaper:
    """A queue whose `run` replaces `run_command`."""

    user: str
    """The user who runs the commands, who is not an operator."""
    jobs: dict[str, PaperJob] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)
    """All commands that request a change."""
    deaf_to: Callable[[str], bool] = lambda command: False
    """Commands that it accepts without making the change."""
    ended: str | None = None
    """An element of an array that has ended since the last squeue."""

    def take_over(self, patch: pytest.MonkeyPatch) -> None:
        """Make `hpc-det job` use this queue instead of the machine's scheduler."""
        patch.setattr("hpc_det.cli.job.list.schedulers_here", lambda which: ["slurm"])
        for module in ("list", "hold", "update", "operations"):
            patch.setattr(f"hpc_det.cli.job.{module}.run_command", self.run)

    def queue(self, job_id: str, *, user: str | None = None, **more: str) -> PaperJob:
        job = PaperJob(job_id, 100_000 - len(self.jobs), user or self.user, **more)  # type: ignore[arg-type]
        self.jobs[job_id] = job
        return job

    def order(self) -> list[str]:
        waiting = [job for job in self.jobs.values() if job.state == "PENDING"]
        return [job.job_id for job in sorted(waiting, key=lambda job: (-job.priority, job.job_id))]

    def run(self, command: Sequence[str]) -> str:
        match list(command):
            case ["env", *_, form]:
                return self._squeue(form.partition("--Format=JobArrayID:")[2].partition(",")[0])
            case ["scontrol", "show", "partition", "--oneliner"]:
                return PARTITIONS
            case ["scontrol", "show", "job", "--oneliner", _]:
                return "SubmitTime=2026-11-20T10:02:05\n"
            case ["scontrol", "update", job, change]:
                self._change(job.removeprefix("JobId="), change, " ".join(command))
            case ["scontrol", "uhold" | "release" as what, job]:
                self._change(job, what, " ".join(command))
            case _:
                raise AssertionError(command)
        return ""

    def _squeue(self, mark: str) -> str:
        order = [*(job.job_id for job in self.jobs.values() if job.state != "PENDING"), *self.order()]
        rows = (self.jobs[job_id].row() for job_id in order)
        return "".join("".join(f"{row[name]}{mark}" for name in FIELDS) + "\n" for row in rows)

    def _change(self, job_id: str, change: str, command: str) -> None:
        self.changes.append(command)
        job, (key, _, value) = self.jobs[job_id], change.partition("=")
        is_negative = key == "Nice" and int(value) < 0
        if is_negative or job.reason == "JobHeldAdmin":
            raise CommandError(f"scontrol: refused with exit code 1: Access/permission denied for job {job_id}")
        if self.deaf_to(command):
            return
        match key:
            case "Nice":
                job.priority, job.nice = max(job.priority + job.nice - int(value), 1), int(value)
            case "Partition":
                job.partition = value
            case "StartTime":
                job.reason = "Priority"
            case "uhold":
                job.priority, job.reason = 0, "JobHeldUser"
            case "release":
                job.priority, job.reason = min(one.priority for one in self.jobs.values() if one.priority) - 1, "None"
        if self.ended and job_id.startswith(self.ended.partition("_")[0]):
            raise CommandError(f"scontrol: refused with exit code 1: {self.ended}: Job has already finished")
