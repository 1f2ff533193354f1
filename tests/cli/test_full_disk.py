"""Commands on a file system without space: one sentence with the path and the remedy, and nothing half-done."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from hpc_det.errors import refused
from hpc_det.node.full_disk import sentence
from hpc_det.requeue import Action, Cause
from tests.cli.conftest import CONFIG, TRIAL, Command, Result
from tests.cli.life import FakeScheduler, Life
from tests.facts import unnamed
from tests.small_disk import disk as disk
from tests.small_disk import fill

pytestmark = pytest.mark.integration
REMEDIES = ("df -h", "hpc-det checkpoint rm", "hpc-det experiment delete", "HPC_DET_ROOT")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a folder with code and an experiment file, on a file system with space."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "model_def.py").write_text(TRIAL)
    (folder / "experiment.yaml").write_text(CONFIG)
    return folder


@pytest.fixture
def root(disk: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a state root on the small disk."""
    monkeypatch.setenv("HPC_DET_ROOT", str(disk / "root"))
    return disk / "root"


@pytest.fixture
def life(root: Path, scheduler: FakeScheduler) -> Life:
    """Experiment 1, which is completed and has a checkpoint."""
    life = Life.submitted(root)
    life.begins()
    life.reports("validation", 100, {"accuracy": 0.5})
    life.saves(100, uuid="1f0c0a52-0000-4000-8000-000000000001")
    life.finishes()
    code = life.folder.code
    code.mkdir()
    (code / "model_def.py").write_text(TRIAL)
    return life


def fill_but(disk: Path, free_bytes: int) -> None:
    """Fill the disk up to `free_bytes`."""
    path = fill(disk)
    os.truncate(path, max(path.stat().st_size - free_bytes, 0))


def says_no_space(result: Result, below: Path) -> None:
    """Assert that a command failed with one line that names a path on the disk and what to do."""
    code, _, err = result
    assert code in (1, 2)
    assert len(err.splitlines()) == 1, err
    assert not unnamed(err, f"{below}/", "No space left on device", *REMEDIES)


@pytest.mark.parametrize("free_bytes", [0, 4096, 8192, 16384, 24576])
def test_an_experiment_is_created_as_a_whole_or_not_at_all(
    hpc_det: Command, root: Path, disk: Path, project: Path, free_bytes: int
) -> None:
    fill_but(disk, free_bytes)
    says_no_space(
        hpc_det("experiment", "create", project / "experiment.yaml", project, "--cluster", "local", "--paused"), disk
    )
    assert [*(root / "experiments").glob("*")] == []


def test_a_report_that_finds_no_space_leaves_the_last_one(hpc_det: Command, life: Life, disk: Path) -> None:
    file = disk / "report.html"
    file.write_text("the last one")
    fill(disk)
    says_no_space(hpc_det("report", 1, "-o", file), disk)
    assert file.read_text() == "the last one"
    assert {path.name for path in disk.iterdir()} == {"root", "ballast", "report.html"}


@pytest.mark.parametrize(
    "command",
    [
        ("experiment", "download", "1"),
        ("experiment", "download-model-def", "1"),
        ("trial", "download", "1/1"),
        ("checkpoint", "download", "1f0c"),
    ],
)
def test_a_copy_that_finds_no_space_leaves_nothing(
    hpc_det: Command, life: Life, disk: Path, command: tuple[str, ...]
) -> None:
    fill(disk)
    says_no_space(hpc_det(*command, "-o", disk / "copy"), disk)
    assert {path.name for path in disk.iterdir()} == {"root", "ballast"}


@pytest.mark.parametrize(
    "command", [("kill", 2), ("pause", 2), ("set", "name", 2, "other"), ("label", "add", 2, "x")], ids=lambda it: it[0]
)
def test_a_change_that_finds_no_space_names_the_file_that_could_not_be_written(
    hpc_det: Command, life: Life, disk: Path, command: tuple[object, ...]
) -> None:
    Life.submitted(disk / "root", job_id="4712").begins()
    fill(disk)
    result = hpc_det("experiment", *command)
    says_no_space(result, disk)
    assert "hpc-det-" not in result.err.partition(": No space")[0], "no temporary name"


def test_a_kill_that_finds_no_space_ends_the_jobs(
    hpc_det: Command, life: Life, disk: Path, scheduler: FakeScheduler
) -> None:
    Life.submitted(disk / "root", job_id="4712").begins()
    fill(disk)
    killed = hpc_det("experiment", "kill", 2)
    says_no_space(killed, disk)
    assert scheduler.cancelled == ["4712"]
    assert "ERROR" in killed.err
    assert "ERROR" in hpc_det("experiment", "describe", 2).out


def test_what_frees_space_works_without_any(hpc_det: Command, life: Life, disk: Path) -> None:
    fill(disk)
    assert hpc_det("checkpoint", "rm", "1f0c", "--yes").code == 0
    fill(disk)
    assert hpc_det("experiment", "delete", 1, "--yes").code == 0
    assert not life.folder.path.exists()


def test_what_only_reads_works_without_any(hpc_det: Command, life: Life, disk: Path) -> None:
    life.attempt_prints("all is well\n")
    fill(disk)
    for command in ("list", "describe 1", "logs 1", "list-trials 1", "list-checkpoints 1"):
        assert hpc_det("experiment", *command.split()).code == 0


def test_a_quota_has_its_own_remedy() -> None:
    (problem,) = refused(OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "/home/ada/x.json")).problems
    assert not unnamed(problem, "/home/ada/x.json", "quota", "quota -s", *REMEDIES[1:])


def test_the_message_of_a_rank_has_the_remedy_too() -> None:
    assert not unnamed(sentence(OSError(errno.ENOSPC, "", "/home/x.pt")), "/home/x.pt", "No space", "free", *REMEDIES)


def test_the_cause_of_an_attempt_is_shown_with_the_path(hpc_det: Command, root: Path, scheduler: FakeScheduler) -> None:
    life = Life.submitted(root)
    life.begins()
    failure = sentence(OSError(errno.ENOSPC, "", str(life.trial.checkpoints / "x")))
    life.ends(Cause.DISK_FULL, Action.REQUEUE, steps=20, why="disk full", failure=failure)
    shown = hpc_det("experiment", "describe", 1).out
    assert not unnamed(shown, str(life.trial.checkpoints / "x"), "batch 20", *REMEDIES)
