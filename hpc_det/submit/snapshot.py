"""The code as it was at submission: the job imports this copy, so an edit while it queues changes nothing.

It holds the context directory and what is included beside its files. The rules are Determined's (its
harness/determined/common/context.py and detignore.py).

Beside it stands what git says of the context directory: the commit, and what of the code is in none. A repository may
come from anybody, and its configuration names programs: hooks, monitors, filters, drivers of diffs, transports. None of
them is run (git-config(1), gitattributes(5)); filters of the user's own or of the system, such as git-lfs, are.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import urlsplit

from hpc_det.config.entrypoint import Context
from hpc_det.errors import UsageError
from hpc_det.node.files import flush_tree, make_folders, share_copy

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

LIMIT_BYTES = 95 * 1024 * 1024  # Determined's limit for a model definition, 95 MiB
ALWAYS_IGNORED = (
    *("__pycache__/", "*.py[co]", "*$py.class", ".mypy_cache/"),
    *(".git/", ".vscode/", ".idea/"),
    *(".terraform*", "*.tfstate*"),
    ".detignore",
)
"""Whatever a .detignore says. Determined ignores files of terraform since those hold the keys of a cluster."""
Snapshot: TypeAlias = dict[Path, Path]
"""The files of a copy, relative to it, in order, and where each lies before."""


def snapshot_files(context: Context) -> Snapshot:
    """What a job gets. Each folder, the context directory or an included one, is taken without what its own .detignore
    (gitignore syntax) names; an included file is taken whatever its name.

    Raises UsageError above 95 MiB, naming the ten largest files, and where two things would have the same place.
    """
    sizes = _sized_files(context.folder, Path())
    sources = {place: context.folder / place for place in sizes}
    roots = {place.parts[0]: context.folder / place.parts[0] for place in sizes}
    for include in context.includes:
        _insist_on_own_place(include, roots)
        roots[include.name] = include
        added = _sized_files(include, Path(include.name)) if include.is_dir() else _sized_file(include)
        sizes |= added
        sources |= {place: include.parent / place for place in added}
    _insist_on_limit(context, sizes)
    return {place: sources[place] for place in sorted(sources)}


def left_out(folder: Path) -> Callable[[str], bool]:
    """Says of a name, relative to `folder`, whether a copy is made without it. It need not be there. What an ignored
    folder holds is left out whatever else is said of it, since such a folder is not looked into.
    """
    ignored = _ignored(folder)
    return lambda name: (
        ignored.match_file(name) or any(ignored.match_file(f"{above}/") for above in PurePath(name).parents[:-1])
    )


def copy_snapshot(files: Snapshot, target: Path) -> None:
    """Durable when it returns. Raises UsageError for a file that has gone, or may not be read any more."""
    make_folders(target)
    for place, source in files.items():
        make_folders((target / place).parent)
        try:
            shutil.copy2(source, target / place)
        except OSError as error:
            raise UsageError(f"{source}: could not be copied for the job: {error.strerror}") from None
        share_copy(target / place)
    flush_tree(target)


def _insist_on_own_place(include: Path, roots: Mapping[str, Path]) -> None:
    if not include.name:
        raise UsageError(f"--include {include}: has no name that it could have beside the code; name what is in it")
    if other := roots.get(include.name):
        raise UsageError(
            f"--include {include}: would have the place of {other}, since both are called {include.name!r}; rename one "
            f"of them, or leave one out"
        )


def _insist_on_limit(context: Context, sizes: Mapping[Path, int]) -> None:
    if (total := sum(sizes.values())) <= LIMIT_BYTES:
        return
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:10]
    included = f" with {', '.join(map(str, context.includes))}" if context.includes else ""
    raise UsageError(
        f"{context.folder}: the context directory{included} holds {total} bytes, the limit is {LIMIT_BYTES} (95 MiB); "
        f"name data in .detignore and read it from shared storage. Largest: "
        + ", ".join(f"{place} ({sizes[place]})" for place in largest)
    )


def _sized_file(path: Path) -> dict[Path, int]:
    if not path.is_file():
        raise UsageError(f"--include {path}: is neither a file nor a folder")
    if not os.access(path, os.R_OK):
        raise _unreadable(path)
    return {Path(path.name): path.stat().st_size}


def _sized_files(folder: Path, place: Path) -> dict[Path, int]:
    """The size of each file of `folder` that is not ignored, by its place in the copy; folder's own is `place`."""
    return {place / name: size for name, size in _walk(str(folder), "", _ignored(folder))}


