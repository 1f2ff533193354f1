"""Saves of `checkpoint_interval: auto` and at a deadline, in real training."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from hpc_det.checkpoint.committed import committed
from hpc_det.checkpoint.prune import Policy
from hpc_det.checkpoint.saves import read_saves, write_save
from hpc_det.core.distributed import Distributed
from hpc_det.pytorch import PyTorchCallback
from tests.checkpoint.saved import save
from tests.core.ranks import OnRanks
from tests.pytorch.trials import Life, StopAt, Tiny, assert_same, differences
from tests.wait import DEADLINE_S

SLOW = save(1e4, 1e4)


class Hurry:
    """A clock on which so much time goes by that a save is due at every look."""

    def __init__(self) -> None:
        self._s = 1e9

    def __call__(self) -> float:
        self._s += 1e6
        return self._s


def begin(path: Path) -> Life:
    """Saved at the end only."""
    return Life.begin(path, min_checkpoint_period={"batches": 0}, checkpoint_policy="none")


def live(distributed: Distributed, undisturbed: Life, auto: Life) -> int:
    """How often the one with `auto` has saved in its first attempt."""
    undisturbed.attempt(StopAt(), distributed)
    auto.pace = {"auto": True, "clock": Hurry()}
    auto.attempt(StopAt(12), distributed)
    times = read_saves(auto.folder.saves)
    auto.attempt(StopAt(), distributed)
    return times.count if times else 0


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("behind", "at_least"), [(False, 5), (True, 3)])
def test_saves_of_auto_change_no_bit_also_not_across_a_resume(
    on_ranks: OnRanks, tmp_path: Path, ranks: int, behind: bool, at_least: int
) -> None:
    """None begins before the one before is committed: behind the training there are fewer where the disk is slow."""
    undisturbed, auto = (begin(tmp_path / name) for name in ("undisturbed", "auto"))
    auto.saves_behind = behind
    for count in on_ranks(ranks, live, undisturbed, auto):
        assert count >= at_least
    assert_same(auto, undisturbed)
    measured = read_saves(auto.folder.saves)
    assert measured is not None
    assert measured.count > count + (0 if behind else 2)  # the second attempt goes on counting
    assert measured.batch_s is not None
    assert measured.size_bytes > 1000


def test_a_stop_saves_before_its_deadline(tmp_path: Path) -> None:
    life, stop = begin(tmp_path), StopAt(9)
    stop.deadline = 1e12
    assert life.attempt(stop).is_saved
    assert len(life.checkpoints) == 1


def test_a_policy_that_changes_on_the_way_holds_from_the_next_save_on(tmp_path: Path) -> None:
    life = Life.begin(tmp_path, min_checkpoint_period={"batches": 7}, checkpoint_policy="none")
    latest = iter([1, 1, 3, 3])
    life.policy = lambda: Policy(trial_best=0, trial_latest=next(latest))
    life.attempt()
    assert life.checkpoints == [7, 14, 18]


def test_a_stop_that_leaves_no_time_leaves_the_checkpoint_that_there_is_and_is_taken_up_from_there(
    tmp_path: Path,
) -> None:
    undisturbed, life = (
        Life.begin(tmp_path / name, min_checkpoint_period={"batches": 7}) for name in ("undisturbed", "life")
    )
    undisturbed.attempt()
    stop = StopAt(16)
    stop.deadline = 0
    write_save(life.folder.saves, SLOW)
    loop = life.attempt(stop)
    assert (loop.end, loop.is_saved) == ("stopped", False)
    assert 15 not in life.checkpoints
    life.attempt()
    assert differences(life.newest, undisturbed.newest) == []


# --- behind the training


EVERY_7: dict[str, Any] = {
    "min_checkpoint_period": {"batches": 7},
    "checkpoint_policy": "none",
    "checkpoint_storage": {"save_trial_latest": 9},
}


class Disk:
    """Nothing is written to it before so many batches are trained."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self._write = os.pwrite
        patch.setattr(os, "pwrite", self._pwrite)

    def _pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        assert self.go.wait(DEADLINE_S)
        return self._write(descriptor, data, offset)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk(monkeypatch)
    yield disk
    disk.go.set()


class OnSlowDisk(Tiny):
    """Saved after 7 and 14 of its 18 batches; the disk begins to write in batch 10."""

    disk: Disk
    fails = False

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        if batch_idx == 10 and not self.disk.go.is_set():
            assert not any(self.context.folder.checkpoints.glob("[!.]*")), "training did not wait for the disk"
            self.disk.go.set()
            if self.fails:
                raise ZeroDivisionError
        return super().train_batch(batch, epoch_idx, batch_idx)


def on_slow_disk(path: Path, disk: Disk) -> Life:
    OnSlowDisk.disk, OnSlowDisk.fails = disk, False
    return Life.begin(path, OnSlowDisk, **EVERY_7)


def test_training_goes_on_while_a_checkpoint_is_written_and_what_is_written_is_of_its_batch(
    tmp_path: Path, disk: Disk
) -> None:
    undisturbed, life = Life.begin(tmp_path / "undisturbed", **EVERY_7), on_slow_disk(tmp_path / "life", disk)
    life.attempt()
    assert life.checkpoints == [7, 14, 18]
    for later in committed(life.folder.checkpoints)[:2]:
        shutil.rmtree(later.path)
    life.attempt()
    undisturbed.attempt()
    assert_same(life, undisturbed)


def test_what_a_trial_has_saved_is_not_lost_with_its_failure(tmp_path: Path, disk: Disk) -> None:
    life = on_slow_disk(tmp_path, disk)
    OnSlowDisk.fails = True
    with pytest.raises(ZeroDivisionError):
        life.attempt()
    assert life.checkpoints == [7]


def test_switched_off_training_waits_for_each_checkpoint(tmp_path: Path) -> None:
    life = Life.begin(tmp_path, Seeing, **EVERY_7)
    life.saves_behind = False
    life.attempt()
    assert Seeing.seen[7] == [7]


class Noting(PyTorchCallback):
    def on_checkpoint_write_end(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, "note").touch()


class NotingOnRank0(Tiny):
    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        own: dict[str, PyTorchCallback] = {"noting": Noting()} if self.context.distributed.is_chief else {}
        return {**super().build_callbacks(), **own}


def attempt(distributed: Distributed, life: Life) -> None:
    life.attempt(StopAt(), distributed)


def test_ranks_save_in_one_way_where_one_of_them_wants_to_see_the_files(on_ranks: OnRanks, tmp_path: Path) -> None:
    life = Life.begin(tmp_path, NotingOnRank0, **EVERY_7)
    on_ranks(2, attempt, life)
    assert life.checkpoints == [7, 14, 18]
    assert all("note" in each.files for each in committed(life.folder.checkpoints))


class Seeing(Tiny):
    seen: ClassVar[dict[int, list[int]]] = {}

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        self.seen[batch_idx] = [each.steps for each in committed(self.context.folder.checkpoints)]
        return super().train_batch(batch, epoch_idx, batch_idx)
