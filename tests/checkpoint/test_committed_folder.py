"""Foreign or modified files in the folder of a checkpoint are detected before any file is opened."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_det.checkpoint.committed import (
    LOAD_DATA,
    MANIFEST,
    Committed,
    committed,
    newest_good,
    newest_steps,
    parsed,
)
from hpc_det.checkpoint.committed_folder import OddManifest
from hpc_det.checkpoint.damaged import damaged_ones, set_aside
from hpc_det.checkpoint.seals import CRC, FileEntry
from hpc_det.checkpoint.staging import new_staging
from hpc_det.errors import HpcDetError
from hpc_det.node.files import SHARED_FOLDER
from tests.checkpoint.saved import saved
from tests.facts import refused

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder that contains an older, good checkpoint."""
    folder = tmp_path / "checkpoints"
    folder.mkdir(mode=0o700)
    saved(folder, 10)
    return folder


@pytest.fixture
def newer(folder: Path) -> Committed:
    return saved(folder, 20)


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def link(path: Path) -> None:
    """Replace the file by a link to the same bytes elsewhere, where they could be changed later."""
    elsewhere = path.parents[2] / path.name
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def linked_folder(path: Path) -> None:
    elsewhere = path.parents[1] / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def give_away(path: Path) -> None:
    os.chown(path, 1234, 1234)


def open_up(path: Path) -> None:
    path.chmod(0o777)


CHANGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a FIFO in the place of a file": (fifo, "state.pt"),
    "a FIFO in the place of the manifest": (fifo, MANIFEST),
    "a FIFO more": (fifo, "more"),
    "a link in the place of a file": (link, "state.pt"),
    "a link in the place of the manifest": (link, MANIFEST),
    "a link in the place of a folder": (linked_folder, "code"),
    "a file more": (lambda path: path.write_text("planted"), "shard-7.pth"),
    "a module more": (lambda path: path.write_text("planted"), "code/torch.py"),
    "a link to nowhere": (lambda path: path.symlink_to("missing"), "more"),
    "others may write": (open_up, "."),
}
AS_ROOT_ALONE = {"a file of another user": (give_away, "state.pt"), "a folder of another user": (give_away, ".")}


@pytest.mark.parametrize("what", [*CHANGES, *(pytest.param(what, marks=AS_ROOT) for what in AS_ROOT_ALONE)])
def test_what_is_wrong_with_one_is_named_and_the_next_one_is_taken(what: str, folder: Path, newer: Committed) -> None:
    change, name = {**CHANGES, **AS_ROOT_ALONE}[what]
    change(newer.path / name)
    found, (skipped,) = newest_good(folder, set_aside=set_aside)
    assert found is not None
    assert found.steps == 10
    assert newer.uuid in skipped
    assert name in skipped or name == "."
    assert newest_steps(folder) == 10
    (aside,) = damaged_ones(folder)
    assert aside.uuid == newer.uuid
    assert os.path.isdir(aside.place)


def test_a_checkpoint_that_is_a_link_is_set_aside_and_what_it_leads_to_stays(folder: Path, newer: Committed) -> None:
    elsewhere = folder.parent / "elsewhere"
    newer.path.rename(elsewhere)
    newer.path.symlink_to(elsewhere)
    found, _ = newest_good(folder, set_aside=set_aside)
    assert found is not None
    assert found.steps == 10
    assert (elsewhere / MANIFEST).exists()
    assert [found.steps for found in committed(folder)] == [10]


def test_what_nfs_and_a_killed_removal_leave_is_no_damage(newer: Committed) -> None:
    (newer.path / ".nfs000000000a").write_text("removed, and open somewhere")
    assert newer.damage() == []


def test_in_a_closed_folder_modes_do_not_matter_since_nobody_comes_to_it(newer: Committed) -> None:
    """Older versions wrote such files under an umask of 002 or 000."""
    (newer.path / "state.pt").chmod(0o666)
    assert newer.damage() == []


@AS_ROOT
def test_a_colleague_reads_what_is_shared_with_a_group(newer: Committed, folder: Path) -> None:
    """The files have one owner, who also owns the folder above."""
    for path in (folder, newer.path, *newer.path.rglob("*")):
        os.chown(path, 1234, 1234)
    assert any("1234" in problem for problem in newer.damage()), "not shared"
    for path in (folder, newer.path, newer.path / "code"):
        path.chmod(SHARED_FOLDER)
    assert newer.damage() == []
    os.chown(newer.path / "state.pt", 1235, -1)
    assert ["1235" in problem for problem in newer.damage()] == [True]


# --- odd manifests

