"""`determined.core` on two ranks, without an experiment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hpc_det.checkpoint.committed import committed
from hpc_det.compat import det_core
from hpc_det.distributed.collectives import Distributed
from hpc_det.distributed.preempt import give_notice
from tests.core.conftest import _fork_server, on_ranks
from tests.distributed.ranks import OnRanks

__all__ = ["_fork_server", "on_ranks"]


def context_of(distributed: Distributed, root: Path, **options: Any) -> det_core.Context:
    os.environ["HPC_DET_ROOT"] = str(root)
    rank, size = distributed.rank, distributed.size
    ranks = det_core.DistributedContext(
        rank=rank, size=size, local_rank=rank, local_size=size, cross_rank=0, cross_size=1
    )
    return det_core.init(distributed=ranks, **options)


def error_of(function: Any, *arguments: Any, **options: Any) -> str:
    try:
        function(*arguments, **options)
    except Exception as error:
        return type(error).__name__
    return ""


def store(context: det_core.Context, metadata: dict[str, Any], name: str, *, fails: bool = False) -> str:
    with context.checkpoint.store_path(metadata, shard=True) as (path, uuid):
        if fails:
            raise KeyError(name)
        (path / name).write_text(name)
    return uuid


def checkpoints(distributed: Distributed, root: Path) -> dict[str, Any]:
    rank = distributed.rank
    found: dict[str, Any] = {}
    with context_of(distributed, root) as context:
        checkpoint = context.checkpoint
        found["store on rank 0 only"] = error_of(lambda: checkpoint.store_path({"steps_completed": 1}).__enter__())
        uuid = store(context, {"steps_completed": 2, "ranks": {str(rank): True}}, f"part-{rank}")
        with checkpoint.restore_path(uuid) as path:
            found["parts"] = sorted(each.name for each in path.glob("part-*"))
        found["ranks"] = checkpoint.get_metadata(uuid)["ranks"]
        found["differ"] = error_of(store, context, {"steps_completed": 3, "rank": rank}, "x")
        found["fails"] = error_of(store, context, {"steps_completed": 3}, "x", fails=rank == 1)
        own = root / f"own-{rank}"
        own.mkdir()
        (own / "same").write_text("same")
        (own / f"file-{rank}").write_text(str(rank))
        uuid = checkpoint.upload(own, {"steps_completed": 4}, shard=True)
        checkpoint.download(uuid, root / "down", selector=lambda name: name == ("same" if rank else "file-0"))
        found["down"] = sorted(each.name for each in (root / "down").iterdir())
        checkpoint.download(uuid, root / f"own-down-{rank}", det_core.DownloadMode.NoSharedDownload)
        uuid = checkpoint.upload(own if rank else None, {"steps_completed": 5}, shard=True)
        found["one"] = sorted(each.name for each in checkpoint._folder(uuid).glob("file-*"))
        (own / "same").write_text(str(rank))
        found["conflict"] = error_of(checkpoint.upload, own, {"steps_completed": 6}, shard=True)
        found["committed"] = len(committed(context._session.run.folder.checkpoints))
        lengths = []
        for operation in context.searcher.operations():
            lengths.append(operation.length)
            if rank == 0:
                operation.report_completed(1.0)
            else:
                found["completed"] = error_of(operation.report_completed, 1.0)
        found["operation"] = lengths
        found["gathered"] = context.distributed.allgather(rank)
        context.train.report_validation_metrics(7, {"loss": 1.0})
    return found


def test_checkpoints_of_two_ranks(on_ranks: OnRanks, tmp_path: Path) -> None:
    first, second = on_ranks(2, checkpoints, tmp_path)
    assert (second["store on rank 0 only"], second["completed"]) == ("RuntimeError", "RuntimeError")
    assert (first["fails"], second["fails"]) == ("RuntimeError", "KeyError")
    for found in (first, second):
        assert found["parts"] == ["part-0", "part-1"]
        assert found["ranks"] == {"0": True, "1": True}
        assert found["down"] == ["file-0", "same"]
        assert found["one"] == ["file-1"]
        assert (found["differ"], found["conflict"]) == ("RuntimeError", "RuntimeError")
        assert found["committed"] == 3
        assert found["operation"] == [1]
        assert found["gathered"] == [0, 1]


def stops(distributed: Distributed, root: Path, mode: str) -> list[bool]:
    """Return the answers at calls of `should_preempt`; the search ends the trial on rank 0 between the first two."""
    answers: list[bool] = []
    with context_of(distributed, root, preempt_mode=det_core.PreemptMode(mode)) as context:
        if mode == "CHIEF_ONLY" and distributed.rank:
            return [error_of(context.preempt.should_preempt) == "RuntimeError"]
        answers.append(context.preempt.should_preempt())
        if mode == "WORKERS_ASK_MASTER":
            context.distributed.allgather(None)  # these ranks are not in step
        if chief := context._session.chief:
            chief._stop()
        elif mode == "WORKERS_ASK_MASTER":
            context._session.run.stop.wait_for_proposal()
        answers.append(context.preempt.should_preempt())
    return answers


@pytest.mark.parametrize("mode", ["WORKERS_ASK_CHIEF", "CHIEF_ONLY", "WORKERS_ASK_MASTER"])
def test_a_stop_of_the_search_reaches_all_ranks_at_the_next_call(on_ranks: OnRanks, tmp_path: Path, mode: str) -> None:
    first, second = on_ranks(2, stops, tmp_path, mode)
    assert first == [False, True]
    assert second == ([True] if mode == "CHIEF_ONLY" else [False, True])


def noticed(distributed: Distributed, root: Path) -> int:
    """Return the number of calls until a notice of rank 1 stops both ranks."""
    calls = 0
    with context_of(distributed, root) as context:
        while not context.preempt.should_preempt():
            calls += 1
            if calls == 5 and distributed.rank == 1:
                give_notice(context._session.run.distributed.messages)
    return calls


def test_a_notice_stops_both_ranks_at_the_same_call(on_ranks: OnRanks, tmp_path: Path) -> None:
    first, second = on_ranks(2, noticed, tmp_path)
    assert first == second
