"""The launchers' common command line: [[OVERRIDES...] --] (--trial module:Class | SCRIPT ARGS...).

Text before the first `--` goes to the underlying launcher, the rest is what it starts (upstream's rule and table:
harness/determined/launch, test_torch_distributed.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpc_det.errors import UsageError
from hpc_det.launch.attempt import Attempt
from hpc_det.launch.failure import failure_now, note_failure


@dataclass(frozen=True)
class Launch:
    overrides: tuple[str, ...]
    """For the underlying launcher."""
    command: tuple[str, ...]
    """What each rank's Python runs: a script with arguments, or `-m module` with them."""


def parse(argv: Sequence[str], launcher: str) -> Launch:
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
    if target[0] == "--trial":
        return Launch(tuple(overrides), _trial(target[1:], launcher))
    if target[0].startswith("--trial="):
        return Launch(tuple(overrides), _trial([target[0].partition("=")[2], *target[1:]], launcher))
    if target[0].startswith("-") and target[0] != "-m":
        raise UsageError(_usage(launcher, f"unrecognized arguments: {target[0]}; put overrides before ` -- `"))
    return Launch(tuple(overrides), tuple(target))


def parse_or_note(argv: Sequence[str], launcher: str, attempt: Attempt) -> Launch:
    """As `parse`; what is wrong becomes the attempt's failure, which the user sees, and which no restart would mend."""
    try:
        return parse(argv, launcher)
    except UsageError as error:
        note_failure(attempt.trial, attempt.number, failure_now(None, str(error), user_error=True))
        raise


def _trial(words: Sequence[str], launcher: str) -> tuple[str, ...]:
    if not words:
        raise UsageError(_usage(launcher, "--trial needs module:Class"))
    if len(words) > 1:
        raise UsageError(_usage(launcher, f"extra arguments after --trial {words[0]}: {' '.join(words[1:])}"))
    return ("-m", "hpc_det.launch.rank", words[0])


def _usage(launcher: str, problem: str) -> str:
    return (
        f"hpc_det.launch.{launcher}: {problem}\n"
        f"usage: python3 -m hpc_det.launch.{launcher} [[OVERRIDES...] --] (--trial module:Class | SCRIPT ARGS...)"
    )
