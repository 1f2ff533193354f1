"""What the tests submit; tasks import it."""

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
    """What a task knows of itself."""
    env = submitit.JobEnvironment()
    return env.global_rank, env.local_rank, env.node, env.num_tasks, env.num_nodes, tuple(env.hostnames)


def environment(name: str) -> tuple[str | None, str]:
    """A variable, and the folder it runs in."""
    return os.environ.get(name), os.getcwd()


def wait_for(path: str) -> str:
    """Says that it runs, in a file beside `path`, and returns when there is such a file."""
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
    """Counts its lives until there is `path`. Task 0 says that it runs, and that it has saved, in files beside it."""

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
    """Has saved, and does not leave before there is a file beside `path`."""

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
    """Prints without a pause, into a buffer, until there is `path`; its pid is in a file beside it, by its rank."""
    Path(f"{path}.{submitit.JobEnvironment().global_rank}").write_text(str(os.getpid()))
    with open(sys.stderr.fileno(), "w", buffering=64, closefd=False) as log:
        while not Path(path).exists():
            print("some text", file=log)
    return "came"
