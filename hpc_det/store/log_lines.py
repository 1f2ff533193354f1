"""The lines that a job prints of itself, and how they are known again among all that stands in its logs."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from hpc_det.node.files import is_shared, let_group_read, open_log
from hpc_det.store.log_times import LogTimes

_ANY = r"hpc-det: \d\d:\d\d:\d\d "
ATTEMPT_BEGINS = re.compile(_ANY + r"attempt (\d+) begins")
"""The whole line; the log of a trial's attempts is one file for all of them."""
OF_WORKER = re.compile(_ANY + r"worker \d+: ")
"""The beginning of each line of a worker."""


def say(text: str) -> None:
    with suppress(OSError):  # on a full disk the job goes on
        print(f"hpc-det: {time.strftime('%H:%M:%S')} {text}", flush=True)


def say_attempt_begins(number: int) -> None:
    say(f"attempt {number} begins")


def say_of_worker(number: int, text: str) -> None:
    say(f"worker {number}: {text}")


def share_own_log(folder: Path) -> None:
    """Schedulers make a job's log by the umask of its submission. Of a job that prints into a file of `folder`."""
    if is_shared(folder) and Path(os.readlink("/proc/self/fd/1")).parent == folder.resolve():
        let_group_read(1)


@contextmanager
def printed_to(path: Path) -> Iterator[None]:
    """What this process and its children print. When is noted at the begin and at the end; in between, agents do it."""
    note_time(path)
    former = os.dup(1), os.dup(2)
    descriptor = open_log(path)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
    try:
        yield
    finally:
        for standard, before in zip((1, 2), former, strict=True):
            os.dup2(before, standard)
            os.close(before)
        note_time(path)


def note_time(path: Path) -> None:
    """When the log was written last."""
    with closing(LogTimes(path)) as times:
        times.look()
