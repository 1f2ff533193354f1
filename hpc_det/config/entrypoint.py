"""The entrypoint of an experiment: the words of its command line, and which files of the code directory they name."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import dropwhile, pairwise
from pathlib import Path, PurePath

TRIAL = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)")
LAUNCHERS = ("torch_distributed", "direct", "mpi", "srun", "deepspeed", "horovod", "autohorovod")
_LAUNCHER = re.compile(r"(determined|hpc_det)\.launch\.(\w+)")
_BEHIND_LAUNCHERS = ("rank", "wrap_rank")
"""What a launcher of the user's own may start ranks with."""
_PYTHON = re.compile(r"(?:.*/)?python[\d.]*")
_SETTING = re.compile(r"[A-Za-z_]\w*=.*")
_NO_SHELL = re.compile(r"[^$`*?~<>|&;()]*")


@dataclass(frozen=True)
class Context:
    """The code of an experiment as it lies before a job's copy is made of it: the context directory, and what is put
    beside its files.
    """

    folder: Path
    includes: tuple[Path, ...] = ()
    """Files and folders, absolute; each has its own name beside what is in `folder`."""

    def path(self, name: str) -> Path:
        """Where that lies which a job will find as `name` in its folder."""
        return self.folder_of(name) / name

    def folder_of(self, name: str) -> Path:
        """The folder in which `name` is to be looked up."""
        first = PurePath(name).parts[:1]
        return next((include.parent for include in self.includes if (include.name,) == first), self.folder)

    def python_files(self) -> str:
        """The names of the Python files at the top, for a message."""
        included = (path for path in self.includes if path.suffix == ".py")
        names = sorted(file.name for file in (*self.folder.glob("*.py"), *included))
        return ", ".join(names) or "no Python file"

    def module_file(self, module: str) -> Path | None:
        """The file of a module that lies here."""
        base = module.replace(".", "/")
        candidates = (self.path(f"{base}/__init__.py"), self.path(f"{base}.py"))
        return next((file for file in candidates if file.is_file()), None)


def words_of(entrypoint: object) -> list[str]:
    """Return the words of the command; none for a value that is no entrypoint, which the schema reports.

    Raises ValueError for quotes that do not match.
    """
    words = _shell_words(entrypoint) if isinstance(entrypoint, str) else entrypoint
    return words if isinstance(words, list) and all(isinstance(word, str) for word in words) else []


def _shell_words(command: str) -> list[str]:
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)  # `T;` is T and the end of a command
    lexer.whitespace_split, lexer.commenters = True, ""
    return list(lexer)


def trial_name(entrypoint: object) -> str | None:
    """The `module:Class` that the entrypoint names, if any."""
    return named_trial(words_of(entrypoint))


def trial_of(words: list[str]) -> tuple[str, str] | None:
    """(module, class), or None where the entrypoint names no trial in the context directory."""
    if any("PYTHONPATH" in word for word in words) or "cd" in words:
        return None
    name = named_trial(words)
    if name is None or "$" in name:
        return None
    match = TRIAL.fullmatch(name)
    if not match:
        raise ValueError(f"--trial got {name!r}; expected module:Class, such as model_def:MyTrial")
    return match[1], match[2]


def named_trial(words: list[str]) -> str | None:
    """Return what these words name as `module:Class`, whatever it looks like."""
    if len(words) == 1 and TRIAL.fullmatch(words[0]):
        return words[0]
    for word, following in pairwise([*words, ""]):
        if word == "--trial":
            return following
        if word.startswith("--trial="):
            return word.partition("=")[2]
    return None


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


def dotted_trial(words: list[str], context: Context) -> str | None:
    """The `module:Class` that was meant by a command of nothing but `module.Class`."""
    if len(words) != 1 or "." not in words[0]:
        return None
    module, _, class_name = words[0].rpartition(".")
    if not class_name.isidentifier() or context.module_file(module) is None or context.path(words[0]).exists():
        return None
    return f"{module}:{class_name}"
