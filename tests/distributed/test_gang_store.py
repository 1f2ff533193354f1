"""The rendezvous of the ranks, and the access of other processes to it."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from hpc_det.checkpoint.checkpoints import CheckpointContext
from hpc_det.distributed.collectives import Distributed
from hpc_det.distributed.gang_store import address_of_rank_0, gang_store, keep_to_this_node
from hpc_det.distributed.preempt import StopAgreement, give_notice
from hpc_det.errors import UsageError
from hpc_det.node.network import free_port
from tests.distributed.ranks import OnRanks
from tests.facts import refused
from tests.listening import Listening, listening
from tests.node.relay import cut, relay
from tests.wait import DEADLINE_S, wait_for


@contextmanager
def started_with(distributed: Distributed, **environment: str) -> Iterator[Distributed]:
    """Restart the ranks without the store that the test fixture created, as if another launcher had started them."""
    distributed.barrier()
    distributed.stop()
    os.environ.update({"TORCHELASTIC_USE_AGENT_STORE": "False", **environment})
    again = Distributed.from_env(os.environ)
    again.start()
    yield again
    again.barrier()
    again.stop()
    distributed.start()


def listened_on(distributed: Distributed, environment: dict[str, str]) -> tuple[list[Listening], list[float]]:
    with started_with(distributed, **environment) as again:
        return listening(os.getpid()), again.sum(torch.ones(1)).tolist()


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_a_gang_on_one_node_listens_on_loopback_alone(on_ranks: OnRanks, name: str) -> None:
    port = free_port()
    for rank, (found, total) in enumerate(on_ranks(2, listened_on, {"MASTER_ADDR": name, "MASTER_PORT": str(port)})):
        assert len(found) == (2 if rank == 0 else 0), "the store, and rank 0's for messages"
        assert all(each.is_loopback for each in found)
        assert (port in [each.port for each in found]) == (rank == 0)
        assert total == [2]


def test_ranks_that_one_launcher_has_started_have_no_store_that_others_could_reach(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    port = str(free_port())
    file = {"HPC_DET_STORE": str(tmp_path / "store"), "HPC_DET_MASTER_PORT": port, "MASTER_PORT": port}
    for rank, (found, total) in enumerate(on_ranks(2, listened_on, file)):
        assert len(found) == (1 if rank == 0 else 0), "rank 0's for messages"
        assert int(port) not in [each.port for each in found]
        assert all(each.is_loopback for each in found)
        assert total == [2]
    assert [path.name for path in tmp_path.iterdir()] == ["store-0-2"], "the previous store is removed"


def twice(distributed: Distributed, environment: dict[str, str]) -> list[float]:
    sums = []
    for _ in range(2):
        with started_with(distributed, **environment) as again:
            sums += again.sum(torch.ones(1)).tolist()
    return sums


@pytest.mark.parametrize("in_file", [True, False])
def test_a_gang_may_start_again(on_ranks: OnRanks, tmp_path: Path, in_file: bool) -> None:
    port = str(free_port())
    file = {"HPC_DET_STORE": str(tmp_path / "store"), "HPC_DET_MASTER_PORT": port} if in_file else {}
    assert on_ranks(2, twice, {"MASTER_PORT": port, **file}) == [[2, 2], [2, 2]]


def callers(port: int) -> set[int]:
    """Return the remote ports that are connected to this process's store."""
    found = psutil.Process().net_connections("tcp")
    return {each.raddr.port for each in found if each.laddr.port == port and each.status == psutil.CONN_ESTABLISHED}


def later_than_rank_1(distributed: Distributed, port: int) -> list[float]:
    """Let rank 0 close its first store only after rank 1 has connected to it for the second start."""
    with started_with(distributed, MASTER_PORT=str(port)) as again:
        before = callers(port) if again.is_chief else set()
        again.barrier()
        if again.is_chief:
            while not callers(port) - before:
                time.sleep(0.001)
        again.stop()
        again.start()
        return again.sum(torch.ones(1)).tolist()


def test_a_rank_that_starts_again_early_waits_for_the_store_of_this_start(on_ranks: OnRanks) -> None:
    assert on_ranks(2, later_than_rank_1, free_port()) == [[2], [2]]


@pytest.mark.integration
@pytest.mark.parametrize("answered", [0, 4])
def test_the_store_of_the_start_before_may_end_while_a_rank_comes_to_it(
    monkeypatch: pytest.MonkeyPatch, answered: int
) -> None:
    """`answered`: bytes that the old store sends before its connection ends. It counts the rank only after 4 bytes."""
    monkeypatch.setattr("hpc_det.distributed.gang_store._starts", itertools.repeat(2))
    before = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port := free_port())}
    with relay(("127.0.0.1", before.port), cut("to client", answered), port) as wire, ThreadPoolExecutor() as threads:
        one = threads.submit(gang_store, 1, 2, 1, env)
        wait_for(lambda: len(wire.recorded["to client"]) > answered)
        zero = gang_store(0, 1, 1, env)  # a gang of one rank, which waits for no other rank
        zero.set("from rank 0", "to this start")
        assert one.result(DEADLINE_S).get("from rank 0") == b"to this start"


