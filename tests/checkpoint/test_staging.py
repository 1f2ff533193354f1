from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpc_det.checkpoint.committed import MANIFEST, committed, newest_good, newest_steps
from tests.checkpoint.killed import PARTS, assert_whole, save
from tests.facts import each_names, unnamed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    return folder


def test_a_checkpoint_comes_back_whole(folder: Path) -> None:
    made = save(folder, 10)
    assert committed(folder) == [made]
    assert_whole(made, 10)
    assert [path.name for path in folder.iterdir()] == [made.uuid]
    assert set(made.files) == {*PARTS, "callback/note"}


def test_the_newest_is_first(folder: Path) -> None:
    for steps in (20, 30, 10):
        save(folder, steps)
    assert [checkpoint.steps for checkpoint in committed(folder)] == [30, 20, 10]
    assert newest_steps(folder) == 30
    again = save(folder, 30)
    assert committed(folder)[0] == again, "the later of two with equal steps"


def test_no_folder_holds_no_checkpoint(tmp_path: Path) -> None:
    assert committed(tmp_path / "missing") == []
    assert newest_good(tmp_path / "missing") == (None, [])
    assert newest_steps(tmp_path / "missing") == 0


# --- killed


@pytest.mark.integration
def test_a_kill_at_any_point_leaves_the_old_or_the_new_checkpoint(folder: Path) -> None:
    command = [sys.executable, "-m", "tests.checkpoint.killed", str(folder)]
    found = json.loads(subprocess.check_output(command, cwd=Path(__file__).parents[2]))
    assert len(found) > 50
    assert found == sorted(found), "once committed, it stays"
    assert set(found) == {10, 20}


def test_every_step_is_on_disk_before_the_next(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        steps.append("partial" if path.name.startswith(".partial-") else path.name)

    def rename(source: Path, target: Path, real: Any = os.rename) -> None:
        steps.append("rename")
        real(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    save(folder, 10)
    *contents, manifest, partial, renamed, parent = steps
    assert sorted(contents) == sorted([*PARTS, "callback", "note"])
    assert [manifest, partial, renamed, parent] == [MANIFEST, "partial", "rename", "checkpoints"]


# --- damaged


def content(folder: Path) -> Any:
    """Return what a reader of the newest good checkpoint sees, or None without one."""
    newest, _ = newest_good(folder)
    return newest and (newest.steps, newest.time, newest.files)


def places() -> list[tuple[str, float]]:
    """Return fifty random places, as (file, relative offset), and the first and last byte of each file."""
    chance = random.Random(5)
    names = [*(name for name in PARTS), "callback/note", MANIFEST]
    anywhere = [(chance.choice(names), chance.random()) for _ in range(50)]
    return [*anywhere, *((name, place) for name in names for place in (0.0, 0.999999))]


@pytest.mark.parametrize(("name", "place"), places())
def test_one_flipped_bit_is_detected(folder: Path, name: str, place: float) -> None:
    path = save(folder, 10).path / name
    good, data = content(folder), bytearray(path.read_bytes())
    for bit in range(8):
        flipped = bytearray(data)
        flipped[int(place * len(data))] ^= 1 << bit
        path.write_bytes(flipped)
        # white space between JSON's tokens may change; the data may not
        assert content(folder) is None or (name == MANIFEST and content(folder) == good)


@pytest.mark.parametrize("name", [*PARTS, "callback/note", MANIFEST])
@pytest.mark.parametrize("kept", [0.0, 0.5, 0.999999])
def test_a_truncated_file_is_detected(folder: Path, name: str, kept: float) -> None:
    path = save(folder, 10).path / name
    os.truncate(path, int(path.stat().st_size * kept))
    assert content(folder) is None


@pytest.mark.parametrize("name", [*PARTS, "callback/note"])
def test_a_missing_or_grown_file_is_named(folder: Path, name: str) -> None:
    checkpoint = save(folder, 10)
    path = checkpoint.path / name
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + b"!")
    (grown,) = checkpoint.damage()
    assert unnamed(grown, f"{name}: ", f"{size + 1} bytes", size) == []
    path.unlink()
    (missing,) = checkpoint.damage()
    assert unnamed(missing, f"{name}: ", os.strerror(errno.ENOENT)) == []


def test_the_newest_good_one_is_found_behind_damaged_ones(folder: Path) -> None:
    oldest, *damaged = (save(folder, steps) for steps in (10, 20, 30))
    for checkpoint in damaged:
        (checkpoint.path / "progress.pth").write_bytes(b"steps at 99")
    newest, skipped = newest_good(folder)
    assert newest == oldest
    facts = [(each.uuid, f"{each.steps} batches", "progress.pth", "crc32") for each in reversed(damaged)]
    each_names(skipped, *facts)


@pytest.mark.parametrize(
    "text",
    [None, "", "garbage", "null", "[]", "{}", '"text"', '{"files": []}', '{"files": {"a": 1}}', "\xff", "[" * 99],
)
def test_without_its_manifest_a_folder_is_no_checkpoint(folder: Path, text: str | None) -> None:
    path = save(folder, 10).path / MANIFEST
    path.unlink() if text is None else path.write_text(text, encoding="latin-1")
    assert committed(folder) == []
    found, skipped = newest_good(folder)
    assert (found, len(skipped)) == (None, text is not None)


def test_an_edited_manifest_is_no_manifest(folder: Path) -> None:
    path = save(folder, 10).path / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), "steps_completed": 999}))
    assert newest_steps(folder) == 0


def test_a_stray_file_is_no_checkpoint(folder: Path) -> None:
    (folder / "README").write_text("mine")
    checkpoint = save(folder, 10)
    assert committed(folder) == [checkpoint]
