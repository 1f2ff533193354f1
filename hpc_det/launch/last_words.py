"""The end of a log: often all that is known of a program that has failed."""

from __future__ import annotations

import signal
from pathlib import Path

LONGEST_SEARCH, LONGEST_LINE = 4096, 200
"""Bytes at the end of a log that are searched for its last line, and characters of that which are told."""


def size_of(log: Path) -> int:
    """In bytes; 0 before it exists."""
    return log.stat().st_size if log.exists() else 0


def last_line(log: Path, begin: int) -> str:
    """Of what was written to the log from `begin` on; where nothing was, it is empty."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(begin, size_of(log) - LONGEST_SEARCH))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[-LONGEST_LINE:]


def how_it_ended(code: int, log: Path, begin: int) -> str:
    """A process that has failed, with what it said last; `code` as subprocess gives it, below 0 for a signal."""
    how = f"ended by signal {signal.Signals(-code).name} (killed, or crashed)" if code < 0 else f"exit code {code}"
    last_words = last_line(log, begin)
    said = f" after {last_words!r}" if last_words else ""
    return f"{how}{said}; its output stands in {log}"
