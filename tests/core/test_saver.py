"""Saves with `checkpoint_interval: auto` and before a deadline, in real training."""

from __future__ import annotations

import math
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from hpc_det.checkpoint import checkpoints as checkpoints_module
from hpc_det.checkpoint.committed import Committed, committed, committed_at
from hpc_det.checkpoint.pinned_staging import _Chunk
from hpc_det.checkpoint.retention import Policy
from hpc_det.core import saver
from hpc_det.distributed.collectives import Distributed
from hpc_det.pytorch import PyTorchCallback, PyTorchTrialContext
from hpc_det.store.save_times import read_each_save, read_saves, write_save
from tests.checkpoint.saved import save
from tests.distributed.ranks import OnRanks
from tests.pytorch.trials import Life, StopAt, Tiny, assert_same, differences
from tests.wait import DEADLINE_S, wait_for

SLOW = save(1e4, 1e4)
KEEP_ALL = {"save_trial_latest": 99}


class Hurry:
    """A clock that advances enough for a save to be due at every look."""

    def __init__(self) -> None:
        self._s = 1e9

    def __call__(self) -> float:
        self._s += 1e6
        return self._s


def begin(path: Path) -> Life:
    """Create a trial that saves only at its end."""
    return Life.begin(path, min_checkpoint_period={"batches": 0}, checkpoint_policy="none")


def live(distributed: Distributed, undisturbed: Life, auto: Life) -> int:
    """Run both trials and return the number of saves in the first attempt of the one with `auto`."""
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
    """A save begins only after the previous commit: with asynchronous saves, a slow disk causes fewer of them."""
    undisturbed, auto = (begin(tmp_path / name) for name in ("undisturbed", "auto"))
    auto.asynchronous = behind
    for count in on_ranks(ranks, live, undisturbed, auto):
        assert count >= at_least
    assert_same(auto, undisturbed)
    measured = read_saves(auto.folder.saves)
    assert measured is not None
    assert measured.count > count + (0 if behind else 2)  # the second attempt continues the count
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
    life.retention = lambda: Policy(trial_best=0, trial_latest=next(latest))
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
    """A disk on which writes wait until `go` is set."""

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
    life.asynchronous = False
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


# --- what training does not wait for


def saves_are_done() -> bool:
    return not any(thread.name == "save" for thread in threading.enumerate())


class OnVerySlowDisk(Tiny):
    """Saved after 7 of its 18 batches; the disk begins and finishes writing in batch 15."""

    disk: Disk

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        if batch_idx == 15:
            self.disk.go.set()
            wait_for(saves_are_done)
        return super().train_batch(batch, epoch_idx, batch_idx)


def test_a_periodic_save_is_postponed_while_the_one_before_is_written(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "WAIT_S", 0.0)
    OnVerySlowDisk.disk = disk
    undisturbed, life = (
        Life.begin(tmp_path / name, kind, **EVERY_7) for name, kind in (("undisturbed", Tiny), ("life", OnVerySlowDisk))
    )
    life.attempt()
    assert life.checkpoints == [7, 16, 18], "16 is the next batch at which anything is due"
    postponed = {each.batches: each.postponed for each in read_each_save(life.folder.saves)}
    assert postponed == {7: False, 16: True, 18: False}
    undisturbed.attempt()
    assert_same(life, undisturbed)


@pytest.mark.integration
def test_a_checkpoint_of_just_this_batch_is_waited_for(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example the best checkpoint: a later one would not have its weights."""
    monkeypatch.setattr(saver, "WAIT_S", 0.0)
    life = Life.begin(tmp_path, **{**EVERY_7, "checkpoint_policy": "all"}, min_validation_period={"batches": 8})
    threading.Timer(0.2, disk.go.set).start()
    life.attempt()
    assert {7, 8, 16, 18} <= {*life.checkpoints}


def test_nothing_is_flushed_or_made_on_the_disk_while_training_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_save, seen = threading.Event(), list[str]()
    save = saver.CheckpointSaver.save

    def noted_save(*args: Any, **settings: Any) -> None:
        in_save.set()
        save(*args, **settings)
        in_save.clear()

    monkeypatch.setattr(saver.CheckpointSaver, "save", noted_save)
    for name in ("fsync", "mkdir"):
        call = getattr(os, name)

        def noted(*args: Any, name: str = name, call: Any = call, **settings: Any) -> Any:
            if in_save.is_set() and threading.current_thread() is threading.main_thread():
                seen.append(name)
            return call(*args, **settings)

        monkeypatch.setattr(os, name, noted)
    life = Life.begin(tmp_path, **EVERY_7)
    life.attempt()
    assert life.checkpoints == [7, 14, 18]
    assert not seen


def test_reports_are_on_disk_before_the_checkpoint_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life.begin(tmp_path, **EVERY_7)
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def noted_fsync(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(life.folder.metrics):
            events.append("reports")
        fsync(descriptor)

    def noted_rename(source: Any, target: Any) -> None:
        if Path(source).name == f".partial-{Path(target).name}":
            events.append("commit")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    life.attempt()
    commits = [number for number, event in enumerate(events) if event == "commit"]
    assert len(commits) >= 3
    assert all(events[number - 1] == "reports" for number in commits)


def test_no_save_reads_the_manifests_of_others_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []

    def noted(folder: Path) -> Committed | None:
        read.append(folder)
        return committed_at(folder)

    monkeypatch.setattr(checkpoints_module, "committed_at", noted)
    life = Life.begin(tmp_path, **{**EVERY_7, "min_checkpoint_period": {"batches": 1}, "checkpoint_storage": KEEP_ALL})
    life.attempt(StopAt(12))
    assert not read, "this process keeps the manifests of its commits in memory"
    kept = len(life.checkpoints)
    assert kept > 5
    life.attempt()
    assert len(read) == len({*read}) == kept


AT_THE_END: dict[str, Any] = {"min_validation_period": {"batches": 0}, "min_checkpoint_period": {"batches": 0}}


class WithAdam(Tiny):
    def wrap_schedulers(self, context: PyTorchTrialContext) -> None:
        context.optimizers.clear()
        self.optimizer = context.wrap_optimizer(torch.optim.Adam(self.model.parameters()))
        super().wrap_schedulers(context)


def in_the_stall(distributed: Distributed, life: Life, tick: float) -> list[str]:
    """Return the names of the threads that allocated memory for copies."""
    threads, touch = [], _Chunk.fault_in

    def noted(chunk: _Chunk) -> None:
        threads.append(threading.current_thread().name)
        touch(chunk)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Chunk, "fault_in", noted)
        life.attempt(StopAt(tick), distributed)
    assert life.checkpoints
    return threads


@pytest.mark.parametrize("tick", [3, math.inf])
@pytest.mark.parametrize("aggregation", [1, 2])
def test_memory_is_handed_out_behind_the_training(tmp_path: Path, aggregation: int, tick: float) -> None:
    """Including the case in which a preemption causes the first save."""
    optimizations = {"aggregation_frequency": aggregation}
    life = Life.begin(tmp_path, WithAdam, **AT_THE_END, optimizations=optimizations)
    assert {*in_the_stall(Distributed(), life, tick)} == {"allocate"}


def test_of_several_ranks_too(on_ranks: OnRanks, tmp_path: Path) -> None:
    life = Life.begin(tmp_path, WithAdam, **AT_THE_END)
    assert [{*threads} for threads in on_ranks(2, in_the_stall, life, math.inf)] == [{"allocate"}] * 2
