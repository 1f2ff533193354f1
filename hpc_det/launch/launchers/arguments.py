"""How each launcher begins, and their common command line: [[OVERRIDES...] --] (--trial module:Class | SCRIPT ARGS...).

Text before the first `--` goes to the underlying launcher, the rest is what it starts (upstream's rule and table:
harness/determined/launch, test_torch_distributed.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpc_det.errors import HpcDetError, UsageError
from hpc_det.store.attempt import Attempt, mistakes_noted

RANK = "hpc_det.launch.rank"


@dataclass(frozen=True)
class Launch:
    overrides: tuple[str, ...]
    """For the underlying launcher."""
    command: tuple[str, ...]
    """What each rank runs: a Python file or `-m module` with arguments, or any command."""

    @property
    def joins_by_itself(self) -> bool:
        """Whether it is hpc_det's own way into a rank, which tells the agent of itself and hears of stops."""
        return self.command[0] == "-m" and self.command[1].startswith("hpc_det.")

    @property
    def rank_command(self) -> list[str]:
        """What each rank executes."""
        return for_python(self.command)


def is_for_python(command: Sequence[str]) -> bool:
    """A file or a module; all else is a command, which is what upstream's launchers take."""
    return command[0] == "-m" or command[0].endswith(".py")


def for_python(command: Sequence[str]) -> list[str]:
    """A file or a module is started by this Python, a command as it is."""
    return [sys.executable, *command] if is_for_python(command) else [*command]


def is_trial(command: Sequence[str]) -> bool:
    """What `--trial module:Class` was parsed to."""
    return list(command[:2]) == ["-m", RANK]


def start(
    launcher: str, argv: Sequence[str], begin: Callable[[Launch, Attempt], int], *, takes_overrides: bool = True
) -> int:
    """Call `begin` with what `argv` says, in the attempt that this process belongs to, and return its exit code.

    An HpcDetError is printed and has an exit code of its own; a UsageError becomes the attempt's failure, too.
    """
    try:
        attempt = Attempt.from_env(os.environ)
        with mistakes_noted(attempt.trial, attempt.number):
            return begin(parse(argv, launcher, takes_overrides=takes_overrides), attempt)
    except HpcDetError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def parse(argv: Sequence[str], launcher: str, *, takes_overrides: bool = True) -> Launch:
    """Raises UsageError with the usage."""
    words = list(argv)
    overrides: list[str] = []
    if "--" in words:
        border = words.index("--")
        overrides, target = words[:border], words[border + 1 :]
    else:
        target = words
    if not target:
        raise UsageError(_usage(launcher, "empty script: neither --trial nor a script is given"))
    if overrides and not takes_overrides:
        nobody = f"{' '.join(overrides)}: it starts the ranks itself, so there is nothing to override"
        raise UsageError(_usage(launcher, nobody))
    if target[0] == "--trial":
        return Launch(tuple(overrides), _trial(target[1:], launcher))
    if target[0].startswith("--trial="):
        return Launch(tuple(overrides), _trial([target[0].partition("=")[2], *target[1:]], launcher))
    if target[0].startswith("-") and target[0] != "-m":
        raise UsageError(_usage(launcher, f"unrecognized arguments: {target[0]}; put overrides before ` -- `"))
    if target == ["-m"]:
        raise UsageError(_usage(launcher, "-m needs a module"))
    return Launch(tuple(overrides), tuple(target))


def _trial(words: Sequence[str], launcher: str) -> tuple[str, ...]:
    if not words:
        raise UsageError(_usage(launcher, "--trial needs module:Class"))
    if len(words) > 1:
        raise UsageError(_usage(launcher, f"extra arguments after --trial {words[0]}: {' '.join(words[1:])}"))
    return ("-m", RANK, words[0])


def _usage(launcher: str, problem: str) -> str:
    return (
        f"hpc_det.launch.{launcher}: {problem}\n"
        f"usage: python3 -m hpc_det.launch.{launcher} [[OVERRIDES...] --] (--trial module:Class | SCRIPT ARGS...)"
    )