def _walk(folder: str, prefix: str, ignored: GitIgnoreSpec) -> Iterator[tuple[str, int]]:
    """Names below `folder`, relative to where the walk began. A folder that is ignored is not looked into."""
    try:
        entries = [*os.scandir(folder)]
    except OSError:
        raise _unreadable(Path(folder)) from None
    for entry in entries:
        name = f"{prefix}{entry.name}"
        if entry.is_dir():
            if ignored.match_file(f"{name}/"):
                continue
            if entry.is_symlink():
                raise UsageError(
                    f"{entry.path}: a link to a folder, which a job would lack; copy it, or name it in .detignore"
                )
            yield from _walk(entry.path, f"{name}/", ignored)
        elif entry.is_file() and not ignored.match_file(name):  # editors' locks are links to nowhere, and no files
            if not os.access(entry.path, os.R_OK):
                raise _unreadable(Path(entry.path))
            yield name, entry.stat().st_size


def _ignored(folder: Path) -> GitIgnoreSpec:
    from pathspec import GitIgnoreSpec

    file = folder / ".detignore"
    try:
        own = file.read_text(encoding="utf-8-sig").splitlines() if file.exists() else []
        return GitIgnoreSpec.from_lines([*own, *ALWAYS_IGNORED])
    except UnicodeDecodeError:
        raise UsageError(f"{file}: not a text in UTF-8; expected gitignore lines") from None
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}; expected gitignore lines") from None
    except ValueError as error:  # of pathspec
        raise UsageError(f"{file}: {error}; expected gitignore lines") from None


def _unreadable(path: Path) -> UsageError:
    return UsageError(f"{path}: may not be read, so a job would lack it; change its mode, or name it in .detignore")


# --- what git says of it


GIT_TIMEOUT_S = 20.0
"""For all questions to git together."""
MOST_DIFF_BYTES = 5 * 1024 * 1024
_FILES_A_CALL = 500
_USERS_OWN = ("system", "global")
_FILTERS = r"^filter\..*\.(clean|smudge|process)$"
_NO_PROGRAMS = (
    *("-c", "core.fsmonitor="),
    *("-c", "core.hooksPath=/dev/null"),
    *("-c", "diff.external="),
    *("-c", "diff.autoRefreshIndex=false"),  # which would write the index
    "--no-pager",
)
_STATUS = ("status", "--porcelain", "-z", "--untracked-files=no", "--no-renames", "--ignore-submodules=dirty")
_DIFF = (
    *("diff", "--no-ext-diff", "--no-textconv", "--no-color", "--no-renames", "--ignore-submodules=dirty"),
    *("--no-relative", "--src-prefix=a/", "--dst-prefix=b/"),
)
_ENVIRONMENT = {
    "GIT_ALLOW_PROTOCOL": "",  # an object that is missing is not fetched
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_LITERAL_PATHSPECS": "1",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C",
}


@dataclass(frozen=True, kw_only=True)
class GitState:
    """Of the code of an experiment, when it was submitted."""

    commit: str
    branch: str | None
    """None: none was checked out."""
    remote: str | None
    """The address of `origin`, without names and passwords."""
    changed: list[str]
    """Files that are not as in the commit, or not there any more, relative to the context directory."""
    untracked: list[str]
    """Files of the snapshot that git knows nothing of."""
    diff: bytes
    """Of the changed files, from the repository's root, as `git apply` takes it; cut after MOST_DIFF_BYTES."""

    def as_json(self) -> dict[str, Any]:
        """Without the diff."""
        return {
            "commit": self.commit,
            "branch": self.branch,
            "dirty": bool(self.changed or self.untracked),
            "remote": self.remote,
            "changed": self.changed,
            "untracked": self.untracked,
        }


class _NoAnswerError(Exception):
    """There is no git, no repository or no commit, or it takes too long."""

    def __init__(self, code: int | None = None) -> None:
        self.found_nothing = code == 1
        """As git's commands say by their exit code."""


def git_state(context_dir: Path, places: Collection[Path]) -> GitState | None:
    """`places`: the files of the snapshot that lie in `context_dir`, relative to it. None where git cannot tell, or
    knows none of them.
    """
    try:
        return _state(_Git(context_dir), {str(place) for place in places}, left_out(context_dir))
    except _NoAnswerError:
        return None


