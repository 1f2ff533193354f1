"""hpc-det cluster, with recorded answers of a Slurm."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.cli.conftest import Command
from tests.facts import unnamed
from tests.schedulers.recorded_sites import HERE

SAYS = {
    "sinfo": f"cat {HERE}/slurm-22.05/sinfo.txt",
    "scontrol": f"[ $2 = config ] && cat {HERE}/slurm-22.05/config.txt || cat {HERE}/slurm-22.05/partitions.txt",
    "srun": "echo no such flag",
}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put stubs of Slurm's commands first on PATH."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name, text in SAYS.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")


@pytest.mark.integration
def test_detect_prints_a_profile(hpc_det: Command, slurm: None, root: Path) -> None:
    result = hpc_det("cluster", "detect")
    assert (result.code, result.err) == (0, "")
    assert 'name: "lab"\nscheduler: slurm\n' in result.out
    assert not (root / "conf").exists()


@pytest.mark.integration
def test_a_profile_that_was_written_is_found_by_its_name(hpc_det: Command, slurm: None, root: Path) -> None:
    written = hpc_det("cluster", "detect", "--name", "atlas", "--write")
    file = root / "conf" / "cluster" / "atlas.yaml"
    assert written.out == f"Wrote {file}\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert hpc_det("cluster", "show", "atlas").out == file.read_text()
    rows = [line.split() for line in hpc_det("cluster", "list").out.splitlines()]
    assert rows[:2] == [["NAME", "SCHEDULER", "FILE"], ["atlas", "slurm", str(file)]]
    assert [row[0] for row in rows[2:]] == ["local", "pbs", "slurm"]


@pytest.mark.integration
def test_nothing_is_overwritten_unasked(hpc_det: Command, slurm: None, tmp_path: Path) -> None:
    file = tmp_path / "atlas.yaml"
    file.write_text("mine")
    refused = hpc_det("cluster", "detect", "-o", file)
    assert refused.code != 0
    assert not unnamed(refused.err, "--force")
    assert file.read_text() == "mine"
    assert hpc_det("cluster", "detect", "-o", file, "--force").code == 0
    assert "scheduler: slurm" in file.read_text()


@pytest.mark.integration
@pytest.mark.parametrize("name", ["../atlas", ".hidden", "a b", "a/b"])
def test_a_name_that_is_no_name_of_a_file_is_refused(name: str, hpc_det: Command, slurm: None) -> None:
    assert hpc_det("cluster", "detect", "--write", "--name", name).fails(2, "--name", repr(name), "start")


def test_two_places_to_write_to_are_refused(hpc_det: Command, tmp_path: Path) -> None:
    assert not unnamed(hpc_det("cluster", "detect", "--write", "-o", tmp_path / "file").err, "--write", "--output")


def test_without_a_scheduler_there_is_nothing_to_detect(
    hpc_det: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    refused = hpc_det("cluster", "detect")
    assert not unnamed(refused.err, "Slurm", "sinfo", "PBS", "pbsnodes", "PATH")


def test_an_unknown_profile_is_told_with_the_known_ones(hpc_det: Command) -> None:
    assert not unnamed(hpc_det("cluster", "show", "atlas").err, "'atlas'", "local, pbs, slurm")
