"""Parse a page of the documentation into steps that can be executed: its files and commands, in order.

A fenced block whose first line is `# file: PATH`, or `{# file: PATH #}`, is a file. A block ```diff changes existing
files: after a line `--- PATH`, lines `-OLD` are replaced by the lines `+NEW` that follow them. In a block ```console
each line `$ COMMAND` is a command (long commands continue in lines `> ...`), and the text after it is its whole output,
with `...` for any text. Words after `console` are marks:

    setup     installs or clones, and is not executed: the tests run in its result
    slurm     needs a Slurm
    pbs       needs a PBS
    fails     ends with an error
    submit    submits to the reader's cluster NAME; the tests execute it with --dry-run (tests/docs/test_gallery.py)
    until     is repeated until its output is the one shown
    world     is executed among the experiments of tests/docs/world.py, which exist already
    checkout  is executed in a copy of the repository, with the files and changes of the page
    long      varies what another command of these pages shows, and is left to `make test-long`
"""

from __future__ import annotations

import doctest
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"^```(\S*)(.*)\n((?:.*\n)*?)```$", re.MULTILINE)
_FILE = re.compile(r"\{?# file: (\S+)(?: #\})?\n")
_CHANGED = re.compile(r"^--- (\S+)\n((?:[-+].*\n)+?)(?=---|\Z)", re.MULTILINE)
_HUNK = re.compile(r"((?:-.*\n)+)((?:\+.*\n)+)")
_COMMAND = re.compile(r"^\$ (.+(?:\n> .+)*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class File:
    path: str
    """May contain environment variables."""
    text: str


@dataclass(frozen=True, kw_only=True)
class Change:
    """Replaces lines of a file."""

    path: str
    old: str
    new: str

    def applied(self, text: str) -> str:
        """Return the text of the file with the new lines."""
        found = f"\n{text}".count(f"\n{self.old}")
        assert found == 1, f"{self.path} contains these lines {found} times, and not once:\n{self.old}"
        return f"\n{text}".replace(f"\n{self.old}", f"\n{self.new}")[1:]


@dataclass(frozen=True, kw_only=True)
class Command:
    line: str
    shown: str
    """The output, as the page shows it."""
    marks: frozenset[str]

    def agrees(self, output: str) -> bool:
        """Compare as doctest does with ELLIPSIS, where a line `...` may also match no line at all.

        The widths of columns are ignored: they depend on numbers that vary.
        """
        shown = re.sub(r"^\.\.\.\n", "...", self.shown, flags=re.MULTILINE)
        return doctest.OutputChecker().check_output(_narrow(shown), _narrow(output), doctest.ELLIPSIS)


@dataclass(frozen=True, kw_only=True)
class Page:
    text: str

    @classmethod
    def read(cls, path: Path) -> Page:
        return cls(text=path.read_text(encoding="utf-8"))

    @property
    def languages(self) -> set[str]:
        """Return the languages of all fenced blocks."""
        return {language for language, _, _ in _BLOCK.findall(self.text)}

    def steps(self) -> Iterator[File | Change | Command]:
        """Yield the steps of a reader from the top of the page to its end."""
        for language, marks, body in _BLOCK.findall(self.text):
            if language == "console":
                yield from _commands(body, frozenset(marks.split()))
            elif language == "diff":
                yield from _changes(body)
            elif file := _FILE.match(body):
                yield File(path=file[1], text=body)

    def links(self) -> list[str]:
        """Return the targets of all links to other files."""
        targets = re.findall(r"\]\(([^)#\s]+)", self.text)
        return [target for target in targets if "://" not in target]


def _narrow(text: str) -> str:
    return re.sub(" +", " ", text)


def _changes(body: str) -> Iterator[Change]:
    files = list(_CHANGED.finditer(body))
    assert "".join(file[0] for file in files) == body, f"a diff block begins with `--- PATH`:\n{body}"
    for path, lines in (file.groups() for file in files):
        hunks = list(_HUNK.finditer(lines))
        assert "".join(hunk[0] for hunk in hunks) == lines, f"{path}: lines -OLD come before lines +NEW:\n{lines}"
        for hunk in hunks:
            old, new = (re.sub(r"(?m)^[-+]", "", part) for part in hunk.groups())
            yield Change(path=path, old=old, new=new)


def _commands(body: str, marks: frozenset[str]) -> Iterator[Command]:
    found = list(_COMMAND.finditer(body))
    assert "".join(match[0] for match in found) == body, f"a console block begins with a command:\n{body}"
    for match in found:
        yield Command(line=match[1].replace("\n> ", "\n"), shown=match[2], marks=marks)
