from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

import hpc_det.checkpoint.verified
from hpc_det.checkpoint.checkpoints import CheckpointContext
from hpc_det.checkpoint.committed import MANIFEST, committed
from hpc_det.checkpoint.node_folders import contains
from hpc_det.checkpoint.object_store import Mirror, Remote
from hpc_det.checkpoint.reading import Block, Found, blocks_of, read_blocks
from hpc_det.checkpoint.seals import CRC, CrcSeal, FileEntry
from hpc_det.checkpoint.verified import shared
from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import HpcDetError
from tests.distributed.ranks import OnRanks
from tests.facts import refused

SIZES = {"state_dict.pth": 1000, "rank-0.pth": 10, "rank-1.pth": 10, "rank-2.pth": 10, "rank-3.pth": 10, "code/a.py": 0}
FILES = {name: FileEntry(size=size, crc32=0) for name, size in SIZES.items()}
READS = [("state_dict.pth", f"rank-{rank}.pth") for rank in range(4)]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CRC, "read_bytes", 100)


def names(shares: Sequence[Sequence[Block]]) -> list[set[str]]:
    return [{block.name for block in share} for share in shares]


def test_ranks_of_a_node_share_the_blocks_and_read_each_once() -> None:
    shares = shared([0, 0, 0, 0], READS, FILES)
    assert Counter(block for share in shares for block in share) == Counter(blocks_of(FILES, CRC))
    assert [len(share) for share in shares] == [4, 4, 4, 3]


def test_each_node_reads_once_what_its_ranks_load_and_a_part_of_what_nobody_loads() -> None:
    one, another = (shares := shared([0, 0, 2, 2], READS, FILES))[:2], shares[2:]
    for node, ranks in ((one, (0, 1)), (another, (2, 3))):
        counts = Counter(block for share in node for block in share)
        assert set(counts.values()) == {1}
        assert {block for block in blocks_of(FILES, CRC) if block.name == "state_dict.pth"} <= set(counts)
        assert {f"rank-{rank}.pth" for rank in ranks} <= set.union(*names(node))
    assert sum("code/a.py" in each for each in names(shares)) == 1


def test_nodes_share_what_nobody_loads() -> None:
    shares = shared([0, 1, 2], [(), (), ()], FILES)
    assert Counter(name for each in names(shares) for name in each) == Counter(list(FILES))
    assert [len(each) for each in names(shares)] == [2, 2, 2]


def as_node(distributed: Distributed) -> Distributed:
    return Distributed(rank=distributed.rank, size=distributed.size, nodes=distributed.size, env=distributed.env)


def noted_reads(patch: pytest.MonkeyPatch) -> list[str]:
    """Record the blocks that are read from now on, as name@offset, in the list that is returned."""
    read: list[str] = []

    def noted(folder: Path, files: dict[str, FileEntry], blocks: list[Block], seal: CrcSeal) -> list[Found]:
        read.extend(f"{block.name}@{block.offset}" for block in blocks)
        return read_blocks(folder, files, blocks, seal)

    patch.setattr(hpc_det.checkpoint.verified, "read_blocks", noted)
    return read


def read_by_this_rank(distributed: Distributed, folder: Path, apart: bool) -> list[str]:
    gang = as_node(distributed) if apart else distributed
    checkpoints = CheckpointContext(folder, gang)
    own = f"rank-{gang.rank}.pth"
    checkpoints.save(10, {own: gang.rank, **({"state_dict.pth": b"x" * 1000, "other.pth": 0} if gang.is_chief else {})})
    with pytest.MonkeyPatch.context() as patch:
        read = noted_reads(patch)
        patch.setattr(CRC, "read_bytes", 100)
        assert checkpoints.newest(lambda name: name == "state_dict.pth" or contains(name, own))
    return read


def test_no_byte_is_read_twice_on_a_node(on_ranks: OnRanks, tmp_path: Path) -> None:
    read = on_ranks(2, read_by_this_rank, tmp_path, False)
    (checkpoint,) = committed(tmp_path)
    assert sorted(read[0] + read[1]) == sorted(
        f"{block.name}@{block.offset}" for block in blocks_of(checkpoint.files, CRC)
    )
    assert abs(len(read[0]) - len(read[1])) <= 1


