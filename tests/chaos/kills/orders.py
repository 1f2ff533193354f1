"""Orders to kill: files in a folder that all processes of the experiments under test see."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FOLDER = "HPC_DET_TEST_KILLS"
"""The environment variable with the path of the folder. It also marks all processes that a killed experiment might
leave behind.
"""


@dataclass(frozen=True)
class Moment:
    """The start or the end of the n-th call of a function in one process."""

    function: str
    """`module:Class.function`"""
    after: bool = False
    count: int = 1
    rank: int | None = None
    """If set, only the process of this rank counts."""

    def __str__(self) -> str:
        place = "after" if self.after else "before"
        rank = "" if self.rank is None else f" of rank {self.rank}"
        return f"{place} call {self.count} of {self.function.rpartition(':')[2]}{rank}"


@dataclass(frozen=True)
class Order:
    moment: Moment
    victims: tuple[str, ...]
    """Kinds of victims (see `victims.Processes.victims`), in the order in which they are killed."""
    signal: int
    stops_first: bool = False
    """Stop all victims before the first is killed, so that none can react to the end of another."""
    stays: bool = False
    """The process of the moment waits after the kill until it is ended."""
    at_once: bool = False
    """The order may follow the one before it in the same attempt. Otherwise it waits for the next attempt."""


def write(folder: Path, orders: Sequence[Order]) -> None:
    for number, order in enumerate(orders):
        (folder / f"{number}.json").write_text(json.dumps(asdict(order)))


def of(folder: Path) -> list[Order]:
    paths = sorted(folder.glob("*.json"), key=lambda path: int(path.stem))
    return [_parsed(json.loads(path.read_text())) for path in paths]


def _parsed(data: dict[str, Any]) -> Order:
    return Order(**{**data, "moment": Moment(**data["moment"]), "victims": tuple(data["victims"])})


def claim(folder: Path, number: int) -> bool:
    """Return whether this process must carry the order out: only one process does at a time. The claim ends with its
    process, which may be killed by the order before.
    """
    path = folder / f"{number}.claimed"
    with _lock:
        if path in _claimed or not _locks(path):
            return False
        _claimed.add(path)
    return not (folder / f"{number}.done").exists()


_lock = threading.Lock()
_claimed: set[Path] = set()
"""The claims of this process."""


def _locks(path: Path) -> bool:
    """Lock a file until this process ends (fcntl(2): a process that it forks does not hold the lock)."""
    file = os.open(path, os.O_CREAT | os.O_WRONLY)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return False
    return True


def note_done(folder: Path, number: int, **facts: Any) -> None:
    path = folder / f"{number}.done"
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps(facts))
    temporary.rename(path)


def done(folder: Path) -> list[dict[str, Any]]:
    """Return the noted facts of each order, in order."""
    paths = sorted(folder.glob("*.done"), key=lambda path: int(path.stem))
    return [json.loads(path.read_text()) for path in paths]
