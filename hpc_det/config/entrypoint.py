"""The entrypoint of an experiment: the words of its command, and the files of the code directory that they name."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import dropwhile, pairwise
from pathlib import Path, PurePath

from hpc_det.errors import closest, nearest, or_else, some
from hpc_det.store.attempt import HOOK

TRIAL = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")
"""`module:Class`; the class may be an attribute of another one, as in `module:Outer.Inner`."""
LAUNCHERS = ("torch_distributed", "direct", "mpi", "srun", "deepspeed", "horovod", "autohorovod")
_WITH_DASHES_FOR_SCRIPTS = ("direct", "deepspeed")
"""Launchers under which `--` after a script belongs to the script: Determined's deepspeed launcher, whose table of
arguments (test_deepspeed.py there) keeps it, and direct, which has no overrides. Others take anything as overrides.
"""
_LAUNCHER = re.compile(r"(determined|hpc_det)\.launch\.(\w+)")
_BEHIND_LAUNCHERS = ("rank", "wrap_rank")
"""Modules other than launchers with which a user's own launcher may start ranks."""
_PYTHON = re.compile(r"(?:.*/)?python[\d.]*")
_SETTING = re.compile(r"[A-Za-z_]\w*=.*")
"""A variable that is set before a command."""
_NO_SHELL = re.compile(r"[^$`*?~<>|&;()]*")
"""A word whose meaning does not depend on a shell."""


@dataclass(frozen=True)
class Context:
    """The code of an experiment before the submission copies it: the context directory and the included paths."""

    folder: Path
    includes: tuple[Path, ...] = ()
    """Absolute paths of files and folders that are copied to the top of the code directory."""

    def path(self, name: str) -> Path:
        """Return the present path of the file that the job will see as `name` in its code directory."""
        return self.folder_of(name) / name

    def folder_of(self, name: str) -> Path:
        """Return the folder in which to look up `name`: the parent of an included path, or the context directory."""
        first = PurePath(name).parts[:1]
        return next((include.parent for include in self.includes if (include.name,) == first), self.folder)

    def python_files(self) -> list[str]:
        """Return the names of the Python files at the top of the code directory, sorted."""
        included = (path for path in self.includes if path.suffix == ".py")
        return sorted(file.name for file in (*self.folder.glob("*.py"), *included))

    def module_file(self, module: str) -> Path | None:
        """Return the file of a module in the code directory, or None."""
        base = module.replace(".", "/")
        candidates = (self.path(f"{base}/__init__.py"), self.path(f"{base}.py"))
        return next((file for file in candidates if file.is_file()), None)

    def is_compiled(self, module: str) -> bool:
        """Return whether an extension module of this name is in the code directory; Python prefers it to a .py file."""
        base = self.path(module.replace(".", "/"))
        return any(file.name.startswith(f"{base.name}.") for file in base.parent.glob("*.so"))

    def namesakes(self, module: str) -> list[str]:
        """Return the modules of this name in the folders of the context directory, such as `src.model_def`."""
        files = sorted(self.folder.glob(f"*/{module.replace('.', '/')}.py"))
        return [f"{file.relative_to(self.folder).parts[0]}.{module}" for file in files]


def words_of(entrypoint: object) -> list[str]:
    """Return the words of the command; an empty list for an invalid value, which the schema reports.

    Raises ValueError for unbalanced quotes.
    """
    words = _shell_words(entrypoint) if isinstance(entrypoint, str) else entrypoint
    return words if isinstance(words, list) and all(isinstance(word, str) for word in words) else []


def _shell_words(command: str) -> list[str]:
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)  # `T;` is T and the end of a command
    lexer.whitespace_split, lexer.commenters = True, ""
    return list(lexer)


def trial_name(entrypoint: object) -> str | None:
    """Return the `module:Class` that the entrypoint names, or None."""
    return named_trial(words_of(entrypoint))


def trial_of(words: list[str]) -> tuple[str, str] | None:
    """Return the (module, class) of the trial; None if the entrypoint names none, or one outside of the code directory.

    Raises ValueError if the name does not have the form module:Class.
    """
    # After `cd`, or with another PYTHONPATH, the module may be anywhere; with `$` only the shell knows the name.
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
    """Return a single word of the form module:Class, or the word after --trial; None without either.

    Behind a launcher the word after --trial may have any form.
    """
    if len(words) == 1 and TRIAL.fullmatch(words[0]):
        return words[0]
    for word, following in pairwise([*words, ""]):
        if word == "--trial" or word.startswith("--trial="):
            name = following if word == "--trial" else word.partition("=")[2]
            # A program that is not a launcher may have an option --trial with another meaning.
            return name if TRIAL.fullmatch(name) or any(map(_LAUNCHER.fullmatch, words)) else None
    return None


