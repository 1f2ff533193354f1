"""Findings about this machine and the folder for experiments."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from hpc_det.doctor import Finding, this_machine
from hpc_det.doctor.this_machine import findings
from hpc_det.launch.watch.health import NodeProblem
from hpc_det.node import mounts
from hpc_det.node.mounts import file_system
from hpc_det.submit import bundle
from tests.cli.life import Life
from tests.doctor.sites import one
from tests.facts import unnamed
from tests.installed_packages import Site
from tests.nvml import Nvml, installed
from tests.wait import DEADLINE_S

pytestmark = pytest.mark.integration

MOUNTS = """\
/dev/vda / ext4 rw 0 0
tmpfs /dev/shm tmpfs rw 0 0
server:/home /home nfs4 rw 0 0
server:/two\\040words /home/two\\040words lustre rw 0 0
"""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the time limit: the disk of this machine may be slow."""
    monkeypatch.setattr(this_machine, "ANSWER_S", DEADLINE_S)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder for experiments, on a file system that all nodes share."""
    mounted(monkeypatch, tmp_path, "nfs4")
    folder = tmp_path / "root"
    folder.mkdir(mode=0o700)
    return folder


def mounted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    """Make the whole machine one file system of this type."""
    file = tmp_path / "mounts"
    file.write_text(f"something / {kind} rw 0 0\n")
    monkeypatch.setattr(mounts, "MOUNTS", file)


def told_of(root: Path, has_nodes: bool = True) -> list[Finding]:
    return list(findings({"HPC_DET_ROOT": str(root)}, has_nodes=has_nodes))


def test_a_shared_private_folder_is_what_is_wanted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_machine, "LITTLE_FREE", 0)
    monkeypatch.setattr(this_machine, "LEAST_FREE", 0)
    found = told_of(root)
    assert {finding.verdict for finding in found} == {"ok"}
    assert one(found, "Python").message.endswith(f"in {sys.prefix} (nfs4)")
    assert one(found, "HPC_DET_ROOT").message == f"HPC_DET_ROOT {root} (nfs4)"
    assert one(found, "mode").message == f"{root} has mode 0700"
    assert one(found, " open").message == "0 experiments, 0 open"


def test_a_machine_without_a_scheduler_has_gpus_and_cpus(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, Nvml("GPU-a", "GPU-b"))
    assert one(told_of(root, has_nodes=False), "2 GPUs", "NVIDIA H200", "141 GiB", "CPUs").verdict == "ok"
    monkeypatch.setattr("hpc_det.schedulers.site.torch_has_cuda", lambda: False)
    assert one(told_of(root, has_nodes=False), "torch", "CUDA").verdict == "note"
    installed(monkeypatch, Nvml())
    assert one(told_of(root, has_nodes=False), "NVIDIA driver").remedy == "run nvidia-smi"


def test_the_root_is_told_with_what_sets_it(root: Path, tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text(f"root: {root}/$USER\n")
    found = list(findings({"HPC_DET_SITE_CONF": str(tmp_path)}, has_nodes=True))
    assert one(found, "HPC_DET_ROOT", tmp_path / "site.yaml").verdict == "ok"


def test_imports_from_a_shared_file_system(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "thousands of files on nfs4" in one(told_of(root), "environment.bundle").message
    site = Site.install(tmp_path)
    monkeypatch.setattr(bundle, "site_folders", lambda: [str(site.folder)])
    path = bundle.bundle_path(root)
    bundle.write_bundle(path)
    assert str(path) in one(told_of(root), "environment.bundle").message
    mounted(monkeypatch, tmp_path, "ext4")
    assert not any("environment.bundle" in finding.message for finding in told_of(root))


def test_whether_this_machine_could_make_a_copy_of_the_environment_and_what_the_shared_file_system_costs(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site.install(tmp_path)
    monkeypatch.setattr(this_machine, "site_folders", lambda: [str(site.folder)])
    disk = tmp_path / "disk"
    disk.mkdir()
    monkeypatch.delenv("SLURM_TMPDIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    told = one(told_of(root), "environment.stage").message
    assert unnamed(told, "7 files", "nfs4", "ms", f"{disk} is not on a local disk") == []
    with (tmp_path / "mounts").open("a") as file:
        file.write(f"disk {disk} xfs rw 0 0\n")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    told = one(told_of(root), "environment.stage").message
    assert unnamed(told, f"copies them to {disk}", "squashfuse or apptainer, which are missing") == []
    monkeypatch.setattr(shutil, "which", lambda name: f"/opt/{name}")
    assert "mounts with /opt/squashfuse_ll" in one(told_of(root), "environment.stage").message


def test_nothing_stays_behind(root: Path) -> None:
    told_of(root)
    assert list(root.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/alice", "nfs4"),
        ("/home/two words/env", "lustre"),
        ("/homes/alice", "ext4"),
        ("/dev/shm/x", "tmpfs"),
        ("/", "ext4"),
    ],
)
def test_the_file_system_of_a_path(path: str, kind: str) -> None:
    assert file_system(Path(path), MOUNTS) == kind


def test_a_machine_that_tells_no_mounts() -> None:
    assert file_system(Path("/home"), "garbage\n\n") == "unknown"


@pytest.mark.parametrize(("kind", "verdict"), [("tmpfs", "problem"), ("overlay", "problem"), ("lustre", "ok")])
def test_what_the_nodes_do_not_see(
    kind: str, verdict: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted(monkeypatch, tmp_path, kind)
    assert one(told_of(root), f"HPC_DET_ROOT {root}").verdict == verdict
    assert one(told_of(root), "Python").verdict == verdict
    assert one(told_of(root, has_nodes=False), f"HPC_DET_ROOT {root}").verdict == "ok"


@pytest.mark.parametrize(
    ("path", "verdict"), [("/tmp/root", "problem"), ("/var/tmp/root", "problem"), ("/data/root", "note")]
)
def test_a_disk_may_be_exported_and_a_temporary_folder_is_not(
    path: str, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted(monkeypatch, tmp_path, "xfs")
    assert one(told_of(Path(path)), f"HPC_DET_ROOT {path}").verdict == verdict


@pytest.mark.parametrize(("mode", "verdict"), [(0o700, "ok"), (0o750, "note"), (0o702, "problem"), (0o777, "problem")])
def test_who_else_may_look_or_write(mode: int, verdict: str, root: Path) -> None:
    root.chmod(mode)
    found = one(told_of(root), "has mode")
    assert (found.verdict, bool(found.remedy)) == (verdict, mode != 0o700)


@pytest.mark.parametrize(("free", "verdict"), [(0, "ok"), (sys.maxsize, "note")])
def test_little_room(free: int, verdict: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_machine, "LEAST_FREE", 0)
    monkeypatch.setattr(this_machine, "LITTLE_FREE", free)
    assert one(told_of(root), "GiB").verdict == verdict


def test_a_folder_that_is_not_there_yet(root: Path) -> None:
    found = told_of(root / "new")[-1]
    assert (found.verdict, unnamed(found.message, root / "new")) == ("ok", [])


def test_a_folder_that_cannot_be_made(root: Path) -> None:
    (root / "file").touch()
    found = told_of(root / "file" / "new")[-1]
    assert (found.verdict, unnamed(found.message, root / "file" / "new", root / "file")) == ("problem", [])


def test_a_folder_that_takes_no_file(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = NodeProblem(f"{root}: Disk quota exceeded")
    monkeypatch.setattr(this_machine, "folder_problem", lambda folder, shared: full)
    assert one(told_of(root), "Disk quota exceeded").verdict == "problem"


def test_a_file_server_that_does_not_answer(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_machine, "ANSWER_S", 0.1)
    monkeypatch.setattr(this_machine, "_seen", lambda folder: os.read(os.pipe()[0], 1))
    found = told_of(root)[-1]
    assert found.verdict == "problem"
    assert not unnamed(found.message, f"HPC_DET_ROOT {root}")


def test_experiments_are_counted(root: Path) -> None:
    life = Life.submitted(root)
    assert one(told_of(root), "1 experiment", "1 open")
    (life.folder.path / "jobs" / "1.json").write_text("{")
    (life.folder.path / "effective.json").write_text("{")
    assert one(told_of(root), "1 experiment", "0 open", "files of 1").verdict == "note"
