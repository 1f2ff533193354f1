"""The errors that a user sees: no traceback, every problem at once.

HpcDetError            exit code 1: the world refused (scheduler, file system, a trial that failed)
└── UsageError         exit code 2: what was asked for cannot be done (config, arguments, missing files)
    └── InvalidHP      raised by a trial: these hyperparameters make no sense
"""

from __future__ import annotations

from collections.abc import Sequence


class HpcDetError(Exception):
    """One or more problems, each a line that says where, what, both values and the remedy."""

    exit_code = 1

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class UsageError(HpcDetError):
    """Bad input: nothing was submitted and nothing was written."""

    exit_code = 2


class InvalidHP(UsageError):
    """A trial raises it for hyperparameters that cannot work: it is not started again."""
