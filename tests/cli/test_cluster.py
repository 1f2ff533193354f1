"""hpc-det cluster, with recorded answers of a Slurm."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from hpc_det.config.plain_yaml import load_yaml
from hpc_det.plan.effective import valid_profile
from tests.cli.conftest import Command
from tests.facts import unnamed
from tests.nvml import Nvml, installed
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
    assert rows[:2] == [["NAME", "SCHEDULER", "DEFAULT", "FILE"], ["atlas", "slurm", "yes", str(file)]]
    assert [row[0] for row in rows[2:]] == ["local", "pbs", "slurm"]


@pytest.mark.integration
def test_a_profile_of_the_site_can_be_read_by_all_users(hpc_det: Command, slurm: None, tmp_path: Path) -> None:
    file = tmp_path / "site" / "cluster" / "atlas.yaml"
    assert hpc_det("cluster", "detect", "-o", str(file)).code == 0
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (file, file.parent, file.parent.parent)]
    assert modes == [0o644, 0o755, 0o755]
    file.chmod(0o640)
    assert hpc_det("cluster", "detect", "-o", str(file), "--force").code == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o640


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


def test_without_a_scheduler_the_profile_is_for_this_machine(
    hpc_det: Command, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, Nvml("GPU-a", "GPU-b", "GPU-c"))
    found = hpc_det("cluster", "detect", "--name", "desk", "--write")
    assert not unnamed(found.err, "Slurm", "sinfo", "PBS", "pbsnodes", "PATH")
    tree = load_yaml(root / "conf" / "cluster" / "desk.yaml")
    assert tree["cpus_per_slot"] == max(len(os.sched_getaffinity(0)) // 3, 1)
    assert (tree["name"], tree["scheduler"], tree["slots_per_node"], tree["slot_type"]) == ("desk", "local", 3, "gpu")
    assert valid_profile(tree).max_nodes == 1
    assert json.loads(hpc_det("cluster", "list", "--json").out)[0]["default"]


def test_a_machine_without_gpus_has_a_profile_with_ranks_on_cpus(hpc_det: Command) -> None:
    found = hpc_det("cluster", "detect", "--name", "desk")
    assert not unnamed(found.out, "slot_type: cpu", "slots_per_node: 2", "no NVIDIA GPU")


def test_a_driver_that_does_not_answer_is_told(hpc_det: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, Nvml())
    found = hpc_det("cluster", "detect", "--name", "desk")
    assert "slot_type: cpu" in found.out
    assert not unnamed(found.err, "NVIDIA driver", "nvidia-smi")


def test_a_named_scheduler_that_is_not_here_is_not_replaced_by_this_machine(hpc_det: Command) -> None:
    assert hpc_det("cluster", "detect", "--scheduler", "pbs").fails(2, "--scheduler pbs", "pbsnodes", "PATH")


def test_a_broken_profile_is_named_and_the_others_are_listed(hpc_det: Command, root: Path) -> None:
    folder = root / "conf" / "cluster"
    folder.mkdir(parents=True)
    (folder / "atlas.yaml").write_text("name: [")
    shown = hpc_det("cluster", "list")
    assert [line.split()[0] for line in shown.out.splitlines()] == ["NAME", "atlas", "local", "pbs", "slurm"]
    assert not unnamed(shown.err, folder / "atlas.yaml")
    (atlas, *others) = json.loads(hpc_det("cluster", "list", "--json").out)
    assert (atlas["name"], atlas["scheduler"], atlas["default"]) == ("atlas", None, True)
    assert atlas["problem"]
    assert [other["problem"] for other in others] == [None, None, None]


def test_the_list_says_why_none_is_the_default(hpc_det: Command, slurm: None, root: Path) -> None:
    shown = hpc_det("cluster", "list")
    assert "yes" not in shown.out.split()
    assert not unnamed(shown.err, "Slurm", "hpc-det cluster detect", "--cluster local")


def test_an_unknown_profile_is_told_with_the_known_ones(hpc_det: Command) -> None:
    assert not unnamed(hpc_det("cluster", "show", "atlas").err, "'atlas'", "local, pbs, slurm")
