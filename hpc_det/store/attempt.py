"""One attempt of a trial: the environment variables of its nodes and ranks, its stop request, and its failures.

A stop request is one small file that contains the number of its attempt. Readers compare that number, because a request
that remains from an earlier attempt must not stop the next one. Each rank or node that fails has its own failure file.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from hpc_det.errors import HpcDetError, UsageError
from hpc_det.node.files import make_folders
from hpc_det.node.json_files import made, read_json, write_json
from hpc_det.store.folders import TrialFolder

HOOK = "startup-hook.sh"
"""File of the context directory that the agents source before the entrypoint (hpc_det.launch.startup_hook)."""
# When a rank is killed, the collectives of other ranks fail, and their failures may be recorded before its own.
COLLATERAL_S = 10.0
"""Seconds after the first recorded failure in which a lost rank or node is taken for the cause of the others."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """The environment variables HPC_DET_*, through which a node agent configures its ranks."""

    folder: str
    """Path of the trial's folder."""
    number: int
    """Number of the attempt, counted from 1 in each trial."""
    worker: int
    """Number of the worker, as in the search."""
    node_rank: int
    nodes: int
    ranks_per_node: int
    address: str
    """Address of this node for the other nodes."""
    master_addr: str
    master_port: int
    secret: str
    """Key that authenticates the objects which the ranks of this attempt exchange. It is never sent in clear text."""
    socket: str
    """Path of the agent's Unix socket, in a folder of mode 0700 on this node."""

    @property
    def trial(self) -> TrialFolder:
        return TrialFolder(Path(self.folder))

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    def to_env(self) -> dict[str, str]:
        """Return the variables for the environment of the ranks; see `from_env`."""
        return {f"HPC_DET_{name.upper()}": str(value) for name, value in vars(self).items()}

    def store_of_ranks(self) -> dict[str, str]:
        """Return the variable with the path of a rendezvous file for ranks that this process starts on one node.

        See hpc_det.distributed.gang_store.
        """
        # The process id: each start of a launcher gets a new file
        return {"HPC_DET_STORE": str(Path(self.socket).with_name(f"store-{os.getpid()}"))}

    @staticmethod
    def is_in(env: Mapping[str, str]) -> bool:
        """Return whether a process with this environment belongs to an attempt."""
        return "HPC_DET_FOLDER" in env

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Attempt:
        """Return the attempt of this environment. Raises HpcDetError if a variable is missing."""
        try:
            values = {name: env[f"HPC_DET_{name.upper()}"] for name in cls.__dataclass_fields__}
        except KeyError as missing:
            raise HpcDetError(
                f"{missing.args[0]} is not set: only a node agent can start this program; create an experiment with "
                f"`hpc-det experiment create`, or start the script with torchrun"
            ) from None
        return cls(
            folder=values["folder"],
            address=values["address"],
            master_addr=values["master_addr"],
            secret=values["secret"],
            socket=values["socket"],
            number=int(values["number"]),
            worker=int(values["worker"]),
            node_rank=int(values["node_rank"]),
            nodes=int(values["nodes"]),
            ranks_per_node=int(values["ranks_per_node"]),
            master_port=int(values["master_port"]),
        )


# "signal": from the scheduler, which is asked afterwards whether it was a preemption or the time limit.
# "time limit": by the job's own clock. "pause", "cancel": the ranks save and exit. "kill": they are killed.
# "resume check": by the ranks of `experiment verify-resume`, to compare a resumed trial with an uninterrupted one.
Reason = Literal["signal", "time limit", "pause", "cancel", "kill", "resume check"]


@dataclass(frozen=True, kw_only=True)
class StopRequest:
    """Asks the ranks of one attempt to stop."""

    attempt: int | None
    """None: the running attempt, or the next one to start."""
    reason: Reason
    source: str
    """The origin of the request, such as a user, or a host and a signal."""
    time: float
    """Time of the request, in seconds since the epoch."""
    deadline: float | None = None
    """When the ranks will be killed, in seconds since the epoch; None: unknown."""

    def concerns(self, attempt: int) -> bool:
        """Return whether the request is for this attempt."""
        return self.attempt is None or self.attempt == attempt


def read_stop(path: Path, attempt: int) -> StopRequest | None:
    """Return the stop request for `attempt`, or None. Raises DamagedFile."""
    data = read_json(path)
    request = made(StopRequest, data, path) if data else None
    return request if request and request.concerns(attempt) else None


