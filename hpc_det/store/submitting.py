"""Which process submits the jobs of an experiment: a file that is there from before the scheduler is asked until its
answer is on disk. Where the process is gone and the file is not, the submission was interrupted.

{"host": "login1", "pid": 4711, "ticks": 90210, "started": 1700000000.0, "first_script": 1, "before": 0}

The time of the file is that of the last call of the scheduler.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from types import FrameType

from hpc_det.errors import UsageError
from hpc_det.process import is_running, start_ticks
from hpc_det.store import disk
from hpc_det.store.files import read_json, write_first, write_json
from hpc_det.store.folders import ExperimentFolder

LONGEST_CALL_S = 1800.0
"""A submitter on another host counts as gone when it has made no call of the scheduler for so long."""


@dataclass(frozen=True, kw_only=True)
class Submitter:
    host: str
    pid: int
    ticks: int
    """When the process started, in clock ticks since boot."""
    started: float
    """When the submission began, in seconds since the epoch."""
    first_script: int
    """It submits this script and those with higher numbers."""
    before: int
    """How often jobs of the experiment were submitted before: `SearchState.submissions`."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def submitter_of(experiment: ExperimentFolder) -> Submitter | None:
    """The process that submits jobs of this experiment or was interrupted; None where there is none."""
    try:
        data = read_json(experiment.submitting)
    except PermissionError:  # somebody else's experiment
        return None
    return Submitter(**data) if data else None


def is_gone(experiment: ExperimentFolder, submitter: Submitter) -> bool:
    """Whether the submitter has ended. That of another host has where it made no call for LONGEST_CALL_S."""
    if submitter.host == socket.gethostname():
        return not is_running(submitter.pid, submitter.ticks)
    return age_s(experiment) > LONGEST_CALL_S


def age_s(experiment: ExperimentFolder) -> float:
    """Seconds since the submitter called the scheduler last; infinity where there is no submitter."""
    try:
        return time.time() - experiment.submitting.stat().st_mtime
    except FileNotFoundError:
        return float("inf")


def note_call(experiment: ExperimentFolder) -> None:
    """The scheduler is about to be called."""
    with suppress(FileNotFoundError):
        os.utime(experiment.submitting)


def record_job(
    experiment: ExperimentFolder, script: int, job_id: str, scheduler: str, *, first: int, workers: int
) -> None:
    """The scheduler has taken the script as this job or array, with so many workers, numbered from `first`."""
    record = {"job_id": job_id, "scheduler": scheduler, "submitted": time.time()}
    write_json(experiment.job(script), {**record, "first": first, "workers": workers})


@contextmanager
def submitting(experiment: ExperimentFolder, *, first_script: int = 1, before: int = 0) -> Iterator[None]:
    """Note that this process submits jobs of `experiment` until the block ends: see the fields of a Submitter.

    TERM and HUP raise an exception in the block, so that it can clean up. Raises UsageError where another process
    submits jobs of the same experiment.
    """
    submitter = Submitter(
        host=socket.gethostname(),
        pid=os.getpid(),
        ticks=start_ticks(os.getpid()),
        started=time.time(),
        first_script=first_script,
        before=before,
    )
    with _signals_raise():
        if not write_first(experiment.submitting, json.dumps(asdict(submitter))):
            raise UsageError(
                f"experiment {experiment.id}: {submitter_of(experiment) or 'another process'} is submitting its jobs; "
                f"try again when it has ended"
            )
        try:
            yield
        finally:
            disk.unlink(experiment.submitting, missing_ok=True)


@contextmanager
def _signals_raise() -> Iterator[None]:
    """TERM and HUP raise SystemExit, as INT raises KeyboardInterrupt, where they would end the process at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    mine = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in mine:
        signal.signal(number, _leave)
    try:
        yield
    finally:
        for number in mine:
            signal.signal(number, signal.SIG_DFL)


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
