from __future__ import annotations

import io
import pickle
from collections import Counter, OrderedDict, defaultdict
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from hpc_det.checkpoint.committed import FileEntry, committed
from hpc_det.core.checkpoint import CheckpointContext, load
from hpc_det.core.distributed import Distributed
from hpc_det.errors import HpcDetError
from hpc_det.store.journal import Journal
from tests.core.ranks import OnRanks


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
    with pytest.raises(HpcDetError, match="attempt 2 of this trial has begun; this one, 1, writes no more"):
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
    """The batches of the newest one after damage to a file of each rank."""
    checkpoints = CheckpointContext(folder, distributed)
    batches: list[int | None] = []
    for steps in (10, 20, 30):
        checkpoints.save(steps, {f"rank-{distributed.rank}.pth": torch.full((1000,), steps)})
    for damaged in ("rank-0.pth", "rank-1.pth"):
        if distributed.is_chief:
            (committed(folder)[len(batches)].path / damaged).write_bytes(b"torn")
        distributed.barrier()
        found = checkpoints.newest(lambda name: name == f"rank-{distributed.rank}.pth")
        batches.append(found[1] if found else None)
    return batches


def test_damage_to_a_file_that_one_rank_reads_is_known_to_all(on_ranks: OnRanks, folder: Path) -> None:
    assert on_ranks(2, files_of_ranks, folder) == [[20, 10], [20, 10]]


def test_damaged_ones_are_named_and_skipped(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    newest = newest_of_damaged(Distributed(), folder)
    assert newest is not None
    _, twenty, thirty = sorted(committed(folder), key=lambda checkpoint: checkpoint.steps)
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == (
        f"hpc-det: skipped: checkpoint {thirty.uuid} at 30 batches is damaged: note.txt: No such file or directory"
    )
    assert lines[1].startswith(f"hpc-det: skipped: checkpoint {twenty.uuid} at 20 batches is damaged: note.txt: crc32 ")
    assert len(lines) == 2


@pytest.mark.parametrize("exists", [True, False])
def test_no_checkpoint_is_none(folder: Path, exists: bool) -> None:
    assert CheckpointContext(folder if exists else folder / "missing", Distributed()).newest() is None


def test_prune_deletes_the_folders_of_the_superfluous(folder: Path) -> None:
    checkpoints = CheckpointContext(folder, Distributed())
    uuids = [checkpoints.save(steps, {"a.pth": 1}, lambda path: None) for steps in (10, 20, 30)]
    checkpoints.prune({10: 0.1, 20: 0.3, 30: 0.2}, smaller_is_better=True, best=1, latest=1)
    assert {path.name for path in folder.iterdir()} == {uuids[0], uuids[2]}


class Evil:
    """Unpickled, it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    "write", [torch.save, lambda evil, file: pickle.dump(evil, file, protocol=2)], ids=["torch", "pickle"]
)
def test_code_in_a_checkpoint_does_not_run(tmp_path: Path, write: Any) -> None:
    victim, file = tmp_path / "executed", io.BytesIO()
    write({"weights": Evil(victim)}, file)
    (tmp_path / "planted.pth").write_bytes(file.getvalue())
    with pytest.raises(pickle.UnpicklingError):
        load(tmp_path / "planted.pth")
    assert not victim.exists()
    torch.load(tmp_path / "planted.pth", weights_only=False) if write is torch.save else pickle.loads(file.getvalue())
    assert victim.exists(), "the trap itself is dull"


class Pair(NamedTuple):
    first: int
    second: int


class Level(IntEnum):
    LOW = 0


KEPT: list[Any] = [
    {"steps": 3, "best": 0.5, "name": "ä", "none": None, "flag": True, "wave": 1j, 7: b"", "raw": b"ab"},
    [torch.ones(2), nn.Parameter(torch.ones(2)), torch.float32, torch.device("cpu"), torch.Size([2])],
    (OrderedDict(a=1), Counter("aab"), {1, 2}, bytearray(b"ab")),
    {
        "best": np.float64(0.4),
        "seen": np.int32(2),
        "flag": np.bool_(True),
        "history": np.arange(3.0),
        "name": np.str_("ä"),
    },
    torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD([torch.ones(1)]), [1, 2]).state_dict(),
]

REFUSED = {
    "pathlib.PosixPath": Path("/"),
    "collections.defaultdict": defaultdict(int, a=1),
    "tests.core.test_checkpoint.Pair": Pair(1, 2),
    "tests.core.test_checkpoint.Level": Level.LOW,
    "builtins.frozenset": frozenset([1]),
    "builtins.function": note,
    "object array": np.array([{}], dtype=object),
    "numpy.datetime64": np.datetime64("2024-01-01"),
}


def rows(value: Any) -> Any:
    """Comparable with ==."""
    if isinstance(value, dict):
        return type(value), [(key, rows(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [rows(item) for item in value]
    return type(value), value.tolist() if isinstance(value, torch.Tensor | np.ndarray) else value


@pytest.mark.parametrize("state", KEPT)
def test_what_a_save_takes_a_resume_loads(folder: Path, state: Any) -> None:
    context = CheckpointContext(folder, Distributed())
    uuid = context.save(1, {"state_dict.pth": {"callbacks": {"mine": state}}}, lambda _: None)
    back = load(folder / uuid / "state_dict.pth")["callbacks"]["mine"]
    assert rows(back) == rows(state)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_resume_would_not_load_is_refused_at_the_save(folder: Path, tmp_path: Path, kind: str) -> None:
    context = CheckpointContext(folder, Distributed())
    said = rf"state_dict.pth: callbacks.mine.where\[1\]: (pathlib\._local)?{kind} cannot be part of a checkpoint"
    with pytest.raises(HpcDetError, match=said):
        context.save(1, {"state_dict.pth": {"callbacks": {"mine": {"where": [0, REFUSED[kind]]}}}}, lambda _: None)
    assert context.newest() is None
    assert not list(folder.iterdir())
    torch.save(REFUSED[kind], tmp_path / "a.pth")
    with pytest.raises(pickle.UnpicklingError):
        load(tmp_path / "a.pth")


def test_keys_are_looked_at_too(folder: Path) -> None:
    context = CheckpointContext(folder, Distributed())
    with pytest.raises(HpcDetError, match=r"state_dict.pth: the key \(.*Path.*\)\[1\]: pathlib\S*Path cannot be part"):
        context.save(1, {"state_dict.pth": {(1, Path("/")): 1}}, lambda _: None)


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
    assert [problem.partition(":")[0] for problem in checkpoint.damage()] == ["model_def.py"]
