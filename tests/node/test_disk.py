"""One module changes the disk for the store and the checkpoints, so that faults have one place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import hpc_det

PACKAGE = Path(hpc_det.__file__).parent
DISK = PACKAGE / "node" / "disk.py"
MODULES = [
    path for name in ("node", "store", "checkpoint") for path in sorted((PACKAGE / name).rglob("*.py")) if path != DISK
]
OS = {
    *("fsync", "fdatasync", "ftruncate", "truncate", "link", "makedirs", "mkdir", "pwrite", "pwritev", "remove"),
    *("removedirs", "rename", "renames", "replace", "rmdir", "sendfile", "symlink", "unlink", "write", "writev"),
}
SHUTIL = {"copy", "copy2", "copyfile", "copyfileobj", "copytree", "move", "rmtree"}
METHODS = {
    *("hardlink_to", "mkdir", "rename", "rmdir", "symlink_to", "touch", "unlink", "write_bytes", "write_text"),
}
WRITING_FLAGS = {"O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC", "O_APPEND"}


def changes(source: str) -> Iterator[str]:
    """Calls that change the disk. A variable mode or flags count as writing."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and _changes_the_disk(node):
            yield ast.unparse(node.func)


def _changes_the_disk(call: ast.Call) -> bool:
    owner, _, name = ast.unparse(call.func).rpartition(".")
    match owner, name:
        case "disk", _:
            return False
        case "os", "open":
            return not _only_reads(call.args[1])
        case ("os", "fdopen") | ("", "open"):
            return not _mode_reads(call, first=1)
        case "os", _:
            return name in OS
        case "shutil", _:
            return name in SHUTIL
        case _, "open":
            return not _mode_reads(call, first=0)
    return bool(owner) and name in METHODS


def _only_reads(flags: ast.expr) -> bool:
    names = {part.attr for part in ast.walk(flags) if isinstance(part, ast.Attribute)}
    return bool(names) and not names & WRITING_FLAGS


def _mode_reads(call: ast.Call, first: int) -> bool:
    given = [keyword.value for keyword in call.keywords if keyword.arg == "mode"] or call.args[first : first + 1]
    if not given:
        return True
    mode = given[0].value if isinstance(given[0], ast.Constant) else None
    return isinstance(mode, str) and not {*mode} & {*"wax+"}


@pytest.mark.parametrize("module", MODULES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_nothing_else_changes_the_disk(module: Path) -> None:
    assert list(changes(module.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "line",
    [
        *("os.rename(a, b)", "os.fsync(f)", "shutil.rmtree(a)", "path.unlink()", "(a / b).mkdir()", "open(a, 'wb')"),
        *("path.open('a')", "os.open(a, os.O_WRONLY)", "os.open(a, flags)", "os.fdopen(f, mode='w')", "open(a, mode)"),
    ],
)
def test_a_call_that_changes_it_is_seen(line: str) -> None:
    assert len(list(changes(line))) == 1


@pytest.mark.parametrize(
    "line", ["open(a)", "path.open('rb')", "os.open(a, os.O_RDONLY)", "disk.unlink(a)", "text.replace(a, b)"]
)
def test_reading_changes_nothing(line: str) -> None:
    assert list(changes(line)) == []
