"""Checkpoints of a gang of several nodes: a folder for each node, with one file for all small files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_det.checkpoint import async_save
from hpc_det.checkpoint.checkpoints import CheckpointContext
from hpc_det.checkpoint.committed import Committed, committed, copy_whole, read_manifest
from hpc_det.checkpoint.node_folders import contains, rank_file, shard_file
from hpc_det.checkpoint.object_store import Remote
from hpc_det.checkpoint.rank_files import RankFiles
from hpc_det.checkpoint.storage import TrialStorage
from hpc_det.distributed.collectives import Distributed
from hpc_det.store.folders import TrialFolder
from tests.checkpoint.saved import saved
from tests.distributed.ranks import OnRanks, run_on_ranks
from tests.file_calls import file_calls

SMALL, LARGE = 100, 20_000
"""Numbers in a file of a rank that is sent to the first rank of the node, and in one that is not."""


def files_of(rank: int, steps: int) -> dict[str, Any]:
    files = {rank_file(rank): torch.full((SMALL,), float(rank + steps))}
    if rank % 2:
        files[shard_file(rank)] = torch.full((LARGE,), float(rank + steps))
    if rank == 0:
        files["state_dict.pth"] = torch.full((SMALL,), float(steps))
    return files


def save(distributed: Distributed, folder: Path, is_asynchronous: bool) -> tuple[dict[str, int], str]:
    """Save twice, and return the calls to the file system of the second save, and the batches of the newest one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_save, "SMALL_BYTES", 4 * LARGE)
        context = CheckpointContext(folder, distributed)
        for steps in (10, 20):
            distributed.barrier()
            with file_calls(folder) as calls:
                if is_asynchronous:
                    context.begin(steps, files_of(distributed.rank, steps))
                    context.settled(wait=True)
                else:
                    context.save(steps, files_of(distributed.rank, steps))
            del calls["stat"]  # their number depends on which first rank of a node makes the common folder
    newest = context.newest(lambda name: contains(name, rank_file(distributed.rank)))
    assert newest
    assert newest[1] == 20
    return calls, newest[0].name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def of_nodes(_fork_server: None, folder: Path) -> Committed:
    """A checkpoint of two nodes with two ranks each."""
    run_on_ranks(4, save, folder, True, nodes=2)
    return committed(folder)[0]


def assert_whole(checkpoint: Committed) -> None:
    assert checkpoint.damage() == []
    files = RankFiles(checkpoint.path)
    for rank in range(4):
        for name, content in files_of(rank, 20).items():
            assert torch.equal(files.load(name), content)


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_each_node_has_a_folder_with_its_manifest(on_ranks: OnRanks, folder: Path, is_asynchronous: bool) -> None:
    on_ranks(4, save, folder, is_asynchronous, nodes=2)
    newest = committed(folder)[0]
    assert sorted(newest.files) == ["ranks-0-1/manifest.json", "ranks-2-3/manifest.json", "state_dict.pth"]
    assert sorted(newest.whole.files.keys() - newest.files.keys()) == [
        "ranks-0-1/shard-1.pth",
        "ranks-0-1/small-files.zip",
        "ranks-2-3/shard-3.pth",
        "ranks-2-3/small-files.zip",
    ]
    on_disk = {str(path.relative_to(newest.path)) for path in newest.path.rglob("*") if path.is_file()}
    assert on_disk == newest.whole.files.keys() | {"manifest.json"}
    assert (
        newest.size_bytes
        == newest.whole.size_bytes
        == sum((newest.path / name).stat().st_size for name in newest.whole.files)
    )
    assert read_manifest(newest.path) == newest
    assert_whole(newest)


def test_ranks_with_small_files_make_no_call_to_the_file_system(on_ranks: OnRanks, folder: Path) -> None:
    found = on_ranks(6, save, folder, True, nodes=2)
    assert found[2][0] == {}, "neither the first rank of a node, nor one with a large file"
    assert found[4][0] == {}
    of_4_nodes = on_ranks(8, save, folder, True, nodes=4)
    for calls in (of_4_nodes[0][0], found[0][0]):
        del calls["mkdir"]  # as for "stat": it depends on which first rank of a node makes the common folder
    assert of_4_nodes[0][0] == found[0][0], "rank 0 makes the same calls, whatever the number of nodes and ranks"
    assert found[3][0]["open"] == found[3][0]["fsync"] == 4, "two files, the manifest and the folder"


