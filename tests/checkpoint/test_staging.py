from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from hpc_det.checkpoint import staging as staging_module
from hpc_det.checkpoint.committed import MANIFEST, Committed, committed, newest_good, newest_steps
from hpc_det.checkpoint.staging import new_staging
from hpc_det.core.distributed import Distributed
from hpc_det.store import files as files_module
from tests.core.ranks import OnRanks

SAVING = {staging_module.__file__, files_module.__file__}
PARTS = {"state_dict.pth": b"weights" * 5000, "progress.pth": b"steps", "rank-0.pth": b""}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    return folder


def save(folder: Path, steps: int) -> Committed:
    """A checkpoint whose every file says at how many batches it was made."""
    staging = new_staging(folder)
    entries: dict[str, Any] = {}
    for name, content in PARTS.items():
        with staging.file(name, entries) as file:
            for piece in (content, b" at ", str(steps).encode()):
                file.write(piece)
    (staging.partial / "callback").mkdir()
    (staging.partial / "callback" / "note").write_text(f"at {steps}")
    staging.add_others(entries)
    return staging.commit(steps, entries)


def assert_whole(checkpoint: Committed, steps: int) -> None:
    assert checkpoint.steps == steps
    assert checkpoint.damage() == []
    for name, content in PARTS.items():
        assert (checkpoint.path / name).read_bytes() == content + f" at {steps}".encode()
    assert (checkpoint.path / "callback" / "note").read_text() == f"at {steps}"


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
    assert committed(folder)[0] == again, "of equal steps the later one"


def test_no_folder_holds_no_checkpoint(tmp_path: Path) -> None:
    assert committed(tmp_path / "missing") == []
    assert newest_good(tmp_path / "missing") == (None, [])
    assert newest_steps(tmp_path / "missing") == 0


# --- killed


def kill_before_line(number: int) -> None:
    """End this process, as kill -9 does, before the n-th line of the modules that write."""
    lines = count(1)

    def on_line(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and next(lines) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return on_line

    sys.settrace(lambda frame, event, argument: on_line if frame.f_code.co_filename in SAVING else None)


def kill_everywhere(distributed: Distributed, folder: Path) -> list[int]:
    """The newest good steps after a kill before each line of a save; the last one was not killed."""
    found = []
    for number in count(1):
        shutil.rmtree(folder)
        folder.mkdir()
        save(folder, 10)
        child = os.fork()
        if not child:
            kill_before_line(number)
            save(folder, 20)
            os._exit(0)
        killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        newest, skipped = newest_good(folder)
        assert newest is not None
        assert skipped == [], "a torn checkpoint was taken for a committed one"
        assert_whole(newest, newest.steps)
        found.append(newest.steps)
        save(folder, 30)
        assert not list(folder.glob(".*")), "the next save clears leftovers away"
        if not killed:
            return found
    raise AssertionError


def test_a_kill_at_any_point_leaves_the_old_or_the_new_checkpoint(on_ranks: OnRanks, folder: Path) -> None:
    (found,) = on_ranks(1, kill_everywhere, folder)
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
    """What a reader of the checkpoint learns; None where it is no good one."""
    newest, _ = newest_good(folder)
    return newest and (newest.steps, newest.time, newest.files)


def places() -> list[tuple[str, float]]:
    """Fifty places, as (file, how far into it), and the ends of each file."""
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
        # white space between JSON's tokens may change, what it says may not
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
    assert checkpoint.damage() == [f"{path.name}: {size + 1} bytes, the manifest says {size}"]
    path.unlink()
    assert checkpoint.damage() == [f"{path.name}: No such file or directory"]


def test_the_newest_good_one_is_found_behind_damaged_ones(folder: Path) -> None:
    oldest, *damaged = (save(folder, steps) for steps in (10, 20, 30))
    for checkpoint in damaged:
        (checkpoint.path / "progress.pth").write_bytes(b"steps at 99")
    newest, skipped = newest_good(folder)
    assert newest == oldest
    assert [problem.split(" is damaged: progress.pth: crc32 ")[0] for problem in skipped] == [
        f"checkpoint {checkpoint.uuid} at {checkpoint.steps} batches" for checkpoint in reversed(damaged)
    ]


@pytest.mark.parametrize(
    "text",
    [None, "", "garbage", "null", "[]", "{}", '"text"', '{"files": []}', '{"files": {"a": 1}}', "\xff", "[" * 99],
)
def test_without_its_manifest_a_folder_is_no_checkpoint(folder: Path, text: str | None) -> None:
    path = save(folder, 10).path / MANIFEST
    path.unlink() if text is None else path.write_text(text, encoding="latin-1")
    assert committed(folder) == []
    assert newest_good(folder) == (None, [])


def test_an_edited_manifest_is_no_manifest(folder: Path) -> None:
    path = save(folder, 10).path / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), "steps_completed": 999}))
    assert newest_steps(folder) == 0


def test_a_stray_file_is_no_checkpoint(folder: Path) -> None:
    (folder / "README").write_text("mine")
    checkpoint = save(folder, 10)
    assert committed(folder) == [checkpoint]
