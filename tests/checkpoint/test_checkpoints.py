from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_det.checkpoint import checkpoints as module
from hpc_det.checkpoint.checkpoints import CheckpointContext, KnownCheckpoints
from hpc_det.checkpoint.committed import Committed, committed, committed_at
from hpc_det.checkpoint.content import load
from hpc_det.checkpoint.damaged import damaged_ones
from hpc_det.checkpoint.seals import FileEntry
from hpc_det.distributed.collectives import Distributed
from hpc_det.store.journal import Journal, Overtaken
from tests.checkpoint.saved import saved
from tests.distributed.ranks import OnRanks
from tests.facts import refused


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    return folder


def note(folder: Path) -> None:
    (folder / "extra").mkdir()
    (folder / "extra" / "note.txt").write_text("of a callback")


def save_together(distributed: Distributed, folder: Path) -> tuple[str, tuple[Path, int] | None, list[Any]]:
    checkpoints = CheckpointContext(folder, distributed)
    files = {f"rank-{distributed.rank}.pth": {"weights": torch.full((1000,), distributed.rank), "text": "ä"}}
    uuid = checkpoints.save(40, files, note)
    path = folder / uuid
    return uuid, checkpoints.newest(), [load(path / f"rank-{rank}.pth") for rank in range(distributed.size)]


def test_a_job_that_was_believed_gone_commits_nothing_once_the_next_attempt_has_begun(folder: Path) -> None:
    journal = Journal(folder.parent / "journal.jsonl")
    context = CheckpointContext(folder, Distributed(), may_commit=lambda: journal.insist_on_last(1))
    journal.started(1, "7")
    context.save(10, {"a.pth": 1}, lambda at: None)
    journal.started(2, "8")
    with refused(Overtaken, "attempt 2", 1):
        context.save(20, {"a.pth": 2}, lambda at: None)
    assert [found.steps for found in committed(folder)] == [10]


def test_two_ranks_commit_one_folder_with_the_files_of_both(on_ranks: OnRanks, folder: Path) -> None:
    (uuid, *found), (same_uuid, *found_by_1) = on_ranks(2, save_together, folder)
    assert uuid == same_uuid
    assert [path.name for path in folder.iterdir()] == [uuid]
    (checkpoint,) = committed(folder)
    assert set(checkpoint.files) == {"rank-0.pth", "rank-1.pth", "extra/note.txt"}
    assert checkpoint.damage() == []
    newest, contents = found
    assert newest == (folder / uuid, 40) == found_by_1[0]
    for rank, content in enumerate(contents):
        assert content["text"] == "ä"
        assert torch.equal(content["weights"], torch.full((1000,), rank))


def newest_of_damaged(distributed: Distributed, folder: Path) -> tuple[Path, int] | None:
    checkpoints = CheckpointContext(folder, distributed)
    uuids = [checkpoints.save(steps, {}, lambda path: note(path)) for steps in (10, 20, 30)]
    if distributed.is_chief:
        (folder / uuids[1] / "extra" / "note.txt").write_text("of a CALLBACK")
        (folder / uuids[2] / "extra" / "note.txt").unlink()
    distributed.barrier()
    return checkpoints.newest()


def test_ranks_agree_on_the_newest_good_one(on_ranks: OnRanks, folder: Path) -> None:
    first, second = on_ranks(2, newest_of_damaged, folder)
    assert first == second
    assert first is not None
    assert first[1] == 10


def files_of_ranks(distributed: Distributed, folder: Path) -> list[int | None]:
    """Return the batches of the newest good checkpoint, initially and after damage to a file of each rank."""
    checkpoints = CheckpointContext(folder, distributed)
    batches: list[int | None] = []
    for steps in (10, 20, 30):
        checkpoints.save(steps, {f"rank-{distributed.rank}.pth": torch.full((1000,), steps)})
    for damaged in ("rank-0.pth", "rank-1.pth"):
        if distributed.is_chief:
            (committed(folder)[0].path / damaged).write_bytes(b"torn")
        distributed.barrier()
        found = checkpoints.newest(lambda name: name == f"rank-{distributed.rank}.pth")
        batches.append(found[1] if found else None)
    return batches


