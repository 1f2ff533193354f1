"""Only one module changes the disk for store and checkpoints, so that faults can be injected there; temporary names."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import hpc_det
from hpc_det.node import disk
from hpc_det.node.disk import ABANDONED_S, remove_abandoned, temporary_beside
from hpc_det.node.files import flush_file, write_atomic
from hpc_det.node.json_files import append_line
from hpc_det.store.folders import TrialFolder

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
    """Yield the calls that change the disk. A variable mode, or variable flags, count as writing."""
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


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def old(path: Path) -> Path:
    path.touch()
    os.utime(path, (time.time() - 2 * ABANDONED_S,) * 2)
    return path


def left_by_a_killed_process(path: Path) -> Path:
    code = (
        "import os, signal, sys; from pathlib import Path; from hpc_det.node import files;"
        "os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL);"
        "files.write_atomic(Path(sys.argv[1]), 'half')"
    )
    before = names(path.parent)
    assert subprocess.run([sys.executable, "-c", code, str(path)]).returncode == -signal.SIGKILL
    (left,) = names(path.parent) - before
    return path.with_name(left)


@pytest.mark.integration
def test_what_a_killed_process_has_left_is_removed_at_once(tmp_path: Path) -> None:
    left = left_by_a_killed_process(tmp_path / "journal.jsonl")
    remove_abandoned([tmp_path, tmp_path / "missing"])
    assert not left.exists()


def test_what_a_live_process_writes_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = old(temporary_beside(tmp_path / "trial.json"))
    monkeypatch.setattr(disk, "process_namespace", lambda: "another-4026531836")
    theirs, theirs_since_long = temporary_beside(tmp_path / "new.json"), old(temporary_beside(tmp_path / "old.json"))
    theirs.touch()
    monkeypatch.undo()
    remove_abandoned([tmp_path])
    assert mine.exists()
    assert theirs.exists(), "of another machine"
    assert not theirs_since_long.exists()


def test_what_an_older_version_has_left_is_removed_when_it_is_old(tmp_path: Path) -> None:
    stay = {".new.json." + "0" * 32, ".index.json", "trial.json", ".cleaned", ".code-kept"}
    for name in stay:
        (tmp_path / name).touch()
    for name in (".index.json", "trial.json", ".cleaned", ".code-kept"):
        old(tmp_path / name)
    for name in (".stop.json." + "a" * 32, "." + "b" * 32):
        old(tmp_path / name)
    (tmp_path / ".code-kept-ab12_xyz").mkdir()
    old(tmp_path / ".code-kept-ab12_xyz")
    remove_abandoned([tmp_path])
    assert names(tmp_path) == stay


def test_all_folders_of_a_trial_and_its_experiment_are_cleared(tmp_path: Path) -> None:
    trial = TrialFolder(tmp_path / "12" / "trials" / "1")
    (tmp_path / "12").mkdir()
    trial.create()
    experiment = trial.experiment()
    for folder in (experiment.search, experiment.jobs, trial.failures(3)):
        folder.mkdir(parents=True)
    places = (trial.stop, trial.failures(3) / "0.json", trial.rendezvous(3), trial.checkpoints / "x.json")
    every = [*places, experiment.about, experiment.search / "000000000.json", experiment.job()]
    for path in every:
        old(path.with_name(f".{path.name}." + "c" * 32))
        path.touch()
    trial.remove_abandoned()
    assert not [path for path in tmp_path.rglob(".*") if path.is_file()]
    assert all(path.exists() for path in every)


# --- names of new files


def flushed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which each fsync appends the path of its file."""
    found: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    return found


@pytest.mark.parametrize("durable", [True, False])
def test_the_name_of_a_new_file_is_durable_with_its_first_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    path, found = tmp_path / "journal.jsonl", flushed(monkeypatch)
    append_line(path, {"event": "started"}, durable=durable)
    flush_file(path)
    assert str(tmp_path) in found
    assert found[-1] == str(path)
    found.clear()
    append_line(path, {"event": "ended"}, durable=durable)
    assert str(tmp_path) not in found, "once is enough"


def test_folders_of_a_trial_are_durable_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "12").mkdir()
    found = flushed(monkeypatch)
    trial = TrialFolder(tmp_path / "12" / "trials" / "1")
    trial.create()
    assert {str(tmp_path / "12"), str(trial.path.parent), str(trial.path)} <= {*found}


def test_an_atomic_write_leaves_no_other_name(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a.json", "1")
    assert names(tmp_path) == {"a.json"}
