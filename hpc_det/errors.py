"""The errors that a user sees: no traceback, every problem at once. And the words that all of them use.

HpcDetError            exit code 1: the world refused (scheduler, file system, a trial that failed)
└── UsageError         exit code 2: what was asked for cannot be done (config, arguments, missing files)
    └── InvalidHP      raised by a trial: these hyperparameters make no sense
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

INTERRUPTED = 130
"""128 + SIGINT, as a shell reports it."""
MISSING = "required, but nobody set it"
_SHOWN_CHARS = 80


class HpcDetError(Exception):
    """One or more problems, each a line that says where, what, both values and the remedy."""

    exit_code = 1

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


def refused(error: OSError) -> HpcDetError:
    """What the file system says, as a user reads it."""
    return HpcDetError(f"{error.filename}: {error.strerror}" if error.filename else str(error))


class UsageError(HpcDetError):
    """Bad input: nothing was submitted and nothing was written."""

    exit_code = 2


class InvalidHP(UsageError):
    """A trial raises it for hyperparameters that cannot work: it is not started again."""


class Problem(NamedTuple):
    """Of a setting, before it is known who wrote it."""

    path: str
    what: str
    remedy: str = ""


def shown(value: Any) -> str:
    """The value as a message shows it."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..."


def printable(text: str) -> str:
    """A key or value may hold anything; a line of output may not."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


_TERMINAL_COMMANDS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters but tab and newline, what turns the direction of text, and what no UTF-8 can hold."""


def visible(text: str) -> str:
    """Lines as a terminal may get them: what it would take for commands is spelled out, such as \\x1b."""
    return _TERMINAL_COMMANDS.sub(lambda found: repr(found[0])[1:-1], text)


def nearest(word: str, known: Iterable[str]) -> str:
    """The question whether a known word was meant, or nothing."""
    from difflib import get_close_matches  # every process loads this module, and few make a mistake

    close = get_close_matches(word, list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else ""
