"""What git says of the context directory at submission: the commit, and what of the code is in none.

A repository may come from anybody, and its configuration names programs: hooks, monitors, filters, drivers of diffs,
transports. None of them is run (git-config(1), gitattributes(5)); filters of the user's own or of the system, such as
git-lfs, are.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hpc_det.submit.snapshot import left_out

TIMEOUT_S = 20.0
"""For all questions together."""
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
        self._end = time.monotonic() + TIMEOUT_S
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