def counting_restarts(distributed: Distributed, port: int) -> list[float]:
    """Sum over ranks of two nodes whose torchrun agents have counted a different number of restarts."""
    of_a_node = {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "TORCHELASTIC_RESTART_COUNT": str(distributed.rank)}
    with started_with(distributed, MASTER_PORT=str(port), **of_a_node) as again:
        del os.environ["TORCHELASTIC_RESTART_COUNT"]  # the ranks of these tests are on one node afterwards
        return again.sum(torch.ones(1)).tolist()


def test_ranks_of_nodes_that_count_restarts_differently_meet(on_ranks: OnRanks) -> None:
    assert on_ranks(2, counting_restarts, free_port()) == [[2], [2]]


def called_from_elsewhere(distributed: Distributed, port: int) -> list[str]:
    """Return whether rank 0's ports accept or refuse a connection to another address of this machine."""
    with started_with(distributed, MASTER_PORT=str(port)) as again:
        answers = []
        for each in listening(os.getpid()) if again.is_chief else []:
            try:
                socket.create_connection(("127.0.0.2", each.port), 5).close()
                answers.append("accepted")
            except ConnectionRefusedError:
                answers.append("refused")
        return answers


def test_nobody_is_let_in_by_another_address_of_the_machine(on_ranks: OnRanks) -> None:
    first, _ = on_ranks(2, called_from_elsewhere, free_port())
    assert first == ["refused"] * 2


def with_strangers(distributed: Distributed, port: int, each: int, file: Path) -> int:
    """Connect `each` times to the store from both ranks; rank 0 then creates `file`. Return this rank's number of open
    files.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * each, most))
    with started_with(distributed, MASTER_PORT=str(port)) as again, ExitStack() as strangers:
        for _ in range(each):
            strangers.enter_context(socket.create_connection(("127.0.0.1", port), DEADLINE_S))
        if again.is_chief:
            wait_for(lambda: len(os.listdir("/proc/self/fd")) > 3 * each, DEADLINE_S)
            file.touch()
        count = len(os.listdir("/proc/self/fd"))
        again.barrier()
    return count


def test_strangers_at_the_store_take_no_files_from_rank_0(on_ranks: OnRanks, tmp_path: Path) -> None:
    first, second = on_ranks(2, with_strangers, free_port(), 150, tmp_path / "file")
    assert first > 3 * 150
    assert second < 2 * 150
    assert (tmp_path / "file").exists()


def as_of_two_nodes(distributed: Distributed, port: int, address: str) -> list[Listening]:
    with started_with(distributed, MASTER_PORT=str(port), MASTER_ADDR=address, LOCAL_WORLD_SIZE="1", LOCAL_RANK="0"):
        return listening(os.getpid())


def test_between_nodes_rank_0_listens_at_the_address_that_the_others_are_given(on_ranks: OnRanks) -> None:
    port = free_port()
    found, _ = on_ranks(2, as_of_two_nodes, port, "127.0.0.3")
    assert Listening("127.0.0.3", port) in found
    assert sum(each.address == "127.0.0.3" for each in found) == 2, "the store, and messages"
    assert "0.0.0.0" not in [each.address for each in found]


def used(distributed: Distributed, folder: Path) -> list[int]:
    """Return the number of keys in the store of the process group, before and after typical operations of hpc_det."""
    store = dist.distributed_c10d._get_default_store()
    distributed.barrier()
    counts = [store.num_keys()]
    distributed.barrier()
    context = CheckpointContext(folder, distributed)
    for steps in range(3):
        context.begin(steps, {f"rank-{distributed.rank}.pth": steps})
        context.settled(wait=True)
    stop = StopAgreement(distributed.messages)
    give_notice(distributed.messages)
    while not stop.should_stop():
        distributed.barrier()
    distributed.wait_for_rank_0()
    distributed.barrier()
    return [*counts, store.num_keys()]


def test_nothing_of_ours_is_in_the_store_of_another_launcher(on_ranks: OnRanks, tmp_path: Path) -> None:
    for before, after in on_ranks(2, used, tmp_path):
        assert before == after


def test_ranks_without_a_launcher_are_told_what_is_missing() -> None:
    with refused(UsageError, "MASTER_ADDR", "WORLD_SIZE", 2):
        gang_store(0, 2, 1, {})


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with refused(OSError, "rank 0", f"127.0.0.1:{port}", "MASTER_ADDR", "MASTER_PORT") as error:
            gang_store(0, 2, 1, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    assert error.value.errno == errno.EADDRINUSE


def test_a_host_whose_name_leads_to_loopback_is_found_by_the_other_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's default /etc/hosts maps the host's name to 127.0.1.1."""
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)
    monkeypatch.setattr("hpc_det.distributed.gang_store.own_address", lambda nodes, wanted: ("10.1.2.3", None))
    assert address_of_rank_0("debian", 2) == "10.1.2.3"
    assert address_of_rank_0("debian", 1) == "127.0.1.1"
    assert address_of_rank_0("localhost", 2) == "127.0.1.1", "an explicit loopback name is kept"


def test_an_interface_that_the_user_names_is_taken() -> None:
    env = {"GLOO_SOCKET_IFNAME": "eth7"}
    keep_to_this_node(env)
    assert env == {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "lo"}
