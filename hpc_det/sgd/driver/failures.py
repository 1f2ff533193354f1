"""The kinds of failures of a gang, and the exit of the driver when its job is taken away.

An exception of the user's code is raised at once and not retried. The death of a rank, an agent or a node, a hung gang,
and ranks that cannot communicate each use up one of `max_retries`. Preemptions by the scheduler are retried without
limit. If all nodes that held the state are lost, and none is on disk, nothing is retried.
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
"""Seconds for which an exception that a peer's death may have caused is held back, so that the death is raised if it is
reported meanwhile.
"""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Seconds to wait before the second retry in a row, and the limit of the pauses, which double with each later retry."""

TEMPORARY = 75
"""Exit code of a driver whose job is taken away: EX_TEMPFAIL of sysexits.h, a failure after which to try again."""

# Words in the messages of gloo, NCCL and torch's stores when the connection to a peer has failed, in lower case.
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

# Exception types of torch.distributed, which the user's own code does not raise.
_OF_TORCH = ("DistError", "DistBackendError", "DistNetworkError", "DistStoreError")


class GangLost(HpcDetError):
    """The ranks of this generation cannot continue; their call can be retried from the newest snapshot."""

    counts = True
    """Whether the failure counts against `max_retries`."""

    def __init__(self, problem: str, node: GangNode | None = None) -> None:
        """`node`: the node whose ranks caused the failure; None if it is not known."""
        super().__init__(problem)
        self.node = node


class RankDied(GangLost):
    """A rank's process exited, was killed by a signal, or does not respond."""


class NodeLost(GangLost):
    """A node agent, or its whole node, was lost."""


class Hung(GangLost):
    """All ranks are alive, but make no progress."""


class NotConnected(GangLost):
    """All ranks are alive, but their collectives fail: the network was interrupted, or a GPU failed."""


class Preempted(GangLost):
    """The scheduler took a node away, after it had announced that."""

    counts = False


class StateLost(HpcDetError, RuntimeError):
    """No node holds the newest snapshot any more, and no snapshot is on disk, so that nothing can be retried."""


class RetriesUsedUp(HpcDetError, RuntimeError):
    """A call failed more often than `max_retries` allows. Also a RuntimeError, which RaySGD raises."""


class NotEnoughRanks(HpcDetError, TimeoutError):
    """Fewer ranks than required started in time. Also a TimeoutError, which RaySGD raises."""


def pause_s(failures_in_a_row: int) -> float:
    """Return the seconds to wait before the next retry: none after the first failure, then 1, 2, 4, ... up to 60."""
    return 0.0 if failures_in_a_row < 2 else min(FIRST_PAUSE_S * 2.0 ** (failures_in_a_row - 2), LONGEST_PAUSE_S)


# --- exceptions of ranks


class Raised(NamedTuple):
    """An exception that a rank has reported."""

    rank: int
    said: str
    """Type and message of the exception, as "TYPE: MESSAGE"."""
    traceback: str
    pickled: bytes
    """The pickled exception; empty if it cannot be pickled."""

    @property
    def may_be_of_a_peer(self) -> bool:
        """True if the message is like those of gloo, NCCL and torch's stores after a peer has exited."""
        said = self.said.lower()
        return any(word in said for word in _OF_A_PEER)

    @property
    def is_of_the_gang(self) -> bool:
        """True if gloo, NCCL or a store of torch has raised it; False for a broken connection in the user's code."""
        kind, _, words = self.said.partition(":")
        return kind in _OF_TORCH or (kind == "RuntimeError" and any(word in words.lower() for word in ("gloo", "nccl")))

    def error(self, log: Path) -> Exception:
        """Return the exception to raise in the driver, with the rank's traceback as its cause.

        It is the rank's own exception, or a RuntimeError with its message if it could not be pickled.
        """
        error = self._unpickled() or RuntimeError(f"rank {self.rank}: {self.said}")
        error.__cause__ = RankTraceback(f"rank {self.rank}, log {log}:\n{self.traceback}")
        return error

    def _unpickled(self) -> Exception | None:
        """Return the rank's exception; None if it cannot be unpickled, or would end the driver, as SystemExit would."""
        with suppress(Exception):
            error = cloudpickle.loads(self.pickled)
            return error if isinstance(error, Exception) else None
        return None


def root_of(errors: Iterable[Raised]) -> Raised:
    """Return the exception that is most likely the cause of the others.

    It is that of the lowest rank among those that no peer's exit can have caused, else the first one received.
    """
    found = list(errors)
    own = sorted((error for error in found if not error.may_be_of_a_peer), key=lambda error: error.rank)
    return (own or found)[0]


class RankTraceback(Exception):  # modelled on the remote traceback of concurrent.futures
    """The cause of an exception that a rank has raised: the traceback in the rank's process."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


# --- exit of the driver: the scheduler takes all nodes of its job, or SIGTERM arrives outside of any job


class JobLeaves(SystemExit):
    """The driver exits with code 75 because its job is taken away; a restarted program continues the training.

    It is a SystemExit, so that `with` blocks and `finally` clauses run.
    """

    def __init__(self) -> None:
        super().__init__(TEMPORARY)


def back_into_queue(env: Mapping[str, str], run: Run = run_command) -> str:
    """Requeue the Slurm job of this driver, unless it was cancelled; return a text for the log about its future."""
    if "SLURM_JOB_ID" not in env:
        return "start the program again with the same run, and it continues"
    job_id = Slurm().job_id(env)
    try:
        # Needed even after a preemption: a job that exits within its grace time is COMPLETED (Slurm 22.05, measured).
        job = shown(job_id, run)
        comes_back = local_time(job.get("PreemptTime")) is not None or was_requeued(job, env)
        if not comes_back and job.get("JobState") in ("COMPLETING", "CANCELLED"):
            return f"job {job_id} was cancelled; submit it again with the same run, and it continues"
        if job.get("Requeue") == "0":
            return f"job {job_id} may not be requeued (Requeue=0); submit it again with the same run, and it continues"
        Slurm().requeue(job_id, env, run)
    except CommandError as error:
        return f"job {job_id} could not be requeued: {error}; submit it again with the same run, and it continues"
    return f"job {job_id} is requeued"


def exit_at_term() -> None:
    """Let SIGTERM end the program as `sys.exit` does, which shuts its trainers down.

    Nothing changes if the program has its own handler, or if this is not the main thread.
    """
    # Python allows only the main thread to set signal handlers.
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit)
        os.register_at_fork(after_in_child=_end_at_term)


_terminated = threading.Event()


def was_terminated() -> bool:
    """Return whether SIGTERM ends this program (`exit_at_term`)."""
    return _terminated.is_set()


def _exit(number: int, frame: FrameType | None) -> None:
    _terminated.set()
    raise SystemExit(exit_code(-number))


def _end_at_term() -> None:
    """Restore the default action in a forked child, such as a DataLoader worker, which has no trainer to shut down."""
    if signal.getsignal(signal.SIGTERM) is _exit:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
