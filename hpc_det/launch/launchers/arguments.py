"""The start of each launcher and their common command line.

    [[OVERRIDES...] --] (--trial module:Class | SCRIPT ARGS...)

Text before the first `--` is passed to the underlying launcher, which starts the rest. The rule is Determined's
(harness/determined/launch; test_torch_distributed.py there lists the cases), with its exception for deepspeed, where
the text after a script is the script's own, `--` included. `-h` prints the usage, also outside of a job.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpc_det.config.entrypoint import split_overrides
from hpc_det.errors import HpcDetError, UsageError
from hpc_det.node.import_bundle import VARIABLE as BUNDLE
from hpc_det.store.attempt import Attempt, mistakes_noted

WITHOUT_OVERRIDES = ("direct",)
"""Launchers that start the ranks themselves."""
BUNDLED = "hpc_det.launch.bundled_program"
"""The module that runs a Python program with imports from the bundle."""
RANK = "hpc_det.launch.rank"
"""The module that runs a trial class as a rank."""
HELP = ("-h", "--help")
_OVERRIDES = "  OVERRIDES             arguments for the program that starts the ranks, before `--`\n"
_TARGETS = """\
  --trial module:Class  train this trial class
  SCRIPT ARGS...        a Python file, `-m module`, or any command, to start for each slot of the node
  -h, --help            print this text"""


@dataclass(frozen=True)
class Launch:
    """A parsed command line of a launcher."""

    overrides: tuple[str, ...]
    """Arguments for the underlying launcher."""
    command: tuple[str, ...]
    """The command of each rank: a Python file or `-m module` with arguments, or any other command."""

    @property
    def joins_by_itself(self) -> bool:
        """True if the command is a module of hpc_det, which connects to the agent and receives stop requests itself."""
        return self.command[0] == "-m" and self.command[1].startswith("hpc_det.")

    @property
    def rank_command(self) -> list[str]:
        """The arguments to execute for each rank."""
        return for_python(self.command)


def is_for_python(command: Sequence[str]) -> bool:
    """Return whether the command is a Python file or module; launchers accept any other command, too."""
    return command[0] == "-m" or command[0].endswith(".py")


def for_python(command: Sequence[str]) -> list[str]:
    """Return the arguments to execute: this Python for a file or module, other commands unchanged."""
    return [sys.executable, *with_bundle(command)] if is_for_python(command) else [*command]


def with_bundle(command: Sequence[str]) -> list[str]:
    """Return the arguments of Python for a command that imports from the bundle, if the experiment has one."""
    # The module of a trial's rank uses the bundle itself.
    is_program = is_for_python(command) and not is_trial(command)
    return ["-m", BUNDLED, *command] if os.environ.get(BUNDLE) and is_program else [*command]


def is_trial(command: Sequence[str]) -> bool:
    """Return whether the command comes from `--trial module:Class`."""
    return list(command[:2]) == ["-m", RANK]


def start(launcher: str, argv: Sequence[str], begin: Callable[[Launch, Attempt], int], *, about: str | None) -> int:
    """Parse `argv`, call `begin` with the result and the attempt of this process, and return the exit code.

    `about`: the launcher's docstring, which -h prints. An HpcDetError is printed and determines the exit code; a
    UsageError is also noted as the attempt's failure.
    """
    if asks_for_help(argv, launcher):
        overrides = "" if launcher in WITHOUT_OVERRIDES else _OVERRIDES
        print(help_text(_usage_line(launcher), about, overrides + _TARGETS))
        return 0
    try:
        attempt = Attempt.from_env(os.environ)
        with mistakes_noted(attempt.trial, attempt.number):
            return begin(parse(argv, launcher), attempt)
    except HpcDetError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def parse(argv: Sequence[str], launcher: str) -> Launch:
    """Return the parsed command line. Raises UsageError with the usage."""
    overrides, target = split_overrides(launcher, argv)
    if not target:
        raise UsageError(_usage(launcher, "empty script: neither --trial nor a script is given"))
    if overrides and launcher in WITHOUT_OVERRIDES:
        problem = f"{' '.join(overrides)}: this launcher starts the ranks itself and takes no overrides"
        raise UsageError(_usage(launcher, problem))
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
    """Return the command of a rank for the arguments after --trial. Raises UsageError."""
    if not words:
        raise UsageError(_usage(launcher, "--trial needs module:Class"))
    if len(words) > 1:
        raise UsageError(_usage(launcher, f"extra arguments after --trial {words[0]}: {' '.join(words[1:])}"))
    return ("-m", RANK, words[0])


def asks_for_help(argv: Sequence[str], launcher: str) -> bool:
    """Return whether the arguments ask for the launcher's own help; `-h` elsewhere is an override or the script's."""
    target = split_overrides(launcher, argv)[1]
    return target[:1] in ([flag] for flag in HELP) or (target[:1] == ["--trial"] and target[-1] in HELP)


def help_text(usage: str, about: str | None, arguments: str) -> str:
    """Return what `-h` prints: the usage, what the program does (`about`, its docstring), and its arguments."""
    paragraphs = (about or "").strip().split("\n\n")  # no docstring under python -OO
    described = [text for text in paragraphs if text and not text.lstrip().startswith("python3 -m ")]
    return "\n\n".join([usage, *described, arguments])


def _usage(launcher: str, problem: str) -> str:
    """Return the message of a UsageError."""
    return f"hpc_det.launch.{launcher}: {problem}\n{_usage_line(launcher)}"


def _usage_line(launcher: str) -> str:
    overrides = "[--]" if launcher in WITHOUT_OVERRIDES else "[[OVERRIDES...] --]"
    return f"usage: python3 -m hpc_det.launch.{launcher} {overrides} (--trial module:Class | SCRIPT ARGS...)"
