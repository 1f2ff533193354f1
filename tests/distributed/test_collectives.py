from __future__ import annotations

import os
import socket
import tempfile
import threading
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpc_det.distributed.collectives import LAZY, Distributed, closed_once_connected
from hpc_det.errors import UsageError
from tests.distributed.ranks import OnRanks
from tests.facts import refused, unnamed
from tests.listening import Listening, listening
from tests.wait import wait_for

LENGTHS = [0, 168, 169, 170, 20000]
"""Lengths of texts below, at and above what fits into the first message of a broadcast, in characters of six bytes."""


def collectives(distributed: Distributed) -> dict[str, Any]:
    rank = distributed.rank
    collected = {
        "gathered": distributed.gather_json({"rank": rank, "long": "x" * 1000 * rank, "umlaut": "ä"}),
        "broadcast": distributed.broadcast_json(["from", rank]),
        "long broadcast": [distributed.broadcast_json("ä" * length)[:9] for length in LENGTHS],
        "sum": distributed.sum(torch.tensor([1.0, rank], dtype=torch.float64)).tolist(),
        "nothing": distributed.gather_json(None),
    }
    distributed.barrier()
    return collected


@pytest.mark.parametrize("size", [1, 3])
def test_every_rank_gets_what_all_gave(on_ranks: OnRanks, size: int) -> None:
    expected = {
        "gathered": [{"rank": rank, "long": "x" * 1000 * rank, "umlaut": "ä"} for rank in range(size)],
        "broadcast": ["from", 0],
        "long broadcast": [("ä" * length)[:9] for length in LENGTHS],
        "sum": [size, sum(range(size))],
        "nothing": [None] * size,
    }
    assert on_ranks(size, collectives) == [expected] * size


def beside_a_group_for_gpus(distributed: Distributed, folder: Path) -> Any:
    """Return the results in a process that has a group without a backend for CPU tensors, as with NCCL alone."""
    distributed.stop()
    group = f"file://{folder / 'group'}"
    dist.init_process_group("cuda:gloo", init_method=group, rank=distributed.rank, world_size=distributed.size)
    distributed.start()
    return collectives(distributed), distributed.allgather(distributed.rank), dist.get_backend_config()


