"""The end of a log: often all that is known of a program that has failed."""

from __future__ import annotations

import re
import signal
from pathlib import Path

LONGEST_SEARCH, LONGEST_LINE = 16384, 200
"""Bytes at the end of a log that are searched for its last line, and characters of that which are told."""
_ERROR = re.compile(r"[\w.]+(?:Error|Exception|Interrupt): \S")
"""How Python's tracebacks end."""


def size_of(log: Path) -> int:
    """In bytes; 0 before it exists."""
    return log.stat().st_size if log.exists() else 0


def last_line(log: Path, begin: int) -> str:
    """Of what was written to the log from `begin` on; where nothing was, it is empty."""
    lines = [line.strip() for line in written_since(log, begin).split("\n") if line.strip()]
    if lines and not re.search(r"\w", lines[-1]):  # torchrun's report in its frame, which does not say why ranks failed
        lines = [line for line in lines if _ERROR.match(line)] or lines
    return lines[-1][-LONGEST_LINE:] if lines else ""


def written_since(log: Path, begin: int) -> str:
    """The end of it, where it is long."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(begin, size_of(log) - LONGEST_SEARCH))
        return file.read().decode(errors="replace")


def how_it_ended(code: int, log: Path, begin: int) -> str:
    """A process that has failed, with what it said last; `code` as subprocess gives it, below 0 for a signal."""
    how = f"ended by signal {signal.Signals(-code).name} (killed, or crashed)" if code < 0 else f"exit code {code}"
    last_words = last_line(log, begin)
    said = f" after {last_words!r}" if last_words else ""
    return f"{how}{said}; its output stands in {log}"