def _state(git: _Git, names: set[str], is_left_out: Callable[[str], bool]) -> GitState | None:
    commit = git.line("rev-parse", "--verify", "HEAD^{commit}")
    tracked = set(git.names("ls-files", "-z"))
    untracked = sorted(name for name in names if not _is_known(name, tracked))
    if len(untracked) == len(names):
        return None
    here = git.line("rev-parse", "--show-prefix")
    touched = [entry[len("XY ") :].removeprefix(here) for entry in git.names(*_STATUS, "--", ".")]
    changed = [name for name in touched if name in names or not (git.has(name) or is_left_out(name))]
    return GitState(
        commit=commit,
        branch=git.line_or_none("symbolic-ref", "--quiet", "--short", "HEAD"),
        remote=_without_secrets(git.line_or_none("config", "--get", "remote.origin.url")),
        changed=changed,
        untracked=untracked,
        diff=_diff(git, changed),
    )


def _is_known(name: str, tracked: set[str]) -> bool:
    """A submodule is one entry for all of its files."""
    return name in tracked or any(str(folder) in tracked for folder in Path(name).parents)


def _diff(git: _Git, changed: Sequence[str]) -> bytes:
    """An argument list has a limit of its own, so the files are asked for in parts."""
    found, left = b"", iter(changed)
    while (some := [*islice(left, _FILES_A_CALL)]) and len(found) <= MOST_DIFF_BYTES:
        found += git.ask(*_DIFF, "HEAD", "--", *some)
    if len(found) <= MOST_DIFF_BYTES:
        return found
    whole_lines = found[: found.rfind(b"\n", 0, MOST_DIFF_BYTES) + 1]
    return whole_lines + f"# cut: more than {MOST_DIFF_BYTES} bytes differ from the commit\n".encode()


def _without_secrets(url: str | None) -> str | None:
    """The name in `ssh://git@host/` is part of the address; what else a URL has beside host and path may be a token."""
    if url is None or "://" not in url:
        return url
    try:
        scheme, place, path, _query, _fragment = urlsplit(url)
    except ValueError:  # of a host in brackets that is no address
        return None
    user, at, host = place.rpartition("@")
    name = f"{user.partition(':')[0]}@" if at and scheme == "ssh" else ""
    return f"{scheme}://{name}{host}{path}"


class _Git:
    """Git, asked about one folder. Each question raises _NoAnswerError where it fails."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._end = time.monotonic() + GIT_TIMEOUT_S
        self._settings = list(_NO_PROGRAMS)
        self._settings += self._no_filters()

    def has(self, name: str) -> bool:
        return os.path.lexists(self._folder / name)

    def ask(self, *arguments: str) -> bytes:
        outer = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        try:
            done = subprocess.run(
                ["git", *self._settings, *arguments],
                cwd=self._folder,
                env={**outer, **_ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=max(self._end - time.monotonic(), 0.0),
            )
        except (OSError, subprocess.TimeoutExpired):
            raise _NoAnswerError from None
        if done.returncode:
            raise _NoAnswerError(done.returncode)
        return done.stdout

    def line(self, *arguments: str) -> str:
        return os.fsdecode(self.ask(*arguments)).rstrip("\n")

    def line_or_none(self, *arguments: str) -> str | None:
        try:
            return self.line(*arguments)
        except _NoAnswerError as error:
            if error.found_nothing:
                return None
            raise

    def names(self, *arguments: str) -> list[str]:
        """Each ends with a zero byte."""
        return os.fsdecode(self.ask(*arguments)).split("\0")[:-1]

    def _no_filters(self) -> Iterator[str]:
        """Settings that put nothing in the place of the filters that the repository itself defines."""
        listed = self.line_or_none("config", "--show-scope", "--name-only", "--null", "--get-regexp", _FILTERS)
        words = (listed or "").split("\0")
        for scope, key in zip(words[::2], words[1::2], strict=False):
            if scope in _USERS_OWN:
                continue
            if "=" in key:  # which cannot be said with -c
                raise _NoAnswerError
            driver = key.rpartition(".")[0]
            yield from ("-c", f"{key}=", "-c", f"{driver}.required=false")
