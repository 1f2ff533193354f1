"""Why a gang could not go on, told apart: each kind has its own budget. And how a driver leaves.

A user's exception is raised at once and never tried again. The death of a rank, an agent or a node, a gang that hangs
and one whose ranks cannot talk to each other cost one of `max_retries`. What a scheduler takes away costs nothing: it
may come as often as it likes. Where all that held the state are gone, nothing is tried again.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

import cloudpickle

from hpc_det.errors import HpcDetError
from hpc_det.node.process import exit_code
from hpc_det.schedulers.scheduler import CommandError, Run, run_command
from hpc_det.schedulers.slurm.answers import local_time, shown
from hpc_det.schedulers.slurm.scheduler import Slurm, was_requeued

if TYPE_CHECKING:
    from hpc_det.sgd.driver.nodes import GangNode

COLLATERAL_S = 2.0
"""How long an error that a peer's end may have caused waits for news of such an end."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0

TEMPORARY = 75
"""sysexits.h, EX_TEMPFAIL: to be tried again."""

_OF_A_PEER = (
    "gloo",
    "nccl",
    "connection closed",
    "connection reset",
    "broken pipe",
    "timed out",
    "diststore",
    "distbackend",
)

_OF_TORCH = ("DistError", "DistBackendError", "DistNetworkError", "DistStoreError")


class GangLost(HpcDetError):
    """The ranks of this generation cannot go on: what they do can be tried again from the last snapshot."""

    counts = True
    """Against `max_retries`."""

    def __init__(self, problem: str, node: GangNode | None = None) -> None:
        """`node`: whose ranks are the cause, where that is known."""
        super().__init__(problem)
        self.node = node


class RankDied(GangLost):
    """A process, by itself or by a signal."""


class NodeLost(GangLost):
    """An agent, or all of its node."""


class Hung(GangLost):
    """All ranks are there, and none gets on."""


class NotConnected(GangLost):
    """All ranks are there, and cannot talk to each other any more: a network that failed for a while, a GPU."""


class Preempted(GangLost):
    """By a scheduler that had told so."""

    counts = False


class StateLost(HpcDetError, RuntimeError):
    """There is nothing left that could be tried again: no node holds the newest snapshot, and the disk has none."""


class RetriesUsedUp(HpcDetError, RuntimeError):
    """RaySGD raises RuntimeError."""


class NotEnoughRanks(HpcDetError, TimeoutError):
    """RaySGD raises TimeoutError."""


def pause_s(failures_in_a_row: int) -> float:
    """Before the next try: 1 s, 2 s, 4 s, ... The first failure is not waited for."""
    return 0.0 if failures_in_a_row < 2 else min(FIRST_PAUSE_S * 2.0 ** (failures_in_a_row - 2), LONGEST_PAUSE_S)


# --- exceptions of ranks


class Raised(NamedTuple):
    """What a rank says of an exception."""

    rank: int
    said: str
    traceback: str
    pickled: bytes

    @property
    def may_be_of_a_peer(self) -> bool:
        """Whether it is what gloo, NCCL and torch's stores say when a peer is gone."""
        said = self.said.lower()
        return any(word in said for word in _OF_A_PEER)

    @property
    def is_of_the_gang(self) -> bool:
        """Whether gloo, NCCL or a store of torch's says it, and not the user's code, where connections break, too."""
        kind, _, words = self.said.partition(":")
        return kind in _OF_TORCH or (kind == "RuntimeError" and any(word in words.lower() for word in ("gloo", "nccl")))

    def error(self, log: Path) -> Exception:
        """The user's own exception where it could travel, with the rank's traceback as its cause."""
        error = self._unpickled() or RuntimeError(f"rank {self.rank}: {self.said}")
        error.__cause__ = RankTraceback(f"rank {self.rank}, log {log}:\n{self.traceback}")
        return error

    def _unpickled(self) -> Exception | None:
        with suppress(Exception):
            error = cloudpickle.loads(self.pickled)
            return error if isinstance(error, Exception) else None
        return None


def root_of(errors: Iterable[Raised]) -> Raised:
    """The lowest rank's that no peer can have caused, else the first that came."""
    found = list(errors)
    own = sorted((error for error in found if not error.may_be_of_a_peer), key=lambda error: error.rank)
    return (own or found)[0]


class RankTraceback(Exception):  # the cause of a user's exception, as concurrent.futures has one
    """Where in a rank the exception was raised."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


# --- how a driver leaves: the scheduler takes all nodes of its job, or it is in no job and gets a TERM


class JobLeaves(SystemExit):
    """The training goes on when the program is started again: `with` blocks and `finally` run, and then it ends."""

    def __init__(self) -> None:
        super().__init__(TEMPORARY)


def back_into_queue(env: Mapping[str, str], run: Run = run_command) -> str:
    """What becomes of the job, in words. A job of Slurm's is put back, unless somebody has cancelled it: one that ends
    within its grace time by itself is COMPLETED there (Slurm 22.05, measured).
    """
    if "SLURM_JOB_ID" not in env:
        return "start the program again with the same run, and it goes on"
    job_id = Slurm().job_id(env)
    try:
        job = shown(job_id, run)
        comes_back = local_time(job.get("PreemptTime")) is not None or was_requeued(job, env)
        if not comes_back and job.get("JobState") in ("COMPLETING", "CANCELLED"):
            return f"job {job_id} was cancelled; submit it again with the same run, and it goes on"
        if job.get("Requeue") == "0":
            return f"job {job_id} stays out of the queue, as it was submitted; whoever submitted it may do so again"
        Slurm().requeue(job_id, env, run)
    except CommandError as error:
        return f"job {job_id} could not be requeued: {error}; submit it again with the same run, and it goes on"
    return f"job {job_id} goes back into the queue"


def exit_at_term() -> None:
    """From now on a TERM ends the program as `sys.exit` does, which shuts its trainers down. A handler of the program's
    own stays.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit)
        os.register_at_fork(after_in_child=_end_at_term)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(exit_code(-number))


def _end_at_term() -> None:
    """A DataLoader's worker, or another child, has no trainer."""
    if signal.getsignal(signal.SIGTERM) is _exit:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
