"""One attempt of a trial: its environment on every node and rank, the request to stop it, its failures.

A stop request is one small file that names the attempt it is meant for: one that is left over from an earlier attempt
must not stop the next one, so readers compare the attempt. A failure is a small file for each rank or node that failed.
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

COLLATERAL_S = 10.0
"""Seconds. When a rank is killed, its peers' collectives fail within this time, and may be noted before it."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """The environment variables HPC_DET_*: the border between node and rank."""

    folder: str
    """The trial's."""
    number: int
    worker: int
    """Who trains, as the search knows it."""
    node_rank: int
    nodes: int
    ranks_per_node: int
    address: str
    """Of this node, as the others reach it."""
    master_addr: str
    master_port: int
    secret: str
    """Known to the ranks of this attempt alone: it seals the objects that they exchange. Never sent in clear."""
    socket: str
    """The agent's Unix socket in a folder of mode 0700 on this node."""

    @property
    def trial(self) -> TrialFolder:
        return TrialFolder(Path(self.folder))

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    def to_env(self) -> dict[str, str]:
        return {f"HPC_DET_{name.upper()}": str(value) for name, value in vars(self).items()}

    def store_of_ranks(self) -> dict[str, str]:
        """For the ranks of one start of a launcher: the file in which those of one node may meet (see
        hpc_det.distributed.gang_store).
        """
        return {"HPC_DET_STORE": str(Path(self.socket).with_name(f"store-{os.getpid()}"))}

    @staticmethod
    def is_in(env: Mapping[str, str]) -> bool:
        """Whether a process with this environment belongs to an attempt."""
        return "HPC_DET_FOLDER" in env

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Attempt:
        """Raises HpcDetError where no node agent set the variables."""
        try:
            values = {name: env[f"HPC_DET_{name.upper()}"] for name in cls.__dataclass_fields__}
        except KeyError as missing:
            raise HpcDetError(
                f"{missing.args[0]} is not set: this is started by a node agent; create an experiment with "
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


# "signal" is what an agent knows: the scheduler's facts tell preemption and time limit apart afterwards. "time limit"
# comes from the job's own clock; with "pause" and "cancel" the ranks save and leave, with "kill" they are ended.
# "resume check" comes from the ranks themselves, which have stopped to see whether they resume exactly.
Reason = Literal["signal", "time limit", "pause", "cancel", "kill", "resume check"]


@dataclass(frozen=True, kw_only=True)
class StopRequest:
    """Asks the ranks of one attempt to stop."""

    attempt: int | None
    """None: whichever attempt runs or starts next."""
    reason: Reason
    source: str
    """Who asks: a host and a signal, or a command."""
    time: float
    deadline: float | None = None
    """When the ranks will be gone, saved or not; None: unknown. Seconds since the epoch, as `time`."""

    def concerns(self, attempt: int) -> bool:
        return self.attempt is None or self.attempt == attempt


def read_stop(path: Path, attempt: int) -> StopRequest | None:
    """The request that stands for `attempt`."""
    data = read_json(path)
    request = made(StopRequest, data, path) if data else None
    return request if request and request.concerns(attempt) else None


def request_stop(
    path: Path, *, attempt: int | None, reason: Reason, source: str, deadline: float | None = None
) -> StopRequest:
    """Write a request; where one stands already, that one is kept, but `kill` overrules everything."""
    standing = read_stop(path, attempt) if attempt is not None else None
    if standing and reason != "kill":
        return standing
    request = StopRequest(attempt=attempt, reason=reason, source=source, time=time.time(), deadline=deadline)
    write_json(path, asdict(request))
    return request


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What went wrong with a rank or a node."""

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
    """The process exited without reporting a cause: killed from outside, or crashed."""
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
    """A failure on this host at this moment; `details` are other fields of Failure."""
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
    """All of an attempt, the earliest first. Raises DamagedFile."""
    notes = ((path, read_json(path)) for path in trial.failures(attempt).glob("*.json"))
    return sorted((made(Failure, data, path) for path, data in notes if data), key=lambda failure: failure.time)
