"""Checkpoints that are written behind the training."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_det.checkpoint import checksummed
from hpc_det.checkpoint.committed import committed
from hpc_det.core import pending
from hpc_det.core.checkpoint import PART_S, CheckpointContext
from hpc_det.core.content import load
from hpc_det.core.distributed import Distributed
from hpc_det.core.gang_messages import RankGone
from hpc_det.core.pending import Behind
from tests.core.ranks import OnRanks
from tests.wait import DEADLINE_S, wait_for


class SlowDisk:
    """No write ends before `go` is set."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.error: OSError | None = None
        self._write = os.pwrite
        patch.setattr(os, "pwrite", self._pwrite)

    def _pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
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
    context, weights, heard = CheckpointContext(folder, Distributed()), torch.zeros(1000), []
    uuid = context.begin(40, {"state.pth": weights}, then=lambda: heard.append(len(committed(folder))))
    weights.fill_(7)
    assert context.in_flight
    assert not context.settled(wait=False)
    assert committed(folder) == []
    disk.go.set()
    assert context.settled(wait=True)
    assert not context.in_flight
    (checkpoint,) = committed(folder)
    assert (checkpoint.uuid, checkpoint.steps, heard) == (uuid, 40, [1])
    assert torch.equal(load(checkpoint.path / "state.pth"), torch.zeros(1000)), "as it was at the save"
    assert checkpoint.damage() == []
    assert [path.name for path in folder.iterdir()] == [uuid]


def test_one_that_is_given_up_leaves_nothing_that_could_be_taken_for_a_checkpoint(folder: Path, disk: SlowDisk) -> None:
    context = CheckpointContext(folder, Distributed())
    context.begin(40, {"state.pth": torch.zeros(9 * checksummed.BLOCK, dtype=torch.uint8)})
    giving_up = threading.Thread(target=context.abandoned)
    giving_up.start()
    assert context._pending is not None
    wait_for(context._pending._abandoned.is_set)
    disk.go.set()
    giving_up.join()
    assert not context.in_flight
    assert committed(folder) == []
    uuid = context.save(50, {"state.pth": 1})
    assert [path.name for path in folder.iterdir()] == [uuid], "what it had written is gone"


def test_one_that_is_given_up_too_late_is_a_checkpoint(folder: Path) -> None:
    context = CheckpointContext(folder, Distributed())
    uuid = context.begin(40, {"state.pth": 1})
    wait_for(lambda: committed(folder))
    assert not context.abandoned()
    assert not context.in_flight
    assert [path.name for path in folder.iterdir()] == [uuid]
    assert context.abandoned(), "none was begun"


def test_a_disk_that_is_full_is_an_error_of_the_training(folder: Path, disk: SlowDisk) -> None:
    context = CheckpointContext(folder, Distributed())
    disk.error = OSError(28, "No space left on device")
    context.begin(40, {"state.pth": torch.zeros(10)})
    disk.go.set()
    with pytest.raises(OSError, match="No space left"):
        context.settled(wait=True)
    assert committed(folder) == []


def test_an_error_at_the_moment_of_the_look_is_seen_at_the_next(
    folder: Path, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, check = CheckpointContext(folder, Distributed()), Behind.check
    disk.error = OSError(28, "No space left on device")
    context.begin(40, {"state.pth": torch.zeros(10)})

    def fails_after_the_check(behind: Behind) -> None:
        check(behind)
        disk.go.set()
        behind.join()

    with monkeypatch.context() as patch:
        patch.setattr(Behind, "check", fails_after_the_check)
        assert not context.settled(wait=False)
    with pytest.raises(OSError, match="No space left"):
        context.settled(wait=False)


def test_a_rank_that_fails_leaves_when_its_checkpoint_is_whole(folder: Path, disk: SlowDisk) -> None:
    context = CheckpointContext(folder, Distributed())
    context.begin(40, {"state.pth": torch.zeros(10)})
    threading.Timer(0.01, disk.go.set).start()
    context.part()
    assert [checkpoint.steps for checkpoint in committed(folder)] == [40]


def part(distributed: Distributed, folder: Path) -> list[int]:
    context = CheckpointContext(folder, distributed)
    with pytest.MonkeyPatch.context() as patch:
        disk = SlowDisk(patch)
        if distributed.is_chief:
            threading.Timer(0.5, disk.go.set).start()
        else:
            disk.go.set()
        context.begin(40, {f"rank-{distributed.rank}.pth": torch.zeros(10)})
        context.part()
    return [checkpoint.steps for checkpoint in committed(folder)]


def test_no_rank_leaves_before_rank_0_has_committed_since_the_others_would_be_ended(
    on_ranks: OnRanks, folder: Path
) -> None:
    assert on_ranks(2, part, folder) == [[40], [40]]


def fail_and_part(distributed: Distributed, folder: Path) -> float:
    context, began = CheckpointContext(folder, distributed), time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        disk = SlowDisk(patch)
        disk.error = None if distributed.is_chief else OSError(28, "No space left on device")
        disk.go.set()
        context.begin(40, {f"rank-{distributed.rank}.pth": torch.zeros(10)})
        if not distributed.is_chief:
            context.part()
        distributed.barrier()
        context.abandoned()
    return time.monotonic() - began


def test_a_rank_whose_own_disk_has_failed_waits_for_nobody(on_ranks: OnRanks, folder: Path) -> None:
    assert max(on_ranks(2, fail_and_part, folder)) < PART_S


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
            distributed.barrier()  # training goes on, and has collectives of its own
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


def save_without_rank_1(distributed: Distributed, folder: Path, *, is_gone: bool) -> str:
    """What rank 0 says of the save then."""
    context = CheckpointContext(folder, distributed)
    if distributed.is_chief:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pending, "SILENT_S", DEADLINE_S if is_gone else 0.2)
            uuid = context.begin(40, {"rank-0.pth": torch.zeros(10)})
            with pytest.raises(RankGone) as error:
                context.settled(wait=True)
        distributed.barrier()
        return str(error.value).replace(uuid, "UUID")
    context._new({}, makes_folder=False)  # it begins, and never writes
    if is_gone:
        distributed.leave()
    distributed.barrier()
    return ""


@pytest.mark.parametrize(
    ("is_gone", "said"),
    [
        (False, "rank 1 has not reported its files of checkpoint UUID for 0.2 s"),
        (True, "rank 1 ended and has not reported its files of checkpoint UUID"),
    ],
)
def test_a_save_waits_for_no_rank_without_a_limit_and_names_it(
    on_ranks: OnRanks, folder: Path, is_gone: bool, said: str
) -> None:
    zero, _ = on_ranks(2, partial(save_without_rank_1, is_gone=is_gone), folder)
    assert zero == said
    assert committed(folder) == []


def writes_for_long(distributed: Distributed, folder: Path) -> int:
    """How many reports rank 0 has got."""
    context = CheckpointContext(folder, distributed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pending, "REPORT_S", 0.0)
        blocks = torch.zeros(3 * checksummed.BLOCK, dtype=torch.uint8)
        context.begin(40, {f"rank-{distributed.rank}.pth": blocks})
        context.settled(wait=True)
    return distributed.messages._arrivals["files of a checkpoint"]


def test_a_rank_that_writes_for_long_reports_that_it_goes_on(on_ranks: OnRanks, folder: Path) -> None:
    reports, _ = on_ranks(2, writes_for_long, folder)
    assert reports >= 2 * 4, "one for each block, and then the files"
    assert [checkpoint.steps for checkpoint in committed(folder)] == [40]
