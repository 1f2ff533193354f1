"""The next agent on a node removes the folders of a killed agent, and no others."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hpc_det.launch.node_folders import OWNER, PREFIX, node_folders, owned, remove_leftovers
from tests.plan.plans import job_plan

pytestmark = pytest.mark.integration

OWN = """
import sys
from hpc_det.launch.node_folders import owned
with owned(sys.argv[1]):
    print("owned", flush=True)
    sys.stdin.read()
"""


def folder(base: Path) -> Path:
    return Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))


def left(base: Path) -> Path:
    """Return a folder with a file; its owner was killed."""
    found = folder(base)
    (found / "agent").touch()
    with subprocess.Popen([sys.executable, "-c", OWN, found], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout
        assert owner.stdout.readline() == b"owned\n"
        remove_leftovers(str(base))
        assert (found / "agent").exists(), "its owner lives"
        owner.kill()
    return found


def test_a_folder_goes_when_its_owner_was_killed(tmp_path: Path) -> None:
    found = left(tmp_path)
    remove_leftovers(str(tmp_path))
    assert not found.exists()


def test_who_begins_on_a_node_removes_what_was_left_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_det.launch.node_folders.LONGEST_SOCKET_FOLDER", len(str(tmp_path)) + 10)
    private, scratch = tmp_path / "tmp", tmp_path / "scratch"
    for base in (private, scratch):
        base.mkdir()
        left(base)
    monkeypatch.setattr(tempfile, "tempdir", str(private))
    plan = job_plan(scratch=str(scratch))
    with node_folders(plan) as first:
        assert [str(path) for base in (private, scratch) for path in base.iterdir()] == list(first)
        with node_folders(plan):
            pass
        assert [os.listdir(path) for path in filter(None, first)] == [[OWNER], [OWNER]]
    assert [*private.iterdir(), *scratch.iterdir()] == []


def test_a_folder_of_another_kernel_is_not_touched(tmp_path: Path) -> None:
    """It may belong to another node, on a shared file system."""
    found = folder(tmp_path)
    (found / OWNER).write_text("8f1c66c5-0000-4000-8000-000000000000\n")
    remove_leftovers(str(tmp_path))
    assert found.exists()


def test_what_is_not_an_agents_folder_is_not_touched(tmp_path: Path) -> None:
    dead = left(tmp_path)
    aside = dead.rename(tmp_path / "hpc-det-tensorboard-abcdefgh")
    (tmp_path / f"{PREFIX}abcdefgh").symlink_to(aside)
    (tmp_path / f"{PREFIX}bcdefghi").write_text("a file")
    folder(tmp_path)
    linked = folder(tmp_path)
    (linked / OWNER).symlink_to(aside / OWNER)
    before = sorted(tmp_path.iterdir())
    remove_leftovers(str(tmp_path))
    assert sorted(tmp_path.iterdir()) == before
    assert sorted(os.listdir(aside)) == [OWNER, "agent"]


def test_a_folder_of_somebody_else_is_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = left(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: found.stat().st_uid + 1)
    remove_leftovers(str(tmp_path))
    assert found.exists()


def test_without_a_place_for_the_lock_a_folder_is_nobodys_to_remove(tmp_path: Path) -> None:
    found = folder(tmp_path)
    (found / OWNER).mkdir()
    with owned(str(found)):
        remove_leftovers(str(tmp_path))
        assert found.exists()
    remove_leftovers(str(tmp_path / "no such folder"))