def request_stop(
    path: Path, *, attempt: int | None, reason: Reason, source: str, deadline: float | None = None
) -> StopRequest:
    """Write a stop request, and return it; if there already is one for `attempt`, keep and return that one instead.

    `kill`, and a request without an attempt, replace any earlier request.
    """
    standing = read_stop(path, attempt) if attempt is not None else None
    if standing and reason != "kill":
        return standing
    request = StopRequest(attempt=attempt, reason=reason, source=source, time=time.time(), deadline=deadline)
    write_json(path, asdict(request))
    return request


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The failure of a rank, of the entrypoint, or of a node."""

    rank: int | None
    """None: the entrypoint failed before any rank had connected to its agent, or the node failed."""
    host: str
    """Host name; for an unhealthy node its name in the scheduler."""
    time: float
    """In seconds since the epoch."""
    message: str
    place: str = ""
    """Line of the user's code that raised the error, such as `model_def.py:23`; "" if unknown."""
    traceback: str = ""
    user_error: bool = False
    """The error is permanent: a restart would fail in the same way."""
    invalid_hp: bool = False
    """The trial reported that its hyperparameters are invalid."""
    lost: bool = False
    """The process exited without reporting a cause: it was killed or crashed."""
    hung: bool = False
    """The process made no step for too long."""
    disk_full: bool = False
    """A file system has no space left, or the user's quota is used up."""
    unhealthy: bool = False
    """The node failed its health checks, before any rank was started there."""
    node_lost: bool = False
    """The node was powered off or disconnected from the network, or its agent was killed."""
    startup_hook: bool = False
    """The startup hook of the context directory failed, before any rank was started."""
    scheduler_away: bool = False
    """The scheduler did not answer the command that starts ranks or node agents."""
    printed: str = ""
    """The line of its output that names the cause best; "" if unknown, or if `message` is that of an exception."""

    code: int | None = None
    """The exit code of the program, below 0 for a signal, as subprocess returns it; None if unknown."""

    @property
    def is_clear(self) -> bool:
        """True if it is a cause, and not the consequence of another failure that the ranks may not have detected."""
        return self.user_error or self.disk_full or self.hung or self.unhealthy

    def sentence(self) -> str:
        """Return the failure as a line for people."""
        if self.unhealthy or self.node_lost:
            return f"node {self.host}: {self.message}"
        nobody = HOOK if self.startup_hook else "the entrypoint"
        who = f"rank {self.rank}" if self.rank is not None else nobody
        place = f" ({self.place})" if self.place else ""
        return f"{who} on {self.host}: {self.message}{place}"


def note_failure(trial: TrialFolder, attempt: int, failure: Failure) -> None:
    """Write the failure to a file, unless its rank or node has one. If that fails, print it to stderr."""
    try:
        _keep(trial, attempt, failure)
    except OSError as error:  # for instance a full disk, which the job detects on its own
        with suppress(OSError):  # the log may be on the same disk
            print(f"hpc-det: {failure.sentence()}; recording this failed: {error}", file=sys.stderr, flush=True)


def _keep(trial: TrialFolder, attempt: int, failure: Failure) -> None:
    folder = trial.failures(attempt)
    make_folders(folder)
    path = folder / f"{_name(failure)}.json"
    if not path.exists():  # the first failure of a rank is the cause of its later ones
        write_json(path, asdict(failure))


def _name(failure: Failure) -> str:
    if failure.unhealthy or failure.node_lost:
        return f"node-{failure.host}"
    return f"rank-{failure.rank}" if failure.rank is not None else f"entrypoint-{failure.host}-{os.getpid()}"


def failure_now(rank: int | None, message: str, **details: object) -> Failure:
    """Return a failure on this host with the current time; `details` are other fields of Failure."""
    return Failure(rank=rank, host=socket.gethostname(), time=time.time(), message=message, **details)  # type: ignore[arg-type]


@contextmanager
def mistakes_noted(trial: TrialFolder, attempt: int) -> Iterator[None]:
    """Record a UsageError that leaves this block as a permanent failure of the attempt, and re-raise it."""
    try:
        yield
    except UsageError as error:
        note_failure(trial, attempt, failure_now(None, str(error), user_error=True))
        raise


def first_failure(trial: TrialFolder, attempt: int) -> Failure | None:
    """Return the failure that caused the others, or None if there is none. Raises DamagedFile.

    It is the earliest one, with exceptions for failures that are often recorded after their consequences.
    """
    found = failures(trial, attempt)
    if not found:
        return None
    # These end the whole gang, so all other failures are their consequences.
    if verdict := next((each for each in found if each.unhealthy or each.hung or each.disk_full), None):
        return verdict
    # The failure of a lost process or node is recorded by its agent or its peers, so later than its consequences.
    together = [failure for failure in found if failure.time <= found[0].time + COLLATERAL_S]
    if lost_node := next((failure for failure in together if failure.node_lost), None):
        return lost_node
    # One mpirun or srun started all ranks: when one fails, it kills the others, so lost ranks are a consequence.
    if trial.launcher(attempt, 0).exists():
        return found[0]
    # Otherwise a lost rank is the cause of the errors that other ranks have in their collectives.
    return next((failure for failure in together if failure.lost), found[0])


def failures(trial: TrialFolder, attempt: int) -> list[Failure]:
    """Return all failures of an attempt, earliest first. Raises DamagedFile."""
    notes = ((path, read_json(path)) for path in trial.failures(attempt).glob("*.json"))
    return sorted((made(Failure, data, path) for path, data in notes if data), key=lambda failure: failure.time)
