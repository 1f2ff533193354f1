"""Who can connect to the gloo of a rank: its peers while a group is made, and nobody afterwards."""

from __future__ import annotations

import os
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from hpc_det.distributed.collectives import Distributed
from hpc_det.distributed.gloo_ports import LAZY, closed_once_connected
from tests.distributed.ranks import OnRanks
from tests.listening import Listening, listening

REUSED = 50
"""Groups one after the other."""


@dataclass
class Seen:
    opened: list[Listening]
    """While the group was made."""
    still_open: list[Listening]
    refuses: bool
    total: float
    """Of ones, summed in the group."""


def is_refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
    except ConnectionRefusedError:
        return True
    return False


def in_a_group(distributed: Distributed, is_lazy: bool) -> Seen:
    if is_lazy:
        os.environ[LAZY] = "1"
    own = socket.create_server(("127.0.0.1", 0))  # of the user, and not gloo's
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
