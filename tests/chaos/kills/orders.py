"""What is to be killed when: files of a folder, which all processes of the experiments under test see."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FOLDER = "HPC_DET_TEST_KILLS"
"""The variable that names it. It also marks all processes that a killed experiment might leave behind."""


@dataclass(frozen=True)
class Moment:
    """The n-th call of a function in one process begins, or has ended."""

    function: str
    """`module:Class.function`"""
    after: bool = False
    count: int = 1
    rank: int | None = None
    """Only in the process of this rank."""

    def __str__(self) -> str:
        place = "after" if self.after else "before"
        rank = "" if self.rank is None else f" of rank {self.rank}"
        return f"{place} call {self.count} of {self.function.rpartition(':')[2]}{rank}"


@dataclass(frozen=True)
class Order:
    moment: Moment
    victims: tuple[str, ...]
    """As `victims.KINDS` has them, or "self"; they are killed in this order."""
    signal: int
    stops_first: bool = False
    """All victims are stopped before the first of them is killed: none can react to the end of another."""
    stays: bool = False
    """The process of the moment goes no further: it waits until somebody ends it."""
    at_once: bool = False
    """It may follow the order before it in the same attempt. Otherwise it waits for the next one."""


def write(folder: Path, orders: Sequence[Order]) -> None:
    for number, order in enumerate(orders):
        (folder / f"{number}.json").write_text(json.dumps(asdict(order)))


def of(folder: Path) -> list[Order]:
    paths = sorted(folder.glob("*.json"), key=lambda path: int(path.stem))
    return [_parsed(json.loads(path.read_text())) for path in paths]


def _parsed(data: dict[str, Any]) -> Order:
    return Order(**{**data, "moment": Moment(**data["moment"]), "victims": tuple(data["victims"])})


def claim(folder: Path, number: int) -> bool:
    """Whether this process carries it out: only one does."""
    with suppress(FileExistsError):
        os.close(os.open(folder / f"{number}.claimed", os.O_CREAT | os.O_EXCL))
        return True
    return False


def note_done(folder: Path, number: int, **facts: Any) -> None:
    path = folder / f"{number}.done"
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps(facts))
    temporary.rename(path)


def done(folder: Path) -> list[dict[str, Any]]:
    """What was noted of each, in turn."""
    paths = sorted(folder.glob("*.done"), key=lambda path: int(path.stem))
    return [json.loads(path.read_text()) for path in paths]
