"""Functions that the tests submit; tasks import this module."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import submitit


def add(a: int, b: int) -> int:
    return a + b


def fail() -> None:
    raise ValueError("this is on purpose")


def who() -> tuple[Any, ...]:
    """Return the rank of the task, its node and the size of the job."""
    env = submitit.JobEnvironment()
    return env.global_rank, env.local_rank, env.node, env.num_tasks, env.num_nodes, tuple(env.hostnames)


def environment(name: str) -> tuple[str | None, str]:
    """Return a variable of the task's environment, and its working folder."""
    return os.environ.get(name), os.getcwd()


def wait_for(path: str) -> str:
    """Write the job's id into `path`.running, and return once `path` exists."""
    job_id: str = submitit.JobEnvironment().job_id
    Path(f"{path}.running").write_text(job_id)
    while not Path(path).exists():
        time.sleep(0.02)
    return "came"


def second_waits_for(path: str) -> str:
    return wait_for(path) if submitit.JobEnvironment().global_rank else "first"


def second_fails() -> str:
    if submitit.JobEnvironment().global_rank:
        fail()
    return "first"


class Counts(submitit.helpers.Checkpointable):
    """Counts its starts until `path` exists. Task 0 creates `path`.running and renames it to `path`.saved on a save."""

    def __init__(self, path: str, lives: int = 0) -> None:
        self.path = path
        self.lives = lives

    def __call__(self) -> int:
        self.lives += 1
        if submitit.JobEnvironment().global_rank == 0:
            Path(f"{self.path}.running").touch()
        while not Path(self.path).exists():
            time.sleep(0.02)
        return self.lives

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        Path(f"{self.path}.running").rename(f"{self.path}.saved")
        return submitit.helpers.DelayedSubmission(Counts(self.path, self.lives))


class LeavesLate(Counts):
    """Saves, but does not exit before `path`.leave exists."""

    def __call__(self) -> int:
        try:
            return super().__call__()
        finally:
            while self.lives == 1 and not Path(f"{self.path}.leave").exists():
                time.sleep(0.02)

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        super().checkpoint()
        return submitit.helpers.DelayedSubmission(LeavesLate(self.path, self.lives))


def prints_until(path: str) -> str:
    """Write its pid to `path`.RANK, and print into a buffer without a pause until `path` exists."""
    Path(f"{path}.{submitit.JobEnvironment().global_rank}").write_text(str(os.getpid()))
    with open(sys.stderr.fileno(), "w", buffering=64, closefd=False) as log:
        while not Path(path).exists():
            print("some text", file=log)
    return "came"
