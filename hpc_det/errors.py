"""Exceptions whose messages a user reads without a traceback, and the helpers that word the messages.

HpcDetError            exit code 1: an operation failed (scheduler, file system, a trial that failed)
└── UsageError         exit code 2: the input is invalid (config, arguments, missing files)
    └── InvalidHP      raised by a trial: it cannot train with these hyperparameters
"""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

INTERRUPTED = 130
"""The exit code after Ctrl-C: 128 + SIGINT, as a shell reports it."""
MISSING = "required, but not set"
_SHOWN_CHARS = 80


class HpcDetError(Exception):
    """One or more problems; each is a line with the place, what is wrong, both values and the remedy."""

    exit_code = 1

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


def refused(error: OSError) -> HpcDetError:
    """Return `error` as an HpcDetError, worded "FILE: reason" without Python's errno."""
    message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    return HpcDetError("; ".join(filter(None, (message, remedy_of(error)))))


def remedy_of(error: OSError) -> str:
    """Return what to do about an error of the file system; "" if that is not known."""
    return _REMEDIES.get(error.errno or 0, "")


_FOR_EXPERIMENTS = "HPC_DET_ROOT is the folder of all experiments"
_REMOVE = "`hpc-det checkpoint rm` and `hpc-det experiment delete` remove what ended experiments keep"
_ELSEWHERE = f"or name a folder on another file system ({_FOR_EXPERIMENTS})"
_REMEDIES = {
    errno.ENOSPC: f"free space on this file system (`df -h` shows it; {_REMOVE}), {_ELSEWHERE}",
    errno.EDQUOT: f"remove files to get below your quota (`quota -s` shows it; {_REMOVE}), {_ELSEWHERE}",
    errno.EACCES: f"ask its owner for permission, or name a folder of your own ({_FOR_EXPERIMENTS})",
    errno.EROFS: f"this file system is read-only: mount it for writing, {_ELSEWHERE}",
    errno.ENOTDIR: f"a file is where a folder is needed: move it away, or name another folder ({_FOR_EXPERIMENTS})",
}
"""Remedies for errors of the file system, by errno."""


class UsageError(HpcDetError):
    """Invalid input: nothing was submitted and nothing was written."""

    exit_code = 2


class InvalidHP(UsageError):
    """Raised by a trial for hyperparameters that it cannot train with; the trial is not restarted."""


class Problem(NamedTuple):
    """A problem with one setting; the layer that wrote the setting is added when the message is rendered."""

    path: str
    """The dotted path of the setting, such as resources.slots_per_trial."""
    what: str
    remedy: str = ""


def pip_install(*requirements: str) -> str:
    """Return the command that installs packages for this Python, such as "hpc_det[mpi]".

    With an extra of hpc_det, pip reads the requirements of the installed hpc_det: no matter whether that came from a
    checkout, a wheel or an index.
    """
    import shlex  # imported late: every process loads this module, few need the command

    return f"`{shlex.join([sys.executable, '-m', 'pip', 'install', *requirements])}`"


def shown(value: Any) -> str:
    """Return the repr of `value` for a message, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..."


def count(number: int, thing: str) -> str:
    """Return a number with the noun `thing` in the right form, such as `1 batch` or `2 batches`."""
    return f"{number} {thing if number == 1 else plural(thing)}"


def length_in_words(amount: int, unit: str) -> str:
    """Return a length in the unit `batches`, `records` or `epochs`, such as `1 batch` or `2 epochs`."""
    return count(amount, _ONE[unit])


_ONE = {"batches": "batch", "records": "record", "epochs": "epoch"}


def plural(thing: str) -> str:
    """Return the plural of an English noun, such as `batches`, `epochs`, `entries` or `nodes`."""
    if thing.endswith("epoch"):  # its ch is a k
        return f"{thing}s"
    if thing.endswith(("s", "x", "ch", "sh")):
        return f"{thing}es"
    return f"{thing[:-1]}ies" if thing.endswith("y") and thing[-2] not in "aeou" else f"{thing}s"


def some(names: Sequence[str], most: int = 10) -> str:
    """Return the first `most` names, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def printable(text: str) -> str:
    """Return `text` with every unprintable character escaped, so that it fits on one line of output."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


_TERMINAL_COMMANDS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters except tab and newline, characters that change the direction of text, and lone surrogates (which
UTF-8 cannot encode).
"""


def visible(text: str) -> str:
    """Return `text`, of any number of lines, with the characters escaped (such as \\x1b) that control a terminal."""
    return _TERMINAL_COMMANDS.sub(lambda found: repr(found[0])[1:-1], text)


def say(text: str) -> None:
    """Print a message on stderr, separate from the command's output."""
    print(f"hpc-det: {visible(text)}", file=sys.stderr, flush=True)


def or_else(hint: str, known: str) -> str:
    """Return the question of `nearest`, if there is one, and what is known."""
    return f"{hint} {known}" if hint else known


def nearest(word: str, known: Iterable[str]) -> str:
    """Return "did you mean X?" for the known word most similar to `word`, or "" if none is similar."""
    close = closest(word, known)
    return f"did you mean {close!r}?" if close else ""


def closest(word: str, known: Iterable[str]) -> str:
    """Return the known word most similar to `word`, or "" if none is similar."""
    from difflib import get_close_matches  # imported late: every process loads this module, few need a suggestion

    return next(iter(get_close_matches(word, list(known), n=1)), "")