ODD: dict[str, Callable[[dict[str, Any]], Any]] = {
    "steps are a text": lambda told: told.update(steps_completed="20"),
    "steps are negative": lambda told: told.update(steps_completed=-1),
    "steps are true": lambda told: told.update(steps_completed=True),
    "steps are huge": lambda told: told.update(steps_completed=10**30),
    "no steps": lambda told: told.pop("steps_completed"),
    "time is a text": lambda told: told.update(time="now"),
    "time is endless": lambda told: told.update(time=1e999),
    "files are a list": lambda told: told.update(files=["a"]),
    "an entry is a number": lambda told: told["files"].update({"a": 1}),
    "an entry has more": lambda told: told["files"].update({"a": {"size": 1, "crc32": 1, "x": 1}}),
    "a size is huge": lambda told: told["files"]["state.pt"].update(size=10**30),
    "a size is negative": lambda told: told["files"]["state.pt"].update(size=-1),
    "a size is larger than the file": lambda told: told["files"]["state.pt"].update(size=1 << 61),
    "a size is a fraction": lambda told: told["files"]["state.pt"].update(size=1.5),
    "a checksum is huge": lambda told: told["files"]["state.pt"].update(crc32=1 << 32),
    "an absolute path": lambda told: told["files"].update({"/etc/passwd": {"size": 1, "crc32": 1}}),
    "a path that leads out": lambda told: told["files"].update({"a/../../b": {"size": 1, "crc32": 1}}),
    "no name": lambda told: told["files"].update({"": {"size": 1, "crc32": 1}}),
    "a name with a zero": lambda told: told["files"].update({"a\0": {"size": 1, "crc32": 1}}),
    "removed is a number": lambda told: told.update(removed=5),
    "removed holds numbers": lambda told: told.update(removed=[5]),
}


@pytest.mark.parametrize("what", ODD)
def test_an_odd_manifest_is_named_and_the_next_checkpoint_is_taken(what: str, folder: Path, newer: Committed) -> None:
    told = json.loads((newer.path / MANIFEST).read_text())
    ODD[what](told)
    (newer.path / MANIFEST).write_text(json.dumps(CRC.sealed(told)))
    found, (skipped,) = newest_good(folder, set_aside=set_aside)
    assert found is not None
    assert found.steps == 10
    assert newer.uuid in skipped
    assert [found.uuid for found in damaged_ones(folder)] == [newer.uuid]


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 100_000, b"1" * 10_000, b"\0", b"\xff"])
def test_what_is_no_json_is_an_odd_manifest(text: bytes) -> None:
    with pytest.raises(OddManifest):
        parsed(text, Path("x"))


# --- what is written


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
@pytest.mark.parametrize("is_shared", [True, False])
def test_files_of_a_checkpoint_are_for_whom_its_folder_is_whatever_the_umask(
    folder: Path, umask: int, is_shared: bool
) -> None:
    if is_shared:
        folder.chmod(SHARED_FOLDER)
    before = os.umask(umask)
    try:
        checkpoint = saved(folder, 20)
    finally:
        os.umask(before)
    files = {path.stat().st_mode & 0o777 for path in checkpoint.path.rglob("*") if path.is_file()}
    assert files == {0o640 if is_shared else 0o600}
    assert checkpoint.damage() == []


def test_a_link_that_a_callback_leaves_becomes_a_file(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "vocabulary").write_text("a b c")
    staging = new_staging(folder)
    (staging.partial / "vocabulary").symlink_to(tmp_path / "vocabulary")
    entries: dict[str, FileEntry] = {}
    staging.add_others(entries)
    checkpoint = staging.commit(30, entries)
    assert checkpoint.damage() == []
    assert (checkpoint.path / "vocabulary").read_text() == "a b c"
    assert not (checkpoint.path / "vocabulary").is_symlink()


@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: path.symlink_to("/"), lambda path: path.symlink_to("missing")]
)
def test_what_no_checkpoint_can_hold_is_refused_when_it_is_written(folder: Path, make: Callable[[Path], Any]) -> None:
    staging = new_staging(folder)
    make(staging.partial / "odd")
    with refused(HpcDetError, "odd"):
        staging.add_others({})


def test_code_is_what_a_trial_brings_and_nothing_else(folder: Path) -> None:
    """A folder named `code` in a checkpoint without a trial is data, and a damaged bit in it counts as damage."""
    entry = FileEntry(size=1, crc32=1)
    found = Committed(path=folder, steps=1, time=1.0, files={"code/a": entry})
    assert (found.state, found.code) == ({"code/a": entry}, {})
    ours = Committed(path=folder, steps=1, time=1.0, files={"code/a": entry, LOAD_DATA: entry})
    assert (set(ours.state), set(ours.code)) == ({LOAD_DATA}, {"code/a"})