def test_a_group_that_takes_no_cpu_tensors_is_kept_and_gloo_connects_the_ranks(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    for found, objects, backend in on_ranks(2, beside_a_group_for_gpus, tmp_path):
        assert found["broadcast"] == ["from", 0]
        assert found["sum"] == [2, 1]
        assert objects == [0, 1]
        assert backend == "cuda:gloo"


# --- objects


class Item:
    """An object that neither JSON nor torch can serialise."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Item) and self.content == other.content

    def __hash__(self) -> int:
        return hash(self.content)


def with_secret(distributed: Distributed, **changes: Any) -> Distributed:
    return replace(distributed, env={"HPC_DET_SECRET": "of these tests"}, **changes)


def object_collectives(distributed: Distributed) -> list[Any]:
    distributed = with_secret(distributed)
    own = {"rank": distributed.rank, Item(distributed.rank): "x" * 10_000 * distributed.rank}
    return [
        distributed.gather(own),
        distributed.allgather(own),
        distributed.broadcast(own),
        distributed.gather(None),
        distributed.gather_local(own),
        distributed.allgather_local(own),
        distributed.broadcast_local(own),
    ]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_collective_carries_any_object(on_ranks: OnRanks, size: int) -> None:
    everyone = [{"rank": rank, Item(rank): "x" * 10_000 * rank} for rank in range(size)]
    for rank, given in enumerate(on_ranks(size, object_collectives)):
        gathered = everyone if rank == 0 else None
        nothing = [None] * size if rank == 0 else None
        assert given == [gathered, everyone, everyone[0], nothing, gathered, everyone, everyone[0]]


def test_alone_an_object_is_given_back_as_it_is() -> None:
    item = Item(1)
    alone = Distributed()
    for given in (alone.gather(item), alone.allgather(item), alone.gather_local(item), alone.allgather_local(item)):
        assert given is not None
        assert len(given) == 1
        assert given[0] is item
    assert alone.broadcast(item) is item
    assert alone.broadcast_local(item) is item


def local_collectives(distributed: Distributed, local_size: int) -> list[Any]:
    """Return the results of the local collectives for nodes with `local_size` ranks each."""
    rank = distributed.rank
    nodes = distributed.size // local_size
    distributed = with_secret(distributed, local_rank=rank % local_size, local_size=local_size, nodes=nodes)
    local = [distributed.gather_local(Item(rank)), distributed.allgather_local(rank), distributed.broadcast_local(rank)]
    return [*local, distributed.allgather(rank)]


def test_local_collectives_stay_within_a_node(on_ranks: OnRanks) -> None:
    everyone = [0, 1, 2, 3]
    assert on_ranks(4, local_collectives, 2) == [
        [[Item(0), Item(1)], [0, 1], 0, everyone],
        [None, [0, 1], 0, everyone],
        [[Item(2), Item(3)], [2, 3], 2, everyone],
        [None, [2, 3], 2, everyone],
    ]


def test_a_rank_alone_on_its_node_has_only_itself(on_ranks: OnRanks) -> None:
    assert on_ranks(2, local_collectives, 1) == [[[Item(0)], [0], 0, [0, 1]], [[Item(1)], [1], 1, [0, 1]]]


def one_node_only(distributed: Distributed) -> list[int] | None:
    """Only ranks 0 and 1 call the collective; ranks 2 and 3, on the other node, do not."""
    distributed = with_secret(distributed, local_rank=distributed.rank % 2, local_size=2, nodes=2)
    return distributed.allgather_local(distributed.rank) if distributed.rank < 2 else None


def test_a_node_needs_no_other_for_its_local_collectives(on_ranks: OnRanks) -> None:
    assert on_ranks(4, one_node_only) == [[0, 1], [0, 1], None, None]


def test_without_any_variable_there_is_one_rank() -> None:
    assert Distributed.from_env({}) == Distributed(rank=0, size=1, local_rank=0, local_size=1, nodes=1)


def test_the_variables_of_torchrun_give_the_numbers() -> None:
    env = {"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    distributed = Distributed.from_env(env)
    assert (distributed.get_rank(), distributed.get_size(), distributed.get_local_rank()) == (5, 6, 1)
    assert distributed.get_num_agents() == 3
    assert not distributed.is_chief


def fails_on_rank_1(distributed: Distributed) -> None:
    if distributed.rank == 1:
        raise RuntimeError("as told")
    distributed.barrier()


def test_the_ranks_of_these_tests_pass_on_a_failure(on_ranks: OnRanks) -> None:
    with refused(pytest.fail.Exception, "rank 1", "RuntimeError: as told"):
        on_ranks(2, fails_on_rank_1)


def waits_forever(distributed: Distributed, there: Path) -> None:
    (there / str(distributed.rank)).touch()
    threading.Event().wait()


def test_the_ranks_of_these_tests_have_a_deadline_and_show_where_they_are_then(
    on_ranks: OnRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def when_both_are_there(lines: list[Any], within_s: float) -> list[Any]:
        wait_for(lambda: len(os.listdir(tmp_path)) == 2)
        return wait(lines, within_s)

    monkeypatch.setattr("tests.distributed.ranks.wait", when_both_are_there)
    with refused(pytest.fail.Exception, "1 s", "in waits_forever", "rank 0:", "rank 1:"):
        on_ranks(2, waits_forever, tmp_path, deadline_s=1)


# --- GPUs


def test_a_rank_beyond_the_gpus_of_its_node_is_refused_before_nccl_could(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    fourth = Distributed(rank=7, size=8, local_rank=3, local_size=4, nodes=2, env={"CUDA_VISIBLE_DEVICES": "0,1"})
    facts = ["rank 7", 3, 4, socket.gethostname(), "2 GPUs", "CUDA_VISIBLE_DEVICES", "'0,1'", "slots_per_node"]
    with refused(UsageError, *facts):
        fourth.start()


def test_slots_that_are_gpus_are_not_trained_on_a_cpu_unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    with refused(UsageError, "slot_type: cpu", socket.gethostname(), "CUDA_VISIBLE_DEVICES", "not set"):
        Distributed(env={"HPC_DET_SLOT_TYPE": "gpu"}).start()
    Distributed(env={"HPC_DET_SLOT_TYPE": "cpu"}).start()


def test_a_torch_without_cuda_says_so_and_trains(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    Distributed(env={"HPC_DET_SLOT_TYPE": "gpu"}).start()
    assert unnamed(capsys.readouterr().out, f"torch {torch.__version__}", "CPU") == []


def res_options(distributed: Distributed) -> str:
    return os.environ["RES_OPTIONS"]


def test_a_store_is_opened_with_little_patience_for_look_ups(on_ranks: OnRanks) -> None:
    """Otherwise a lost answer costs the resolver's 5 s for each rank that connects."""
    assert on_ranks(2, res_options) == ["timeout:1 attempts:1"] * 2


REUSED = 50
"""Number of groups that are created and destroyed, in sequence."""


@dataclass
class Seen:
    opened: list[Listening]
    """Ports that were open while the group was created."""
    still_open: list[Listening]
    refuses: bool
    total: float
    """The sum of ones over the group."""


def is_refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
    except ConnectionRefusedError:
        return True
    return False


def in_a_group(distributed: Distributed, is_lazy: bool) -> Seen:
    if is_lazy:
        os.environ[LAZY] = "1"
    own = socket.create_server(("127.0.0.1", 0))  # a socket of the user, not of gloo
    before = listening(os.getpid())
    with closed_once_connected():
        group = dist.new_group([0, 1], backend="gloo")
        opened = [each for each in listening(os.getpid()) if each not in before]
    ones = torch.ones(1)
    dist.all_reduce(ones, group=group)
    still_open = [each for each in listening(os.getpid()) if each not in before]
    refuses = all(is_refused(each.port) for each in opened)
    assert not is_refused(own.getsockname()[1])
    own.close()
    dist.destroy_process_group(group)
    return Seen(opened, still_open, refuses, ones.item())


def test_the_port_of_a_group_is_closed_when_its_ranks_are_connected(on_ranks: OnRanks) -> None:
    for seen in on_ranks(2, in_a_group, False):
        assert len(seen.opened) == 1
        assert seen.still_open == []
        assert seen.refuses
        assert seen.total == 2


def test_ranks_that_connect_later_are_waited_for(on_ranks: OnRanks) -> None:
    for seen in on_ranks(2, in_a_group, True):
        assert seen.still_open == seen.opened
        assert seen.total == 2


def one_after_the_other(distributed: Distributed) -> list[float]:
    totals = []
    for _ in range(REUSED):
        with closed_once_connected():
            group = dist.new_group([0, 1], backend="gloo")
        ones = torch.ones(1)
        dist.all_reduce(ones, group=group)
        totals.append(ones.item())
        dist.destroy_process_group(group)
    return [*totals, len(os.listdir("/proc/self/fd"))]


def test_groups_come_and_go(on_ranks: OnRanks) -> None:
    for *totals, files in on_ranks(2, one_after_the_other):
        assert totals == [2] * REUSED
        assert files < REUSED, "each gives its files back"


def with_a_long_path(distributed: Distributed, folder: Path) -> Seen:
    long = folder / ("x" * 200)
    long.mkdir(exist_ok=True)
    tempfile.tempdir = str(long)
    return in_a_group(distributed, False)


def test_the_folder_for_temporary_files_may_have_a_long_name(on_ranks: OnRanks, tmp_path: Path) -> None:
    assert [seen.refuses for seen in on_ranks(2, with_a_long_path, tmp_path)] == [True, True]
    assert list((tmp_path / ("x" * 200)).iterdir()) == []
