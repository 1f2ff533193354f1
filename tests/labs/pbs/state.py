"""The state of a site: its nodes, its jobs in the order of their submission, its settings."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.labs.pbs.job import Job
from tests.labs.pbs.resources import Refused
from tests.labs.pbs.site import QueueSettings, Settings, Site

UNKNOWN_JOB, UNKNOWN_QUEUE = 153, 170


@dataclass
class Node:
    name: str
    up: bool = True
    changed: float = field(default_factory=time.time)
    used: float = field(default_factory=time.time)

    def turn(self, up: bool) -> None:
        self.up, self.changed = up, time.time()


@dataclass
class Pbs:
    site: Site
    settings: Settings
    nodes: dict[str, Node]
    jobs: dict[str, Job] = field(default_factory=dict)
    next_number: int = 0
    answers: bool = True
    """False while the PBS server is down; moms and jobs continue."""

    def find(self, job_id: str) -> Job:
        if job_id not in self.jobs:
            raise Refused(UNKNOWN_JOB, f"Unknown Job Id {job_id}")
        return self.jobs[job_id]

    def queue(self, name: str) -> QueueSettings:
        if name not in self.settings.queues:
            raise Refused(UNKNOWN_QUEUE, "Unknown queue")
        return self.settings.queues[name]

    def add(self, job: Job) -> None:
        for one in (job, *job.subjobs):
            self.jobs[one.id] = one

    def forget(self, job: Job) -> None:
        for one in (job, *job.subjobs):
            self.jobs.pop(one.id, None)

    def on_nodes(self) -> Iterator[Job]:
        """Return the jobs with processes, or with remains of processes."""
        return (job for job in list(self.jobs.values()) if job.state in "RSE")

    def users_of(self, node: str) -> list[Job]:
        return [job for job in self.on_nodes() if job.state != "S" and node in job.nodes]