def command_problems(words: Sequence[str], context: Context) -> Iterator[str]:
    """Yield a problem for each launcher that does not exist, and for a script that is not in the code directory."""
    for match in filter(None, map(_LAUNCHER.fullmatch, words)):
        package, launcher = match.groups()
        if launcher not in (*LAUNCHERS, *_BEHIND_LAUNCHERS):
            known = or_else(nearest(launcher, LAUNCHERS), f"{package}.launch has {', '.join(LAUNCHERS)}")
            yield f"entrypoint: {match[0]}: hpc_det has no such launcher; {known}"
    started = started_script(words)
    if started is None or context.path(started).exists():
        return
    if TRIAL.fullmatch(started):
        yield f"entrypoint: {started} is not a script; to name a trial, write --trial {started}"
    elif is_missing_script(started, context):
        yield missing("file", started, started, context)


def is_missing_script(started: str, context: Context) -> bool:
    """Return whether no job can find this script, which does not exist here.

    A container may contain a script with an absolute path, and a startup hook may write one.
    """
    return started.endswith(".py") and not PurePath(started).is_absolute() and not context.path(HOOK).exists()


def missing(kind: str, name: str, file: str, context: Context) -> str:
    """Return the problem of an entrypoint that names a file or module which is not in the context directory."""
    names = context.python_files()
    close = closest(file.removesuffix(".py"), [name.removesuffix(".py") for name in names])
    what = f"entrypoint: no {kind} {name!r} in context_dir {context.folder}"
    meant = f"; did you mean {close if kind == 'module' else f'{close}.py'}?" if close else ""
    return f"{what}, which contains {some(names) or 'no Python file'}{meant}"


def started_script(words: Sequence[str]) -> str | None:
    """Return the script that each rank starts, also behind launchers; None if it is unknown without running a shell."""
    if "cd" in words or not all(map(_NO_SHELL.fullmatch, words)):
        return None
    command = [*dropwhile(lambda word: word == "exec" or _SETTING.fullmatch(word), words)]
    if not command or not _PYTHON.fullmatch(command[0]):
        return None
    command = [*dropwhile("-u".__eq__, command[1:])]  # python3 -u: unbuffered output
    if command[:1] == ["-m"]:
        launcher = _LAUNCHER.fullmatch(command[1]) if len(command) > 1 else None
        return _behind(launcher[2], command[2:]) if launcher and launcher[2] in LAUNCHERS else None
    return command[0] if command else None


def started_file(entrypoint: object, context: Context) -> Path | None:
    """Return the file of the code directory that the entrypoint starts; None if it is elsewhere or unknown."""
    words = words_of(entrypoint)
    if trial := trial_of(words):
        return context.module_file(trial[0])
    name = posixpath.normpath(started_script(words) or "..")
    file = context.path(name)
    return file if not name.startswith(("/", "..")) and file.is_file() else None


def split_overrides(launcher: str, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments of a launcher before the `--` that ends its overrides, and those after it."""
    if "--" not in words or (launcher in _WITH_DASHES_FOR_SCRIPTS and _begins_script(words[0])):
        return [], [*words]
    border = words.index("--")
    return [*words[:border]], [*words[border + 1 :]]


def _begins_script(word: str) -> bool:
    return word == "-m" or not word.startswith("-")


def _behind(launcher: str, words: Sequence[str]) -> str | None:
    """Return the script that a launcher with these arguments starts, or None."""
    target = [*dropwhile("--autohorovod".__eq__, split_overrides(launcher, words)[1])]
    if not target or target[0].startswith("-"):
        return None
    return started_script(target) if _PYTHON.fullmatch(target[0]) else target[0]


def dotted_trial(words: list[str], context: Context) -> str | None:
    """Return `module:Class` if the command is only `module.Class`, with a dot by mistake, and the module exists."""
    if len(words) != 1 or "." not in words[0]:
        return None
    module, _, class_name = words[0].rpartition(".")
    if not class_name.isidentifier() or context.module_file(module) is None or context.path(words[0]).exists():
        return None
    return f"{module}:{class_name}"
