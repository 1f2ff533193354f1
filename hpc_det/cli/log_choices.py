"""What `experiment logs` and `trial logs` take on the command line."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from datetime import datetime

import click

from hpc_det.cli.output import Output, output_options
from hpc_det.cli.parameters import bundle
from hpc_det.errors import UsageError
from hpc_det.view.logs.levels import LEVELS

_COUNT = click.IntRange(min=0)
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_AGE = re.compile(r"(\d{1,9})([smhdw])")


@dataclass(frozen=True, kw_only=True)
class LogChoices:
    """Which lines are shown, and how."""

    follow: bool = False
    rank: int | None = None
    head: int | None = None
    tail: int | None = None
    level: str | None = None
    since: float | None = None
    timestamps: bool = False
    output: Output

    def __post_init__(self) -> None:
        if self.head is not None and self.tail is not None:
            raise UsageError(f"--head {self.head}: --tail {self.tail} was given, too; give one of them")


def moment(text: str) -> float:
    """A moment or an age on the command line: seconds since the epoch."""
    if age := _AGE.fullmatch(text):
        return time.time() - int(age[1]) * _UNITS_S[age[2]]
    try:
        return datetime.fromisoformat(re.sub("Z$", "+00:00", text)).timestamp()
    except (ValueError, OverflowError):
        expected = "expected one such as 2026-11-20T10:00, or an age such as 10m, 2h or 1d"
        raise click.BadParameter(f"{text!r} is no time; {expected}") from None


log_options = bundle(
    "choices",
    LogChoices,
    click.option("-f", "--follow", is_flag=True, help="Go on until the end, across requeues and pauses."),
    click.option("--rank", "--rank-id", "rank", type=int, metavar="R", help="Only the lines of this rank."),
    click.option("--head", type=_COUNT, metavar="N", help="Only the first N lines."),
    click.option("--tail", type=_COUNT, metavar="N", help="Only the last N lines, and those to come."),
    click.option("--level", type=click.Choice(LEVELS, case_sensitive=False), help="Only lines of this level or above."),
    click.option("--since", type=moment, metavar="TIME", help="Only lines since then: a moment, or 10m, 2h, 1d ago."),
    click.option("-T", "--timestamps", is_flag=True, help="Begin each line with the time when it was written."),
    output_options,
)
"""The command gets one argument `choices` for all the flags."""