def test_each_node_reads_for_itself(on_ranks: OnRanks, tmp_path: Path) -> None:
    first, second = on_ranks(2, read_by_this_rank, tmp_path, True)
    (checkpoint,) = committed(tmp_path)
    common = {
        f"{block.name}@{block.offset}" for block in blocks_of(checkpoint.files, CRC) if block.name == "state_dict.pth"
    }
    assert set(first) & set(second) == common
    assert {"ranks-0-0/small-files.zip@0", "other.pth@0"} <= set(first)
    assert "ranks-1-1/small-files.zip@0" in second
    assert len(first) == len(set(first))


def test_one_that_rank_0_has_fetched_is_read_on_every_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    mirror = Mirror(Remote(f"file://{tmp_path}/bucket", {"auto_mkdir": True}), folder)
    checkpoints = CheckpointContext(folder, Distributed(), mirror)
    uuid = checkpoints.save(10, {"state_dict.pth": 1})
    mirror.update(committed(folder), set())
    shutil.rmtree(folder / uuid)
    read = noted_reads(monkeypatch)
    assert checkpoints.newest() == (folder / uuid, 10)
    assert {name.partition("@")[0] for name in read} == {"state_dict.pth"}


def test_a_damaged_one_that_was_told_is_refused_on_every_rank(on_ranks: OnRanks, tmp_path: Path) -> None:
    said = on_ranks(2, refusal, tmp_path)
    assert said[0] == said[1]
    assert "crc32" in said[0]


@pytest.mark.parametrize("has_manifest", [True, False])
def test_a_fifo_in_one_that_was_told_is_refused_and_never_opened(tmp_path: Path, has_manifest: bool) -> None:
    checkpoints = CheckpointContext(tmp_path, Distributed())
    folder = tmp_path / checkpoints.save(1, {"state_dict.pth": 1})
    if not has_manifest:
        (folder / MANIFEST).unlink()
        checkpoints.verify(folder)
    os.mkfifo(folder / "more")
    with refused(HpcDetError, "more: ", "FIFO"):
        checkpoints.verify(folder)


def test_an_odd_manifest_of_one_that_was_told_is_named(tmp_path: Path) -> None:
    checkpoints = CheckpointContext(tmp_path, Distributed())
    folder = tmp_path / checkpoints.save(1, {"state_dict.pth": 1})
    (folder / MANIFEST).write_text("{}")
    with refused(HpcDetError, MANIFEST):
        checkpoints.verify(folder)


def unseen(distributed: Distributed, folder: Path) -> str:
    """Return the error when rank 1 does not see the checkpoint that rank 0 sees."""
    checkpoints = CheckpointContext(folder, distributed)
    checkpoints.save(1, {f"rank-{distributed.rank}.pth": 1})
    with pytest.MonkeyPatch.context() as patch:
        if not distributed.is_chief:
            patch.setattr(hpc_det.checkpoint.verified, "MANIFEST", "of another folder")
        with pytest.raises(HpcDetError) as error:
            checkpoints.newest()
    return str(error.value)


def test_a_checkpoint_that_one_rank_does_not_see_is_an_error_and_is_not_set_aside(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    for said in on_ranks(2, unseen, tmp_path):
        assert "rank 1" in said
    assert len(committed(tmp_path)) == 1


def refusal(distributed: Distributed, folder: Path) -> str:
    checkpoints = CheckpointContext(folder, distributed)
    uuid = checkpoints.save(1, {f"rank-{distributed.rank}.pth": distributed.rank})
    checkpoints.verify(folder / uuid)
    if distributed.is_chief:
        content = bytearray((folder / uuid / "rank-1.pth").read_bytes())
        content[100] ^= 4
        (folder / uuid / "rank-1.pth").write_bytes(content)
    distributed.barrier()
    with pytest.raises(HpcDetError) as error:
        checkpoints.verify(folder / uuid)
    return str(error.value)
