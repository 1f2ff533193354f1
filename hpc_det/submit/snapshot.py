"""A copy of the user's code at submission, from which jobs import it, so that later edits do not affect queued jobs.

It contains the context directory and, beside its files, the included files and folders. Folders are copied even if
they are empty or .detignore empties them, since scripts write into them. The rules are those of Determined (its
harness/determined/common/context.py and detignore.py).

With the copy, the state of the context directory in git is recorded: the commit, and the code that differs from it. A
repository may come from anywhere, and its configuration can name programs: hooks, monitors, filters, diff drivers,
transports. None of them is run (git-config(1), gitattributes(5)), except filters that the user or the system has
configured, such as git-lfs.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from hpc_det.config.entrypoint import Context
from hpc_det.errors import UsageError, refused
from hpc_det.node import disk, full_disk
from hpc_det.node.files import PRIVATE_FILE, flush_tree, is_shared, make_folder, make_folders, share_copy
from hpc_det.node.json_files import BLOCK_BYTES

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

LIMIT_BYTES = 95 * 1024 * 1024  # Determined's limit for a model definition, 95 MiB
ALWAYS_IGNORED = (
    *("__pycache__/", "*.py[co]", "*$py.class", ".mypy_cache/"),
    *(".git/", ".vscode/", ".idea/"),
    *(".terraform*", "*.tfstate*"),
    ".detignore",
)
"""Patterns that are ignored whatever a .detignore contains. Determined ignores terraform files because they contain
keys.
"""


PROGRESS_AFTER_S = 1.0
"""Seconds of copying after which a progress bar appears on a terminal."""
T = TypeVar("T")


@dataclass(frozen=True)
class Snapshot:
    """The content of a copy, sorted."""

    files: dict[str, str] = field(default_factory=dict)
    """The path of each file in the copy, and the path of the original."""
    folders: list[Path] = field(default_factory=list)
    """The paths of the folders in the copy."""


def snapshot_of(context: Context) -> Snapshot:
    """Return the files and folders that a job needs.

    Each folder, the context directory or an included one, is copied without the files that its own .detignore
    (gitignore syntax) names; an included file is always copied. Raises UsageError if the files have more than 95 MiB,
    with the ten largest, and if two of them would have the same path.
    """
    # Paths are strings here: 20,000 Path objects take as long as the scan itself.
    sizes, folders = _content(context.folder, "")
    sources = {place: os.path.join(context.folder, place) for place in sizes}
    top = {place.partition("/")[0] for place in (*sizes, *folders)}
    roots = {name: context.folder / name for name in top if name}
    for include in context.includes:
        _insist_on_own_place(include, roots)
        roots[include.name] = include
        added, below = _content(include, include.name) if include.is_dir() else (_sized_file(include), [])
        sizes |= added
        folders += below
        sources |= {place: os.path.join(include.parent, place) for place in added}
    _insist_on_limit(context, sizes)
    return Snapshot({place: sources[place] for place in sorted(sources)}, sorted(map(Path, folders)))


def left_out(folder: Path) -> Callable[[str], bool]:
    """Return a function that returns whether a path, relative to `folder`, is ignored. The path need not exist."""
    ignored = _ignored(folder)
    # The content of an ignored folder is ignored even if another pattern includes it: git does not look into the
    # folder.
    return lambda name: (
        ignored.match_file(name) or any(ignored.match_file(f"{above}/") for above in PurePath(name).parents[:-1])
    )


def copy_snapshot(snapshot: Snapshot, target: Path) -> None:
    """Copy the content to `target` and flush it to disk. Raises UsageError if a file cannot be copied."""
    make_folders(target)
    for folder in snapshot.folders:
        make_folder(target / folder)
    shared = is_shared(target)
    for place, source in _with_progress(snapshot.files.items()):
        copy = os.path.join(target, place)
        try:
            _copy(source, copy)
        except OSError as error:
            if error.errno in full_disk.CODES:
                raise refused(OSError(error.errno, error.strerror, copy)) from None
            raise UsageError(f"{source}: could not be copied for the job: {error.strerror}") from None
        if shared:
            share_copy(Path(copy))
    flush_tree(target)


def _copy(source: str, target: str) -> None:
    """Copy a file with its mode and times. shutil.copy2 makes three times as many system calls."""
    original = os.open(source, os.O_RDONLY)
    try:
        status = os.fstat(original)
        copy = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, PRIVATE_FILE)
        try:
            while data := os.read(original, min(status.st_size + 1, BLOCK_BYTES)):
                disk.write_all(copy, data)
            os.fchmod(copy, stat.S_IMODE(status.st_mode))
            os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
        finally:
            os.close(copy)
    finally:
        os.close(original)


def _with_progress(items: Collection[T]) -> Iterator[T]:
    """Yield the items. If stderr is a terminal and this takes more than PROGRESS_AFTER_S, show a progress bar."""
    left, began = iter(items), time.monotonic()
    if not sys.stderr.isatty():
        yield from left
        return
    done = 0
    for done, item in enumerate(left, start=1):  # noqa: B007  # used below
        yield item
        if time.monotonic() - began > PROGRESS_AFTER_S:
            break
    if done == len(items):
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("Copying the code", total=len(items), completed=done)
        yield from progress.track(left, task_id=task)


def _insist_on_own_place(include: Path, roots: Mapping[str, Path]) -> None:
    """Raise UsageError if the included file or folder would replace another one in the copy."""
    if not include.name:
        raise UsageError(
            f"--include {include}: has no file name that it could have in the copy; include what it contains"
        )
    if other := roots.get(include.name):
        raise UsageError(
            f"--include {include}: would replace {other} in the copy, since both are named {include.name!r}; rename "
            f"or leave out one of them"
        )


def _insist_on_limit(context: Context, sizes: Mapping[str, int]) -> None:
    if (total := sum(sizes.values())) <= LIMIT_BYTES:
        return
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:10]
    included = f" with {', '.join(map(str, context.includes))}" if context.includes else ""
    raise UsageError(
        f"{context.folder}: the context directory{included} has {total} bytes, the limit is {LIMIT_BYTES} (95 MiB); "
        f"name data in .detignore and read it from shared storage. Largest: "
        + ", ".join(f"{place} ({sizes[place]})" for place in largest)
    )


def _sized_file(path: Path) -> dict[str, int]:
    if not path.is_file():
        raise UsageError(f"--include {path}: is neither a file nor a folder")
    if not os.access(path, os.R_OK):
        raise _unreadable(path)
    return {path.name: path.stat().st_size}


def _content(folder: Path, place: str) -> tuple[dict[str, int], list[str]]:
    """Return the size of each file of `folder` that is not ignored, by its path in the copy, and all folders.

    `place`: the path of `folder` in the copy; "" for the copy itself.
    """
    sizes: dict[str, int] = {}
    folders = [place] if place else []
    below = f"{place}/" if place else ""
    ignored = _ignored(folder)
    pending = [(str(folder), "")]
    while pending:
        path, prefix = pending.pop()
        for entry in _entries(path, prefix, ignored):
            if entry.is_dir():
                folders.append(f"{below}{prefix}{entry.name}")
                pending.append((entry.path, f"{prefix}{entry.name}/"))
            else:
                sizes[f"{below}{prefix}{entry.name}"] = entry.stat().st_size
    return sizes, folders


def _entries(folder: str, prefix: str, ignored: GitIgnoreSpec) -> Iterator[os.DirEntry[str]]:
    """Yield the files and folders directly in `folder` that are not ignored. `prefix`: its path, for the patterns."""
    try:
        entries = [*os.scandir(folder)]
    except OSError:
        raise _unreadable(Path(folder)) from None
    for entry in entries:
        name = f"{prefix}{entry.name}"
        try:
            is_folder, is_file = entry.is_dir(), entry.is_file()  # not so for dangling links, such as editors' locks
        except OSError as error:
            if ignored.match_file(name) or ignored.match_file(f"{name}/"):
                continue
            raise UsageError(
                f"{entry.path}: a link that cannot be followed: {error.strerror}; remove it, or name it in .detignore"
            ) from None
        if is_folder:
            if ignored.match_file(f"{name}/"):
                continue
            if entry.is_symlink():
                raise UsageError(
                    f"{entry.path}: a link to a folder, which jobs would lack; copy it, or name it in .detignore"
                )
            yield entry
        elif is_file and not ignored.match_file(name):
            if not os.access(entry.path, os.R_OK):
                raise _unreadable(Path(entry.path))
            yield entry


def _ignored(folder: Path) -> GitIgnoreSpec:
    """Return the patterns of the folder's .detignore and those of ALWAYS_IGNORED."""
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
    return UsageError(
        f"{path}: not readable, so it cannot be copied for the job; change its mode, or name it in .detignore"
    )


