from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpc_det.node import temporary
from hpc_det.node.files import append_line, flush_file, write_atomic
from hpc_det.node.temporary import ABANDONED_S, remove_abandoned, temporary_beside
from hpc_det.store.folders import TrialFolder


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


def test_what_a_killed_process_has_left_is_removed_at_once(tmp_path: Path) -> None:
    left = left_by_a_killed_process(tmp_path / "journal.jsonl")
    remove_abandoned([tmp_path, tmp_path / "missing"])
    assert not left.exists()


def test_what_a_live_process_writes_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = old(temporary_beside(tmp_path / "trial.json"))
    monkeypatch.setattr(temporary, "place", lambda: "another-4026531836")
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
    """What is on disk by name, in order."""
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
