"""Whose run it is: one driver's at a time, on whatever machine.

Claims are numbered, and the highest counts. Each is made by link(2), which succeeds for one process only, and only by
one that has found the claim before it withdrawn, or its driver dead. So a driver that was KILLed keeps nobody out, and
of several that find it dead at the same time one comes next. The number of a claim is never given again.
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_det.errors import UsageError
from hpc_det.node.files import write_first
from hpc_det.node.json_files import read_json, write_json
from hpc_det.node.process import is_running, start_ticks
from hpc_det.sgd.elastic.meeting import Driver, answers
from hpc_det.store.run_folder import RunFolder


@dataclass(frozen=True)
class Claim:
    run: RunFolder
    number: int

    def withdraw(self) -> None:
        """The run is nobody's now. The file stays: whoever is slow shall not take its number."""
        with suppress(FileNotFoundError):  # the whole run is gone
            write_json(_path(self.run, self.number), {})


def claim(run: RunFolder, driver: Driver) -> Claim:
    """For a driver that listens there already: others ask it. Raises UsageError where another one has the run."""
    number = _highest(run)
    process = {"machine": socket.gethostname(), "pid": os.getpid(), "ticks": start_ticks(os.getpid())}
    while True:
        check_free(run, number)
        number += 1
        if write_first(_path(run, number), json.dumps({**driver._asdict(), **process})):
            if (highest := _highest(run)) == number:
                break
            _path(run, number).unlink(missing_ok=True)  # its number was over long ago
            number = highest
    for former in _numbers(run):
        if former < number:
            _path(run, former).unlink(missing_ok=True)
    return Claim(run, number)


def check_free(run: RunFolder, number: int | None = None) -> None:
    """Raises UsageError where the driver of the claim with this number, the highest if None, still lives."""
    found = read_json(_path(run, _highest(run) if number is None else number))
    if found and _lives(run, found):
        raise UsageError(
            f"{run.path}: another program drives this run, on {found['host']}:{found['port']}; wait for it, or name "
            "another run"
        )


def is_abandoned(run: RunFolder) -> bool:
    """Whether its driver has died without a word; of one on another machine that is never sure."""
    found = read_json(_path(run, _highest(run)))
    return found is not None and found.get("machine") == socket.gethostname() and not _lives(run, found)


def _lives(run: RunFolder, found: dict[str, Any]) -> bool:
    """A process of this machine may be too busy to answer. Of another one no more than the answer can be known."""
    is_here = found["machine"] == socket.gethostname()
    return (is_here and is_running(found["pid"], found["ticks"])) or answers(run, Driver(found["host"], found["port"]))


def _highest(run: RunFolder) -> int:
    return max(_numbers(run), default=0)


def _numbers(run: RunFolder) -> list[int]:
    with suppress(FileNotFoundError):  # the whole run is gone
        return [int(path.stem) for path in run.drivers.iterdir() if path.stem.isdecimal()]
    return []


def _path(run: RunFolder, number: int) -> Path:
    return run.drivers / f"{number}.json"