def test_damage_to_a_file_that_one_rank_reads_is_known_to_all(on_ranks: OnRanks, folder: Path) -> None:
    assert on_ranks(2, files_of_ranks, folder) == [[20, 10], [20, 10]]


def test_damaged_ones_are_named_and_skipped(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    newest = newest_of_damaged(Distributed(), folder)
    assert newest is not None
    thirty, twenty = damaged_ones(folder)
    assert [(found.steps, len(found.problems)) for found in (thirty, twenty)] == [(30, 1), (20, 1)]
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("hpc-det: skipped: ")]
    for found, line in zip((thirty, twenty), lines, strict=True):
        assert found.uuid in line
        assert found.problems[0] in line
        assert found.problems[0].startswith("extra/note.txt: ")


@pytest.mark.parametrize("exists", [True, False])
def test_no_checkpoint_is_none(folder: Path, exists: bool) -> None:
    assert CheckpointContext(folder if exists else folder / "missing", Distributed()).newest() is None


def test_prune_deletes_the_folders_of_the_superfluous(folder: Path) -> None:
    checkpoints = CheckpointContext(folder, Distributed())
    uuids = [checkpoints.save(steps, {"a.pth": 1}, lambda path: None) for steps in (10, 20, 30)]
    checkpoints.prune({10: 0.1, 20: 0.3, 30: 0.2}, smaller_is_better=True, best=1, latest=1)
    assert {path.name for path in folder.iterdir()} == {uuids[0], uuids[2]}


# --- what rank 0 adds


def add_known(folder: Path) -> dict[str, FileEntry]:
    note(folder)
    (folder / "code").mkdir()
    (folder / "code" / "model_def.py").write_text("from the snapshot")
    return {"code/model_def.py": FileEntry(size=17, crc32=0xDEAD)}


def test_files_whose_checksums_are_known_are_not_read_again(folder: Path) -> None:
    CheckpointContext(folder, Distributed()).save(1, {"a.pth": 1}, add_known)
    (checkpoint,) = committed(folder)
    assert set(checkpoint.files) == {"a.pth", "code/model_def.py", "extra/note.txt"}
    assert checkpoint.files["code/model_def.py"] == FileEntry(size=17, crc32=0xDEAD)
    assert [problem.partition(":")[0] for problem in checkpoint.damage()] == ["code/model_def.py"]


def test_of_two_of_the_same_batch_the_later_one_is_kept_whatever_the_clocks_say(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the node that saved the first one is ahead."""
    monkeypatch.setattr("time.time", lambda: 2e9)
    CheckpointContext(folder, Distributed()).save(20, {"a.pth": "before the validation"})
    monkeypatch.setattr("time.time", lambda: 1e9)
    context = CheckpointContext(folder, Distributed())
    uuid = context.save(20, {"a.pth": "after it"})
    assert committed(folder)[0].uuid == uuid
    context.prune({}, smaller_is_better=True, best=0, latest=2)
    assert [found.uuid for found in committed(folder)] == [uuid]


# --- the checkpoints that a process knows


def test_each_manifest_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def noted(folder: Path) -> Committed | None:
        read.append(folder.name)
        return committed_at(folder)

    monkeypatch.setattr(module, "committed_at", noted)
    earlier, checkpoints = saved(tmp_path, 3), KnownCheckpoints(tmp_path)
    (tmp_path / "no checkpoint").mkdir()
    assert [each.steps for each in checkpoints.all()] == [3]
    own = saved(tmp_path, 5)
    checkpoints.add(own)
    others = saved(tmp_path, 4)
    assert [each.steps for each in checkpoints.all()] == [5, 4, 3]
    shutil.rmtree(others.path)
    assert [each.steps for each in checkpoints.all()] == [5, 3]
    assert sorted(read) == sorted([earlier.uuid, "no checkpoint", others.uuid])


def test_there_may_be_no_folder(tmp_path: Path) -> None:
    assert KnownCheckpoints(tmp_path / "missing").all() == []
