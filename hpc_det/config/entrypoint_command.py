"""The command line of an entrypoint: which launcher it names, and what that is to start."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import dropwhile

from hpc_det.config.context import Context

TRIAL = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)")
LAUNCHERS = ("torch_distributed", "direct", "mpi", "srun", "deepspeed", "horovod", "autohorovod")
_LAUNCHER = re.compile(r"(determined|hpc_det)\.launch\.(\w+)")
_BEHIND_LAUNCHERS = ("rank", "wrap_rank")
"""What a launcher of the user's own may start ranks with."""
_PYTHON = re.compile(r"(?:.*/)?python[\d.]*")
_SETTING = re.compile(r"[A-Za-z_]\w*=.*")
_NO_SHELL = re.compile(r"[^$`*?~<>|&;()]*")


def command_problems(words: Sequence[str], context: Context) -> Iterator[str]:
    """A launcher that there is not, or a script that is not in the context directory."""
    for match in filter(None, map(_LAUNCHER.fullmatch, words)):
        package, launcher = match.groups()
        if launcher not in (*LAUNCHERS, *_BEHIND_LAUNCHERS):
            yield (
                f"entrypoint: {match[0]}: hpc_det has no such launcher; in {package}.launch there are "
                f"{', '.join(LAUNCHERS)}"
            )
    started = started_script(words)
    if started is None or context.path(started).exists():
        return
    if TRIAL.fullmatch(started):
        yield f"entrypoint: {started} is no script; a trial is named by --trial {started}"
    elif started.endswith(".py"):
        yield missing(f"file {started!r}", context)


def missing(what: str, context: Context) -> str:
    """The problem of an entrypoint that names something of the context directory that is not there."""
    return f"entrypoint: no {what} in context_dir {context.folder}, which holds {context.python_files()}"


def started_script(words: Sequence[str]) -> str | None:
    """The script that each rank starts, through whichever launchers; None where only a shell knows."""
    if "cd" in words or not all(map(_NO_SHELL.fullmatch, words)):
        return None
    command = [*dropwhile(lambda word: word == "exec" or _SETTING.fullmatch(word), words)]
    if not command or not _PYTHON.fullmatch(command[0]):
        return None
    command = [*dropwhile("-u".__eq__, command[1:])]
    if command[:1] == ["-m"]:
        launcher = _LAUNCHER.fullmatch(command[1]) if len(command) > 1 else None
        return _behind(command[2:]) if launcher and launcher[2] in LAUNCHERS else None
    return command[0] if command else None


def _behind(words: Sequence[str]) -> str | None:
    """What a launcher with these arguments starts."""
    border = words.index("--") + 1 if "--" in words else 0
    target = [*dropwhile("--autohorovod".__eq__, words[border:])]
    if not target or target[0].startswith("-"):
        return None
    return started_script(target) if _PYTHON.fullmatch(target[0]) else target[0]
