"""Durable snapshots: a restarted driver finds the newest complete one, whatever ended its predecessor."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_det.checkpoint.committed_folder import FolderFormat
from hpc_det.checkpoint.seals import HmacEntry
from hpc_det.checkpoint.snapshots import AllDamaged, Durable, Partial, begin, last_number, newest
from hpc_det.store.run_folder import RunFolder
from tests.facts import unnamed


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.make()
    return folder


def copied(partial: Partial, state: bytes) -> HmacEntry:
    """Copy the state as a node agent does."""
    return partial.write(memoryview(state))


def taken(run: RunFolder, calls: int) -> Durable:
    partial = begin(run, last_number(run) + 1)
    sealed = copied(partial, b"state after %d" % calls)
    return partial.commit(sealed, [b"rank 0's", b"", b"rank 2's"], epochs_done=calls - 1, calls=calls)


def names(run: RunFolder) -> list[str]:
    return sorted(path.name for path in run.snapshots.iterdir())


def test_a_run_begins_without_any(run: RunFolder) -> None:
    assert newest(run) is None


def test_what_was_committed_is_found_again(run: RunFolder) -> None:
    durable = taken(run, 3)
    assert newest(run) == durable
    assert durable.own == [b"rank 0's", b"", b"rank 2's"]
    assert (durable.number, durable.calls, durable.epochs_done, durable.size) == (1, 3, 2, 3)
    assert durable.state.read_bytes() == b"state after 3"


def test_all_of_it_is_the_users_alone(run: RunFolder) -> None:
    before = os.umask(0)
    try:
        folder = taken(run, 1).path
    finally:
        os.umask(before)
    assert {path.name: path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())} == {
        "1": 0o700,
        "state.pt": 0o600,
        "own": 0o600,
        "snapshot.json": 0o600,
    }


def test_an_agent_that_is_late_ends_nothing_newer_that_another_one_writes(run: RunFolder) -> None:
    newer = begin(run, 2)
    sealed = copied(newer, b"state")
    begin(run, 1)
    assert newer.commit(sealed, [], epochs_done=1, calls=2) == newest(run)


def test_the_two_newest_stay(run: RunFolder) -> None:
    for calls in range(1, 12):
        taken(run, calls)
    assert names(run) == ["10", "11"]
    found = newest(run)
    assert found is not None
    assert found.calls == 11


def test_what_is_half_done_is_not_seen_and_goes_with_the_next(run: RunFolder) -> None:
    taken(run, 1)
    copied(begin(run, last_number(run) + 1), b"half")
    assert names(run) == [".2.partial", "1"]
    found = newest(run)
    assert found is not None
    assert found.calls == 1
    taken(run, 2)
    assert names(run) == ["1", "2"]


class Killed(Exception):
    pass


def killed_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Let every disk operation from number `step` on raise Killed."""
    left = [step]

    def until_then(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return function(*arguments)

        return call

    for name in ("fsync", "rename", "replace"):
        monkeypatch.setattr(os, name, until_then(getattr(os, name)))


@pytest.mark.parametrize("step", range(9))
def test_a_kill_leaves_the_old_state_or_the_new_one(run: RunFolder, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    for calls in (1, 2):
        taken(run, calls)
    with monkeypatch.context() as patch:
        killed_at(patch, step)
        try:
            taken(run, 3)
            completed = True
        except Killed:
            completed = False
    found = newest(run)
    assert found is not None
    assert found.calls in ([3] if completed else [2, 3])
    assert found.state.read_bytes() == b"state after %d" % found.calls
    assert completed == (step >= 7), "fewer or more steps than the test believes"
    assert taken(run, 4).number > found.number


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("damage", "facts"),
    [
        (lambda path: flip(path / "state.pt"), ["state.pt"]),
        (lambda path: flip(path / "own"), ["own"]),
        (lambda path: os.truncate(path / "state.pt", 5), ["state.pt", "5 bytes", 13]),
        (lambda path: (path / "state.pt").unlink(), ["state.pt", os.strerror(errno.ENOENT)]),
        (lambda path: (path / "snapshot.json").unlink(), ["snapshot.json", os.strerror(errno.ENOENT)]),
        (lambda path: os.truncate(path / "snapshot.json", 20), ["snapshot.json"]),
        (lambda path: (path / "snapshot.json").write_text("[]"), ["snapshot.json"]),
        (lambda path: rewrite(path / "snapshot.json", calls=99), ["snapshot.json"]),
        (lambda path: rewrite(path / "snapshot.json", mac="\u2603"), ["snapshot.json"]),
        (lambda path: rewrite(path / "snapshot.json", mac=None), ["snapshot.json"]),
    ],
)
def test_a_torn_or_altered_one_is_named_and_the_one_before_is_taken(
    run: RunFolder, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], object], facts: list[object]
) -> None:
    taken(run, 1)
    damage(taken(run, 2).path)
    found = newest(run)
    assert found is not None
    assert found.calls == 1
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert unnamed(record.getMessage(), "snapshot 2", *facts) == []
    assert run.key().hex() not in record.getMessage()
    assert taken(run, 3).number == 3


def test_what_ranks_unpickle_are_the_bytes_that_the_seal_fits(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    real = FolderFormat.damage

    def altered_afterwards(self: FolderFormat[Any], folder: Path, files: dict[str, Any]) -> dict[str, str]:
        found = real(self, folder, files)
        flip(folder / "own")
        return found

    taken(run, 1)
    monkeypatch.setattr(FolderFormat, "damage", altered_afterwards)
    with pytest.raises(AllDamaged):
        newest(run)


def test_an_old_one_under_a_new_number_is_refused(run: RunFolder) -> None:
    first = taken(run, 1)
    shutil.copytree(first.path, run.snapshots / "9")
    assert newest(run) == first


def test_snapshots_of_another_key_are_refused(run: RunFolder) -> None:
    taken(run, 1)
    (run.path / "key").unlink()
    with pytest.raises(AllDamaged) as error:
        newest(run)
    assert unnamed(str(error.value), "snapshot.json", "seal", "key") == []


def test_a_run_whose_snapshots_are_all_damaged_does_not_begin_again(run: RunFolder) -> None:
    for calls in (1, 2):
        os.truncate(taken(run, calls).path / "own", 1)
    with pytest.raises(AllDamaged) as error:
        newest(run)
    assert unnamed(str(error.value), run.snapshots / "1", run.snapshots / "2", "delete") == []
    assert names(run) == ["1", "2"]
    shutil.rmtree(run.snapshots)
    assert newest(run) is None


def test_what_a_rank_writes_does_not_pass_for_a_manifest(run: RunFolder) -> None:
    """A rank can read the seal of its state in the manifest of its snapshot."""
    honest = taken(run, 1)
    claim = {**json.loads((honest.path / "snapshot.json").read_text()), "calls": 99}
    del claim["mac"]
    partial = begin(run, last_number(run) + 1)
    mac = copied(partial, json.dumps(claim, sort_keys=True).encode()).mac
    rewrite(honest.path / "snapshot.json", calls=99, mac=mac)
    with pytest.raises(AllDamaged):
        newest(run)
