"""Ranks on two simulated nodes: each rank has a network namespace, and a virtual cable connects them."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from hpc_det.distributed.collectives import Distributed
from hpc_det.node.network import free_port
from tests.distributed.ranks import OnRanks
from tests.listening import Listening, listening

_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Nodes:
    names: list[str]
    addresses: list[str]
    elsewhere: str
    """Another address of the first node, for example in the network of the login nodes."""


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    if subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode:
        pytest.skip("this machine refuses to make network namespaces")
    names = [f"hpcdet-ranks{os.getpid()}-{number}" for number in range(2)]
    addresses = ["10.231.7.1", "10.231.7.2"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("-n", names[0], "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, addresses, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", names[0], "addr", "add", "10.231.8.1/32", "dev", "lo")
        yield Nodes(names, addresses, "10.231.8.1")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def on_node(name: str) -> Iterator[None]:
    """Move this thread, and the threads that it starts, to that node."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{name}", os.O_RDONLY)
    _enter(there)
    yield
    _enter(before)
    os.close(before)
    os.close(there)


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def listened_on(distributed: Distributed, nodes: Nodes, ports: list[int]) -> tuple[list[Listening], list[list[object]]]:
    """Return the addresses on which this rank listens, and the messages that rank 0 gathered."""
    theirs = {
        "MASTER_ADDR": nodes.addresses[0],
        "MASTER_PORT": str(ports[0]),
        "LOCAL_WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "GLOO_SOCKET_IFNAME": "cable",  # as the agent sets it
    }
    rank = distributed.rank
    distributed.barrier()
    distributed.stop()
    with on_node(nodes.names[rank]):
        os.environ.update({"TORCHELASTIC_USE_AGENT_STORE": "False", **theirs})
        between = Distributed.from_env(os.environ)
        between.start()
        found = listening(os.getpid())
        between.messages.to_rank_0("kind", rank)
        got = between.messages.from_all("kind", "sent it", limit_s=60) if rank == 0 else []
        between.barrier()
        between.stop()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports[1]), GLOO_SOCKET_IFNAME="lo")
    distributed.start()
    return found, got


def test_between_nodes_a_rank_listens_at_the_address_of_the_route_alone(on_ranks: OnRanks, nodes: Nodes) -> None:
    results = on_ranks(2, listened_on, nodes, [free_port(), free_port()])
    assert results[0][1] == [0, 1]
    for rank, (found, _) in enumerate(results):
        assert {each.address for each in found} <= {nodes.addresses[rank]}
        assert len(found) == (2 if rank == 0 else 0), "rank 0's store and messages"