# --- the state of the code in git


GIT_TIMEOUT_S = 20.0
"""Seconds for all calls of git together."""
MOST_DIFF_BYTES = 5 * 1024 * 1024
"""Maximum size of the recorded diff."""
_FILES_A_CALL = 500
"""Number of files in one call of `git diff`."""
_USERS_OWN = ("system", "global")
"""Scopes of git's configuration that a repository cannot write."""
_FILTERS = r"^filter\..*\.(clean|smudge|process)$"
_NO_PROGRAMS = (
    *("-c", "core.fsmonitor="),
    *("-c", "core.hooksPath=/dev/null"),
    *("-c", "diff.external="),
    *("-c", "diff.autoRefreshIndex=false"),  # a refresh would write the index
    "--no-pager",
)
_STATUS = ("status", "--porcelain", "-z", "--untracked-files=no", "--no-renames", "--ignore-submodules=dirty")
_DIFF = (
    *("diff", "--no-ext-diff", "--no-textconv", "--no-color", "--no-renames", "--ignore-submodules=dirty"),
    *("--no-relative", "--src-prefix=a/", "--dst-prefix=b/"),
)
_ENVIRONMENT = {
    "GIT_ALLOW_PROTOCOL": "",  # do not fetch missing objects
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_LITERAL_PATHSPECS": "1",  # file names are not patterns
    "GIT_OPTIONAL_LOCKS": "0",  # `git status` would refresh and write the index (git(1))
    "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C",
}


