"""A node agent writes the snapshots in its memory to the disk."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_det.checkpoint.seals import HmacEntry
from hpc_det.checkpoint.snapshots import Buffer, Held, Keeper, Partial, keep, newest
from hpc_det.store.run_folder import RunFolder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    run.make()
    run.key()
    return run


@pytest.fixture
def buffers() -> Iterator[list[Buffer]]:
    made = [Buffer(number) for number in range(2)]
    yield made
    for buffer in made:
        os.close(buffer.descriptor)


def held(number: int, buffer: Buffer, content: bytes) -> Held:
    """Return a snapshot as ranks write it to memory."""
    os.ftruncate(buffer.descriptor, len(content))
    os.pwrite(buffer.descriptor, content, 0)
    return Held(number, buffer, {"epochs_done": 0, "calls": number}, [])


def state(run: RunFolder) -> tuple[int, bytes]:
    """Return the number of calls and the content of the newest snapshot on the disk."""
    found = newest(run)
    assert found is not None
    return found.calls, found.state.read_bytes()


def test_the_driver_hears_why_a_snapshot_is_not_durable(run: RunFolder, buffers: list[Buffer]) -> None:
    (run.path / "key").chmod(0o644)
    said = keep(held(1, buffers[0], b"state"), run)
    assert said["kept"] == 1
    assert "mode 0644" in said["error"]


def test_a_buffer_is_written_as_it_is_however_it_grows_and_shrinks(run: RunFolder, buffers: list[Buffer]) -> None:
    for number, size in enumerate((5000, 10, 2**22 + 1, 4096), start=1):
        content = os.urandom(size)
        assert keep(held(number, buffers[0], content), run) == {"kept": number}
        assert state(run) == (number, content)


class Disk:
    """A disk on which each snapshot stops at its first byte until `may_continue` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_reached, self.may_continue = threading.Event(), threading.Event()
        real = Partial.write

        def write(*arguments: Any) -> HmacEntry:
            self.is_reached.set()
            assert self.may_continue.wait(60)
            return real(*arguments)

        monkeypatch.setattr(Partial, "write", write)


def test_a_snapshot_on_its_way_is_given_up_for_a_newer_one(
    run: RunFolder, buffers: list[Buffer], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, told = Disk(monkeypatch), list[dict[str, Any]]()
    keeper = Keeper(run, told.append)
    keeper.begin(held(1, buffers[0], b"older"))
    assert disk.is_reached.wait(60)
    keeper.begin(held(2, buffers[1], b"newer"))
    disk.may_continue.set()
    keeper.settle(None)
    assert told == [{"kept": 2}]
    assert [path.name for path in run.snapshots.iterdir()] == ["2"]
    assert state(run) == (2, b"newer")


def test_without_its_driver_the_newest_is_what_counts(
    run: RunFolder, buffers: list[Buffer], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, told = Disk(monkeypatch), list[dict[str, Any]]()
    keeper = Keeper(run, told.append)
    keeper.begin(held(1, buffers[0], b"older"))
    assert disk.is_reached.wait(60)
    disk.may_continue.set()
    keeper.settle(held(2, buffers[1], b"newer"))
    assert state(run) == (2, b"newer")


def test_one_that_is_on_its_way_is_waited_for_if_it_is_the_newest(run: RunFolder, buffers: list[Buffer]) -> None:
    told = list[dict[str, Any]]()
    keeper, newest_one = Keeper(run, told.append), held(1, buffers[0], b"state")
    keeper.begin(newest_one)
    keeper.settle(newest_one)
    assert told == [{"kept": 1}]
    assert state(run) == (1, b"state")
