"""The process that submits the jobs of an experiment, recorded in a file.

The file exists from before the first call of the scheduler until its answer is on disk. If the file exists and the
process has exited, the submission was interrupted.

{"host": "login1", "place": "login1-0b5e8a21-4026531836", "pid": 4711, "ticks": 90210, "started": 1700000000.0,
 "first_script": 1, "before": 0}

The modification time of the file is the time of the last call of the scheduler.
"""

from __future__ import annotations

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
from hpc_det.node.json_files import json_text, made, read_json, write_json
from hpc_det.node.process import is_running, process_namespace, start_ticks
from hpc_det.store.folders import ExperimentFolder

LONGEST_CALL_S = 1800.0
"""Seconds since the last call of the scheduler after which a submitter on another host counts as exited."""


class Unsettled(HpcDetError):
    """It is unknown whether the scheduler has queued jobs.

    The file of the submitter stays, and the submission counts as interrupted.
    """


@dataclass(frozen=True, kw_only=True)
class Submitter:
    """A process that submits jobs, or that completes an interrupted submission."""

    host: str
    pid: int
    ticks: int
    """Start of the process, in clock ticks since boot; a later process with the same pid has another one."""
    started: float
    """Beginning of the submission, in seconds since the epoch."""
    first_script: int
    """Number of the first script that it submits; it submits this and higher ones."""
    before: int
    """Number of earlier submissions of the experiment: `SearchState.submissions`."""
    place: str = ""
    """`hpc_det.node.process.process_namespace` of `pid` and `ticks`; empty: unknown, in files of older versions."""
    has_left: bool = False
    """True if it submits nothing any more, although the process may still run."""

    @classmethod
    def here(cls, first_script: int = 1, before: int = 0) -> Submitter:
        """Return the submitter for this process."""
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
    """Return the process that submits jobs of this experiment or was interrupted; None: there is none."""
    return _noted(experiment.submitting)


def _noted(path: Path) -> Submitter | None:
    try:
        data = read_json(path)
    except PermissionError:  # an experiment of another user
        return None
    return made(Submitter, data, path) if data else None


def is_gone(experiment: ExperimentFolder, submitter: Submitter) -> bool:
    """Return whether the submitter has exited or, on another host, has made no call for LONGEST_CALL_S."""
    return _has_ended(submitter, experiment.submitting)


def _has_ended(process: Submitter, noted: Path) -> bool:
    if process.has_left:
        return True
    if process.place == process_namespace():
        return not is_running(process.pid, process.ticks)
    return age_s(noted) > LONGEST_CALL_S  # processes of another host cannot be queried


def note_call(experiment: ExperimentFolder) -> None:
    """Record that this process is about to call the scheduler.

    Raises UsageError if another process has completed this submission, because this one was taken for exited.
    """
    # Possible if this process was stopped for longer than LONGEST_CALL_S
    submitter = submitter_of(experiment)
    if submitter is None or not submitter.is_this_process:
        raise UsageError(
            f"experiment {experiment.id}: this process was stopped for too long, and another command has taken it for "
            f"dead and ended its submission; see `hpc-det experiment describe {experiment.id}`, then try again"
        )
    os.utime(experiment.submitting)


@contextmanager
def settling(experiment: ExperimentFolder) -> Iterator[bool]:
    """Yield True if this process may complete an interrupted submission; False if another process does that now."""
    path = experiment.settling
    former = _noted(path)
    # Left by a process that was killed while it completed the submission
    if former and _has_ended(former, path):
        disk.unlink(path, missing_ok=True)
    if not write_first(path, json_text(path, asdict(Submitter.here()))):
        yield False
        return
    try:
        yield True
    finally:
        disk.unlink(path, missing_ok=True)


def record_job(
    experiment: ExperimentFolder, script: int, job_id: str, scheduler: str, *, first: int, workers: int
) -> None:
    """Record that the scheduler accepted a script as job or array `job_id`.

    `script`: its number. `workers`: number of its workers, which are numbered from `first`.
    """
    record = {"job_id": job_id, "scheduler": scheduler, "submitted": time.time()}
    write_json(experiment.job(script), {**record, "first": first, "workers": workers})


def unused_job(experiment: ExperimentFolder) -> int:
    """Return the lowest number of a script without a recorded job."""
    number = 1
    while experiment.job(number).exists():
        number += 1
    return number


@contextmanager
def submitting(experiment: ExperimentFolder, *, first_script: int = 1, before: int = 0) -> Iterator[None]:
    """Record that this process submits jobs of `experiment` in this block; see the fields of Submitter.

    SIGTERM and SIGHUP raise SystemExit in the block, so that it can clean up. Raises UsageError if another process
    submits jobs of the same experiment.
    """
    submitter = Submitter.here(first_script, before)
    with _signals_raise():
        if not write_first(experiment.submitting, json_text(experiment.submitting, asdict(submitter))):
            raise UsageError(
                f"experiment {experiment.id}: {submitter_of(experiment) or 'another process'} is submitting its jobs; "
                f"try again when it has exited"
            )
        try:
            yield
            disk.unlink(experiment.submitting, missing_ok=True)
        except Unsettled:
            # `has_left`: another command need not wait for the exit of this process to complete the submission
            with suppress(OSError):  # without it, the submission counts as interrupted when this process exits
                write_json(experiment.submitting, asdict(replace(submitter, has_left=True)))
            raise
        except BaseException:  # also SystemExit of a signal: the block has cleaned up
            disk.unlink(experiment.submitting, missing_ok=True)
            raise


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Have SIGTERM and SIGHUP raise SystemExit in this block, unless the program has its own handlers."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread can set handlers
        yield
        return
    # Handlers of the program, and ignored signals as under nohup, stay as they are
    mine = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in mine:
        signal.signal(number, _leave)
    try:
        yield
    finally:
        for number in mine:
            signal.signal(number, signal.SIG_DFL)


def _leave(number: int, frame: FrameType | None) -> None:
    # The exit code that shells report for a signal
    sys.exit(128 + number)
