"""Checkpoints that are written while training continues."""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_det.checkpoint import async_save
from hpc_det.checkpoint import checkpoints as checkpoint
from hpc_det.checkpoint.async_save import BackgroundTask, WithoutChecksums
from hpc_det.checkpoint.checkpoints import CheckpointContext
from hpc_det.checkpoint.committed import committed
from hpc_det.checkpoint.content import load
from hpc_det.checkpoint.seals import CRC
from hpc_det.distributed.collectives import Distributed
from hpc_det.distributed.gang_messages import RankGone
from tests.distributed.ranks import OnRanks
from tests.facts import refused, unnamed
from tests.wait import DEADLINE_S, wait_for


class SlowDisk:
    """A disk on which no write ends before `go` is set."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.awaited = threading.Event()
        """Set once a write has begun."""
        self.error: OSError | None = None
        self._write = os.pwrite
        patch.setattr(os, "pwrite", self._pwrite)

    def _pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        self.awaited.set()
        assert self.go.wait(DEADLINE_S)
        if self.error:
            raise self.error
        return self._write(descriptor, data, offset)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    disk = SlowDisk(monkeypatch)
    yield disk
    disk.go.set()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    return folder


def test_training_goes_on_before_the_disk_has_it(folder: Path, disk: SlowDisk) -> None:
    context, weights, at_end = CheckpointContext(folder, Distributed()), torch.zeros(1000), []
    uuid = context.begin(40, {"state.pth": weights}, then=lambda: at_end.append(len(committed(folder))))
    weights.fill_(7)
    assert context.in_flight
    assert not context.settled(wait=False)
    assert committed(folder) == []
    disk.go.set()
    assert context.settled(wait=True)
    assert not context.in_flight
    (found,) = committed(folder)
    assert (found.uuid, found.steps, at_end) == (uuid, 40, [1])
    assert torch.equal(load(found.path / "state.pth"), torch.zeros(1000)), "as it was at the save"
    assert found.damage() == []
    assert [path.name for path in folder.iterdir()] == [uuid]


def test_one_that_is_given_up_leaves_nothing_that_could_be_taken_for_a_checkpoint(folder: Path, disk: SlowDisk) -> None:
    context = CheckpointContext(folder, Distributed())
    context.begin(40, {"state.pth": torch.zeros(9 * CRC.written_bytes, dtype=torch.uint8)})
    wait_for(disk.awaited.is_set)
    save = context._save
    assert save is not None
    giving_up = threading.Thread(target=context.abandon)
    giving_up.start()
    wait_for(save._abandoned.is_set)
    disk.go.set()
    giving_up.join()
    assert not context.in_flight
    assert committed(folder) == []
    uuid = context.save(50, {"state.pth": 1})
    assert [path.name for path in folder.iterdir()] == [uuid], "its partial files were removed"


def test_one_that_is_given_up_too_late_is_a_checkpoint(folder: Path) -> None:
    context = CheckpointContext(folder, Distributed())
    uuid = context.begin(40, {"state.pth": 1})
    wait_for(lambda: committed(folder))
    assert not context.abandon()
    assert not context.in_flight
    assert [path.name for path in folder.iterdir()] == [uuid]
    assert context.abandon(), "none was begun"


def test_a_disk_that_is_full_is_an_error_of_the_training(folder: Path, disk: SlowDisk) -> None:
    context = CheckpointContext(folder, Distributed())
    disk.error = OSError(28, "No space left on device")
    context.begin(40, {"state.pth": torch.zeros(10)})
    disk.go.set()
    with refused(OSError) as raised:
        context.settled(wait=True)
    assert raised.value is disk.error
    assert committed(folder) == []


def test_an_error_at_the_moment_of_the_look_is_seen_at_the_next(
    folder: Path, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, check = CheckpointContext(folder, Distributed()), BackgroundTask.check
    disk.error = OSError(28, "No space left on device")
    context.begin(40, {"state.pth": torch.zeros(10)})

    def fails_after_the_check(behind: BackgroundTask) -> None:
        check(behind)
        disk.go.set()
        behind.join()

    with monkeypatch.context() as patch:
        patch.setattr(BackgroundTask, "check", fails_after_the_check)
        assert not context.settled(wait=False)
    with refused(OSError) as raised:
        context.settled(wait=False)
    assert raised.value is disk.error


def test_a_rank_that_fails_leaves_when_its_checkpoint_is_whole(folder: Path, disk: SlowDisk) -> None:
    context = CheckpointContext(folder, Distributed())
    context.begin(40, {"state.pth": torch.zeros(10)})
    threading.Timer(0.01, disk.go.set).start()
    context.wait_before_exit()
    assert [each.steps for each in committed(folder)] == [40]


class DiskTime:
    """A clock that advances with the writes: each takes a quarter of the time that a failing rank waits without
    progress.
    """

    now = 0.0

    def __init__(self, every_s: float = 1.0) -> None:
        self._began = DiskTime.now

    def seconds(self) -> float:
        return DiskTime.now - self._began


def test_a_rank_that_fails_waits_for_a_long_save_that_makes_progress(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "STALLED_S", 0.05)
    monkeypatch.setattr(async_save, "AwakeClock", DiskTime)
    write = os.pwrite

    def slow(descriptor: int, data: memoryview, offset: int) -> int:
        time.sleep(0.02)
        DiskTime.now += checkpoint.STALLED_S / 4
        return write(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", slow)
    context, began = CheckpointContext(folder, Distributed()), DiskTime.now
    context.begin(40, {"state.pth": torch.zeros(12 * CRC.written_bytes, dtype=torch.uint8)})
    context.wait_before_exit()
    assert [each.steps for each in committed(folder)] == [40]
    assert DiskTime.now - began > 3 * checkpoint.STALLED_S


def test_it_waits_for_none_that_stands_still(folder: Path, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "STALLED_S", 0.01)
    monkeypatch.setattr(async_save, "LOOK_S", 0.05)
    context = CheckpointContext(folder, Distributed())
    context.begin(40, {"state.pth": torch.zeros(10)})
    context.wait_before_exit()
    assert committed(folder) == []


def test_it_waits_for_none_until_the_gang_is_taken_for_hung(
    folder: Path, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "STALLED_S", math.inf)
    monkeypatch.setattr(checkpoint, "LONGEST_WAIT_S", 0.01)
    monkeypatch.setattr(async_save, "LOOK_S", 0.05)
    context = CheckpointContext(folder, Distributed())
    context.begin(40, {"state.pth": torch.zeros(10)})
    context.wait_before_exit()
    assert committed(folder) == []


def test_it_leaves_in_time_before_the_job_ends_as_soon_as_it_learns_when(
    folder: Path, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_save, "LOOK_S", 0.01)
    context = CheckpointContext(folder, Distributed())
    context.begin(40, {"state.pth": torch.zeros(10)})
    deadlines = iter([None, None, time.time() + checkpoint.EXIT_S])
    context.wait_before_exit(lambda: next(deadlines))
    assert committed(folder) == []
    assert not list(deadlines)


def part(distributed: Distributed, folder: Path) -> list[int]:
    context = CheckpointContext(folder, distributed)
    with pytest.MonkeyPatch.context() as patch:
        disk = SlowDisk(patch)
        if distributed.is_chief:
            threading.Timer(0.5, disk.go.set).start()
        else:
            disk.go.set()
        context.begin(40, {f"rank-{distributed.rank}.pth": torch.zeros(10)})
        context.wait_before_exit()
    return [each.steps for each in committed(folder)]


@pytest.mark.parametrize(("size", "nodes"), [(2, 1), (4, 2)])
def test_no_rank_leaves_before_rank_0_has_committed_since_the_others_would_be_ended(
    on_ranks: OnRanks, folder: Path, size: int, nodes: int
) -> None:
    assert on_ranks(size, part, folder, nodes=nodes) == [[40]] * size


def fail_and_wait(distributed: Distributed, folder: Path) -> float:
    context, began = CheckpointContext(folder, distributed), time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        disk = SlowDisk(patch)
        disk.error = None if distributed.is_chief else OSError(28, "No space left on device")
        disk.go.set()
        context.begin(40, {f"rank-{distributed.rank}.pth": torch.zeros(10)})
        if not distributed.is_chief:
            context.wait_before_exit()
        distributed.barrier()
        context.abandon()
    return time.monotonic() - began


def test_a_rank_whose_own_disk_has_failed_waits_for_nobody(on_ranks: OnRanks, folder: Path) -> None:
    assert max(on_ranks(2, fail_and_wait, folder)) < checkpoint.STALLED_S


def save_behind(distributed: Distributed, folder: Path) -> tuple[bool, list[int], dict[str, Any]]:
    context = CheckpointContext(folder, distributed)
    with pytest.MonkeyPatch.context() as patch:
        disk = SlowDisk(patch)
        if not distributed.is_chief:
            disk.go.set()
        for steps in (10, 20):
            context.settled(wait=True)
            context.begin(steps, {f"rank-{distributed.rank}.pth": torch.full((1000,), distributed.rank + steps)})
            early = context.settled(wait=False)
            distributed.barrier()  # training continues and uses collectives during the save
            disk.go.set()
        context.settled(wait=True)
    newest = context.newest()
    assert newest is not None
    return early, [each.steps for each in committed(folder)], {p.name: load(p) for p in newest[0].glob("*.pth")}


def test_ranks_write_apart_and_rank_0_commits_when_all_have(on_ranks: OnRanks, folder: Path) -> None:
    for _, steps, files in on_ranks(2, save_behind, folder):
        assert steps == [20, 10]
        assert sorted(files) == ["rank-0.pth", "rank-1.pth"]
        assert [int(files[name][0]) for name in sorted(files)] == [20, 21]


def save_without(distributed: Distributed, missing: int, folder: Path, *, is_gone: bool) -> str:
    """Return the error of rank 0 when the rank `missing` does not write its part."""
    context = CheckpointContext(folder, distributed)
    if distributed.rank == missing:
        context._new({}, makes_folder=False)  # it begins the save, but does not write
        if is_gone:
            distributed.leave()
        distributed.barrier()
        return ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_save, "SILENT_S", DEADLINE_S if is_gone else 0.2)
        uuid = context.begin(40, {f"rank-{distributed.rank}.pth": torch.zeros(10)})
        error: BaseException | None = None
        if distributed.is_chief:
            with pytest.raises(RankGone) as raised:
                context.settled(wait=True)
            error = raised.value
        else:
            assert context._task is not None
            context._task.join()
        distributed.barrier()
        return str(error).replace(uuid, "UUID")


@pytest.mark.parametrize("is_gone", [False, True])
@pytest.mark.parametrize(("size", "nodes", "missing"), [(2, 1, 1), (4, 2, 1), (4, 2, 2), (4, 2, 3), (2, 2, 1)])
def test_a_save_waits_for_no_rank_without_a_limit_and_names_it(
    on_ranks: OnRanks, folder: Path, size: int, nodes: int, missing: int, is_gone: bool
) -> None:
    zero, *_ = on_ranks(size, partial(save_without, is_gone=is_gone), missing, folder, nodes=nodes)
    assert unnamed(zero, f"rank {missing}", "checkpoint UUID") == []
    limit = "0.2 s" if missing < size // nodes or missing % (size // nodes) else "0.4 s"
    assert re.findall(r"[\d.]+ s\b", zero) == ([] if is_gone else [limit]), "only a wait that was too long has a time"
    assert committed(folder) == []


def counted_messages(distributed: Distributed, folder: Path) -> int:
    """Return how many messages this rank has received in two saves from other ranks and itself."""
    context = CheckpointContext(folder, distributed)
    for steps in (10, 20):
        context.begin(steps, {f"rank-{distributed.rank}.pth": torch.zeros(10)})
        context.settled(wait=True)
    distributed.barrier()
    both = (distributed.messages, distributed.node_messages)
    return sum(each.arrivals(kind) for each in both for kind in ("files of a checkpoint", "end of a save"))


def test_rank_0_exchanges_one_message_with_each_node_in_a_save(on_ranks: OnRanks, folder: Path) -> None:
    received = on_ranks(12, counted_messages, folder, nodes=4)
    assert received[0] == 2 * (4 + 3 + 1), "from each node, from each rank of its own node, and its own of the end"
    assert received[3] == 2 * (3 + 1 + 1), "from each rank of the node, from rank 0, and its own of the end"
    assert received[4] == 2 * 1


def writes_for_long(distributed: Distributed, folder: Path) -> int:
    """Return the number of reports that rank 0 received from rank 1, or that another rank received from rank 0."""
    context = CheckpointContext(folder, distributed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_save, "REPORT_S", 0.0)
        blocks = torch.zeros(3 * CRC.written_bytes, dtype=torch.uint8)
        context.begin(40, {f"rank-{distributed.rank}.pth": blocks})
        context.settled(wait=True)
    if distributed.is_chief:
        return distributed.node_messages.arrivals("files of a checkpoint")
    wait_for(lambda: distributed.node_messages.arrivals("end of a save") > 3)
    return distributed.node_messages.arrivals("end of a save")


@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_that_write_for_long_report_to_rank_0_and_rank_0_to_all(
    on_ranks: OnRanks, folder: Path, nodes: int
) -> None:
    files_of_ranks, *of_the_save = on_ranks(2 * nodes, writes_for_long, folder, nodes=nodes)
    assert files_of_ranks >= 2 * 4, "one for each block, and then the files"
    assert min(of_the_save) >= 3 + 1, "one for each block of rank 0, and the commit"
    assert [each.steps for each in committed(folder)] == [40]


def test_blocks_of_two_threads_that_overlap_restore_the_option_of_torch() -> None:
    # The thread of a save that another test has given up may still be in its block.
    wait_for(torch.serialization.get_crc32_options)
    first = second = WithoutChecksums()
    first.__enter__()
    second.__enter__()
    first.__exit__()
    assert not torch.serialization.get_crc32_options()
    second.__exit__()
    assert torch.serialization.get_crc32_options()
