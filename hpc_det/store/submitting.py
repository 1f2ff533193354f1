"""Which process submits the jobs of an experiment: a file that is there from before the scheduler is asked until its
answer is on disk. Where the process is gone and the file is not, the submission was interrupted.

{"host": "login1", "place": "login1-0b5e8a21-4026531836", "pid": 4711, "ticks": 90210, "started": 1700000000.0,
 "first_script": 1, "before": 0}

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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType

from hpc_det.errors import HpcDetError, UsageError
from hpc_det.node import disk
from hpc_det.node.files import age_s, write_first
from hpc_det.node.json_files import made, read_json, write_json
from hpc_det.node.process import is_running, process_namespace, start_ticks
from hpc_det.store.folders import ExperimentFolder

LONGEST_CALL_S = 1800.0
"""A submitter at another place counts as gone when it has made no call of the scheduler for so long."""


class Unsettled(HpcDetError):
    """Whether the scheduler has queued jobs is unknown: the file of the submitter stays, and the submission counts as
    interrupted.
    """


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
    place: str = ""
    """What `pid` and `ticks` are of: `hpc_det.node.process.process_namespace`. Empty: of an older version, anywhere."""
    has_left: bool = False
    """It submits nothing any more, although the process may be there."""

    @classmethod
    def here(cls, first_script: int = 1, before: int = 0) -> Submitter:
        """This process."""
        return cls(
            host=socket.gethostname(),
            place=process_namespace(),
            pid=os.getpid(),
            ticks=start_ticks(os.getpid()),
            started=time.time(),
            first_script=first_script,
            before=before,
        )

    @property
    def is_this_process(self) -> bool:
        return (self.place, self.pid, self.ticks) == (process_namespace(), os.getpid(), start_ticks(os.getpid()))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def submitter_of(experiment: ExperimentFolder) -> Submitter | None:
    """The process that submits jobs of this experiment or was interrupted; None where there is none."""
    return _noted(experiment.submitting)


def _noted(path: Path) -> Submitter | None:
    try:
        data = read_json(path)
    except PermissionError:  # somebody else's experiment
        return None
    return made(Submitter, data, path) if data else None


def is_gone(experiment: ExperimentFolder, submitter: Submitter) -> bool:
    """Whether the submitter has ended. That at another place has where it made no call for LONGEST_CALL_S."""
    return _has_ended(submitter, experiment.submitting)


def _has_ended(process: Submitter, noted: Path) -> bool:
    if process.has_left:
        return True
    if process.place == process_namespace():
        return not is_running(process.pid, process.ticks)
    return age_s(noted) > LONGEST_CALL_S


def note_call(experiment: ExperimentFolder) -> None:
    """This process is about to call the scheduler. Raises UsageError where it was taken for gone meanwhile, as one
    that was stopped for long is on another host: its jobs are settled.
    """
    submitter = submitter_of(experiment)
    if submitter is None or not submitter.is_this_process:
        raise UsageError(
            f"experiment {experiment.id}: this process was silent for so long that another command has ended its "
            f"submission; see `hpc-det experiment describe {experiment.id}`, then try again"
        )
    os.utime(experiment.submitting)


@contextmanager
def settling(experiment: ExperimentFolder) -> Iterator[bool]:
    """Whether this process alone brings an interrupted submission to its end; what a killed one has left of that is
    no hindrance.
    """
    path = experiment.settling
    former = _noted(path)
    if former and _has_ended(former, path):
        disk.unlink(path, missing_ok=True)
    if not write_first(path, json.dumps(asdict(Submitter.here()))):
        yield False
        return
    try:
        yield True
    finally:
        disk.unlink(path, missing_ok=True)


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
    submitter = Submitter.here(first_script, before)
    with _signals_raise():
        if not write_first(experiment.submitting, json.dumps(asdict(submitter))):
            raise UsageError(
                f"experiment {experiment.id}: {submitter_of(experiment) or 'another process'} is submitting its jobs; "
                f"try again when it has ended"
            )
        try:
            yield
            disk.unlink(experiment.submitting, missing_ok=True)
        except Unsettled:
            with suppress(OSError):  # then it counts as gone when this process ends
                write_json(experiment.submitting, asdict(replace(submitter, has_left=True)))
            raise
        except BaseException:
            disk.unlink(experiment.submitting, missing_ok=True)
            raise


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