@dataclass(frozen=True, kw_only=True)
class GitState:
    """The state of an experiment's code in git at submission."""

    commit: str
    branch: str | None
    """The branch; None for a detached HEAD."""
    remote: str | None
    """The URL of `origin` without credentials; None if there is none."""
    changed: list[str]
    """Files that differ from the commit or were deleted, relative to the context directory."""
    untracked: list[str]
    """Files of the snapshot that git does not track."""
    diff: bytes
    """The diff of the changed files from the repository's root, in the format of `git apply`; cut after
    MOST_DIFF_BYTES.
    """

    def as_json(self) -> dict[str, Any]:
        """Return the state without the diff, as JSON values."""
        return {
            "commit": self.commit,
            "branch": self.branch,
            "dirty": bool(self.changed or self.untracked),
            "remote": self.remote,
            "changed": self.changed,
            "untracked": self.untracked,
        }


class _NoAnswerError(Exception):
    """git, the repository or the commit does not exist, or git takes too long."""

    def __init__(self, code: int | None = None) -> None:
        self.found_nothing = code == 1
        """Whether a command of git has exited with 1, which means that it found nothing."""


def git_state(context_dir: Path, places: Collection[str]) -> GitState | None:
    """Return the state in git, or None if there is none or git tracks none of the files.

    `places`: the files of the snapshot that are in `context_dir`, relative to it.
    """
    try:
        return _state(_Git(context_dir), set(places), left_out(context_dir))
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
    """Return whether git tracks the file, itself or as part of a submodule."""
    # `git ls-files` prints a submodule as one entry.
    return name in tracked or any(str(folder) in tracked for folder in Path(name).parents)


def _diff(git: _Git, changed: Sequence[str]) -> bytes:
    """Return the diff of the files, cut at a line end if it is too large."""
    found, left = b"", iter(changed)
    # Several calls, because the length of an argument list is limited.
    while (some := [*islice(left, _FILES_A_CALL)]) and len(found) <= MOST_DIFF_BYTES:
        found += git.ask(*_DIFF, "HEAD", "--", *some)
    if len(found) <= MOST_DIFF_BYTES:
        return found
    whole_lines = found[: found.rfind(b"\n", 0, MOST_DIFF_BYTES) + 1]
    return whole_lines + f"# cut: more than {MOST_DIFF_BYTES} bytes differ from the commit\n".encode()


def _without_secrets(url: str | None) -> str | None:
    """Return the URL without parts that may be credentials; None if it cannot be parsed."""
    if url is None or "://" not in url:
        return url
    try:
        scheme, place, path, _query, _fragment = urlsplit(url)
    except ValueError:  # a host in brackets that is not an IP address
        return None
    user, at, host = place.rpartition("@")
    # The user in `ssh://git@host/` is part of the address. For other schemes, all but host and path may be a token.
    name = f"{user.partition(':')[0]}@" if at and scheme == "ssh" else ""
    return f"{scheme}://{name}{host}{path}"


class _Git:
    """Calls of git in one folder. Each raises _NoAnswerError if git fails or the time is up."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._end = time.monotonic() + GIT_TIMEOUT_S
        self._settings = list(_NO_PROGRAMS)
        self._settings += self._no_filters()

    def has(self, name: str) -> bool:
        """Return whether the path exists in the folder."""
        return os.path.lexists(self._folder / name)

    def ask(self, *arguments: str) -> bytes:
        """Run git and return its stdout."""
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
        """Return the single line that git prints."""
        return os.fsdecode(self.ask(*arguments)).rstrip("\n")

    def line_or_none(self, *arguments: str) -> str | None:
        """Return the single line that git prints; None if it found nothing."""
        try:
            return self.line(*arguments)
        except _NoAnswerError as error:
            if error.found_nothing:
                return None
            raise

    def names(self, *arguments: str) -> list[str]:
        """Return the names that git prints, each terminated by a zero byte."""
        return os.fsdecode(self.ask(*arguments)).split("\0")[:-1]

    def _no_filters(self) -> Iterator[str]:
        """Yield options that disable the filters which the repository itself defines."""
        listed = self.line_or_none("config", "--show-scope", "--name-only", "--null", "--get-regexp", _FILTERS)
        words = (listed or "").split("\0")
        for scope, key in zip(words[::2], words[1::2], strict=False):
            if scope in _USERS_OWN:
                continue
            if "=" in key:  # -c cannot set such a key
                raise _NoAnswerError
            driver = key.rpartition(".")[0]
            yield from ("-c", f"{key}=", "-c", f"{driver}.required=false")
