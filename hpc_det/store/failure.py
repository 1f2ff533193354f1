"""Which rank failed first, and of what: a small file for each failure, the first one named first."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

from hpc_det.errors import UsageError
from hpc_det.node.files import make_folders
from hpc_det.node.json_files import read_json, write_json
from hpc_det.store.folders import TrialFolder

COLLATERAL_S = 10.0
"""When a rank dies without a word, its peers' collectives fail within this time, and may be noted before it."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    rank: int | None
    """None: the entrypoint itself, before any rank said hello, or the node."""
    host: str
    """Of an unhealthy node: as the scheduler calls it."""
    time: float
    message: str
    traceback: str = ""
    user_error: bool = False
    """The same would happen again: nothing to restart for."""
    invalid_hp: bool = False
    """The trial says that its hyperparameters cannot work."""
    lost: bool = False
    """The process was gone without a word: killed from outside, or crashed."""
    hung: bool = False
    """The process made no step for too long."""
    disk_full: bool = False
    """A file system has no space left, or the user's quota is used up."""
    unhealthy: bool = False
    """The node failed its checks, before any rank was started there."""
    node_lost: bool = False
    """The node was powered off, or cut off from the network; or its agent was killed."""
    scheduler_away: bool = False
    """The scheduler gave no answer to the command that should start ranks, or the agents of nodes."""

    @property
    def is_clear(self) -> bool:
        """Whether it is no consequence of something else that the ranks may not have seen."""
        return self.user_error or self.disk_full or self.hung or self.unhealthy

    def sentence(self) -> str:
        if self.unhealthy or self.node_lost:
            return f"node {self.host}: {self.message}"
        who = f"rank {self.rank}" if self.rank is not None else "the entrypoint"
        return f"{who} on {self.host}: {self.message}"


def note_failure(trial: TrialFolder, attempt: int, failure: Failure) -> None:
    """Keep the first failure of each rank, and of each node. Where the disk is full, the job finds that by itself."""
    try:
        _keep(trial, attempt, failure)
    except OSError as error:
        with suppress(OSError):  # the log may be on the same disk
            print(f"hpc-det: {failure.sentence()}; not noted: {error}", file=sys.stderr, flush=True)


def _keep(trial: TrialFolder, attempt: int, failure: Failure) -> None:
    folder = trial.failures(attempt)
    make_folders(folder)
    path = folder / f"{_name(failure)}.json"
    if not path.exists():
        write_json(path, asdict(failure))


def _name(failure: Failure) -> str:
    if failure.unhealthy or failure.node_lost:
        return f"node-{failure.host}"
    return f"rank-{failure.rank}" if failure.rank is not None else f"entrypoint-{failure.host}-{os.getpid()}"


def failure_now(rank: int | None, message: str, **details: object) -> Failure:
    return Failure(rank=rank, host=socket.gethostname(), time=time.time(), message=message, **details)  # type: ignore[arg-type]


@contextmanager
def mistakes_noted(trial: TrialFolder, attempt: int) -> Iterator[None]:
    """A UsageError in here becomes the attempt's failure, which the user sees, and which no restart would mend."""
    try:
        yield
    except UsageError as error:
        note_failure(trial, attempt, failure_now(None, str(error), user_error=True))
        raise


def first_failure(trial: TrialFolder, attempt: int) -> Failure | None:
    """The root cause: the earliest, but a rank or a node that was lost goes before the peers that complain of it.

    A verdict on a node, on ranks that hang, or on a full disk ends the gang, and goes before all that comes of it.
    Where one mpirun or srun started all ranks, it kills the others when one fails: then they are lost after it.
    """
    found = failures(trial, attempt)
    if not found:
        return None
    if verdict := next((each for each in found if each.unhealthy or each.hung or each.disk_full), None):
        return verdict
    together = [failure for failure in found if failure.time <= found[0].time + COLLATERAL_S]
    if lost_node := next((failure for failure in together if failure.node_lost), None):
        return lost_node
    if trial.launcher(attempt, 0).exists():
        return found[0]
    return next((failure for failure in together if failure.lost), found[0])


def failures(trial: TrialFolder, attempt: int) -> list[Failure]:
    """All of an attempt, the earliest first."""
    paths = trial.failures(attempt).glob("*.json")
    return sorted((Failure(**data) for data in map(read_json, paths) if data), key=lambda failure: failure.time)