def test_a_gang_on_one_node_has_files_at_the_top_as_before(on_ranks: OnRanks, folder: Path) -> None:
    on_ranks(2, save, folder, True)
    newest = committed(folder)[0]
    assert newest.nodes == {}
    assert "nodes" not in newest.manifest
    assert sorted(newest.files) == ["rank-0.pth", "rank-1.pth", "shard-1.pth", "state_dict.pth"]


def taken_by_three(distributed: Distributed, folder: Path) -> str:
    newest = CheckpointContext(folder, distributed).newest(lambda name: contains(name, rank_file(distributed.rank)))
    assert newest
    return newest[0].name


def test_a_gang_of_another_size_verifies_and_loads_it(on_ranks: OnRanks, of_nodes: Committed) -> None:
    assert on_ranks(3, taken_by_three, of_nodes.path.parent) == [of_nodes.uuid] * 3
    assert_whole(of_nodes)
    every = [torch.unique(file.read_mapped()).tolist() for file in RankFiles(of_nodes.path).every("shard-*.pth")]
    assert every == [[21.0], [23.0]]
    assert RankFiles(of_nodes.path).find(rank_file(4)) is None


@pytest.mark.parametrize(
    "name", ["ranks-2-3/manifest.json", "ranks-2-3/small-files.zip", "ranks-2-3/shard-3.pth", "state_dict.pth"]
)
@pytest.mark.parametrize("is_missing", [False, True])
def test_any_damaged_file_is_named_and_the_checkpoint_is_skipped(
    of_nodes: Committed, name: str, is_missing: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    path = of_nodes.path / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.unlink()
    if not is_missing:
        path.write_bytes(content)
    assert any(name in problem for problem in read_manifest(of_nodes.path).damage())
    newest = CheckpointContext(of_nodes.path.parent, Distributed()).newest()
    assert newest is not None
    assert newest[1] == 10
    assert name in capfd.readouterr().out


def test_a_file_that_no_manifest_names_is_damage(of_nodes: Committed) -> None:
    (of_nodes.path / "ranks-0-1" / "rank-9.pth").write_bytes(b"")
    assert read_manifest(of_nodes.path).damage() == ["ranks-0-1/rank-9.pth: not in the manifest"]


def test_a_copy_is_whole(of_nodes: Committed, tmp_path: Path) -> None:
    copied = Committed(path=tmp_path / "copy", steps=of_nodes.steps, time=of_nodes.time, files=of_nodes.whole.files)
    assert copy_whole(copied, lambda name, target: shutil.copyfile(of_nodes.path / name, target)) == []
    assert_whole(read_manifest(tmp_path / "copy"))


def test_an_object_store_has_all_of_it(of_nodes: Committed, tmp_path: Path) -> None:
    bucket = Remote(f"file://{tmp_path / 'bucket'}", {"auto_mkdir": True})
    bucket.upload(of_nodes)
    (stored,) = bucket.stored(tmp_path / "other")
    assert stored.files == of_nodes.whole.files
    (tmp_path / "other").mkdir()
    assert bucket.download(stored) == []
    assert_whole(read_manifest(stored.path))


def test_removed_files_leave_the_rest_of_the_checkpoint(of_nodes: Committed) -> None:
    trial = TrialFolder(of_nodes.path.parent.parent)
    TrialStorage(trial, {"type": "shared_fs"}).remove_files(of_nodes, ["ranks-2-3/shard-3.pth"])
    rest = read_manifest(of_nodes.path)
    assert rest.removed == ("ranks-2-3/shard-3.pth",)
    assert rest.damage() == []
    assert torch.equal(RankFiles(rest.path).load(rank_file(3)), files_of(3, 20)[rank_file(3)])


def test_one_that_is_not_kept_is_deleted(of_nodes: Committed) -> None:
    saved(of_nodes.path.parent, 30)
    context = CheckpointContext(of_nodes.path.parent, Distributed())
    context.prune({}, smaller_is_better=True, best=0, latest=1)
    assert [each.steps for each in committed(of_nodes.path.parent)] == [30]
    assert len([*of_nodes.path.parent.iterdir()]) == 1
