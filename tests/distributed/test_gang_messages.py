from __future__ import annotations

import itertools
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import partialmethod
from pathlib import Path

import pytest

from hpc_det.distributed import gang_messages
from hpc_det.distributed.collectives import Distributed
from hpc_det.distributed.gang_messages import GangMessages, OtherRank, RankGone, RankZero, open_messages
from hpc_det.errors import HpcDetError, UsageError
from tests.distributed.connected import KEY, connected
from tests.distributed.ranks import OnRanks
from tests.facts import refused, unnamed
from tests.node.relay import relay
from tests.wait import DEADLINE_S, wait_for


@pytest.mark.parametrize("size", [1, 2, 5])
def test_rank_0_gets_what_every_rank_has_sent_and_nothing_is_left(size: int) -> None:
    with connected(size) as ranks:
        for turn in range(3):
            for each in reversed(ranks):
                each.to_rank_0("kind", [turn, each.rank, "ä" * 10_000])
            assert ranks[0].from_all("kind", "sent it", limit_s=DEADLINE_S) == [
                [turn, rank, "ä" * 10_000] for rank in range(size)
            ]
        assert not any(each._values for each in ranks)


@pytest.mark.parametrize("size", [1, 3])
def test_every_rank_gets_what_rank_0_has_sent_last(size: int) -> None:
    with connected(size) as ranks:
        for number in range(100):
            ranks[0].to_all("kind", number)
        for each in ranks:
            assert each.from_rank_0("kind", "sent it", limit_s=DEADLINE_S, is_it=lambda value: value == 99) == 99
            assert len(each._values) == 1


def test_a_message_of_long_ago_is_not_what_is_waited_for() -> None:
    with connected(2) as (zero, one):
        one.to_rank_0("kind", "of before")
        zero.to_rank_0("kind", "now")
        wait_for(lambda: len(zero._values.get("kind", ())) == 2)
        threading.Timer(0.05, one.to_rank_0, ["kind", "now"]).start()
        values = zero.from_all("kind", "sent it", limit_s=DEADLINE_S, is_it=lambda value: value == "now")
        assert values == ["now", "now"]


@pytest.mark.integration
def test_a_wait_has_a_limit_and_names_the_ranks() -> None:
    with connected(4) as ranks:
        for rank in (0, 2):
            ranks[rank].to_rank_0("kind", None)
        with refused(RankGone, "ranks 1, 3", "reported its files", "0.2 s"):
            ranks[0].from_all("kind", "reported its files", limit_s=0.2)
        with refused(RankGone, "rank 0", "come", "0.1 s"):
            ranks[3].from_rank_0("other", "come", limit_s=0.1, is_it=bool)


@pytest.mark.integration
def test_the_limit_begins_anew_with_each_message_of_the_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gang_messages, "LOOK_S", 0.02)
    with connected(1) as (alone,):
        counted = itertools.count()
        values = alone.from_all(
            "kind",
            "counted to 30",
            limit_s=0.1,
            is_it=lambda value: value == 30,
            go_on=lambda: alone.to_rank_0("kind", next(counted)),
        )
    assert values == [30]


def test_time_in_which_a_process_was_suspended_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def monotonic() -> float:
        now[0] += 3600
        return now[0]

    monkeypatch.setattr(time, "monotonic", monotonic)
    monkeypatch.setattr(gang_messages, "LOOK_S", 0.01)
    with connected(1) as (alone,):
        looks: list[int] = []
        with pytest.raises(RankGone):
            alone.from_all("kind", "sent it", limit_s=0.05, go_on=lambda: looks.append(1))
    assert len(looks) == 5, "each pause counted as one look"


@pytest.mark.parametrize("from_rank", [0, 1])
def test_a_rank_that_ends_ends_the_wait_at_once(from_rank: int) -> None:
    ranks: list[GangMessages]
    waits: list[Callable[[], object]] = [
        lambda: ranks[0].from_all("kind", "sent it", limit_s=math.inf),
        lambda: ranks[1].from_rank_0("kind", "sent it", limit_s=math.inf, is_it=bool),
    ]
    over = threading.Event()

    def wait() -> None:
        with refused(RankGone, f"rank {1 - from_rank}", "sent it"):
            waits[from_rank]()
        over.set()

    with connected(2) as ranks:
        ranks[0].to_rank_0("kind", None)
        waiting = threading.Thread(target=wait)
        waiting.start()
        ranks[1 - from_rank].close()
        assert over.wait(DEADLINE_S)
        waiting.join()


def test_a_rank_that_has_sent_its_part_may_end() -> None:
    with connected(3) as ranks:
        ranks[1].to_rank_0("kind", 1)
        ranks[1].close()
        wait_for(lambda: 1 in ranks[0]._gone)
        for rank in (0, 2):
            ranks[rank].to_rank_0("kind", rank)
        assert ranks[0].from_all("kind", "sent it", limit_s=DEADLINE_S) == [0, 1, 2]


def test_a_rank_that_does_not_come_is_named() -> None:
    rank_0 = RankZero(3, "127.0.0.1", KEY)
    one = OtherRank(1, 3, rank_0.host, rank_0.port, KEY)
    with refused(RankGone, "rank 2", f"127.0.0.1:{rank_0.port}", "0.2 s"):
        rank_0.await_all(limit_s=0.2)
    one.close()
    rank_0.close()


@pytest.mark.integration
def test_a_rank_comes_once_and_nobody_else_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    with connected(2) as (zero, _):
        monkeypatch.setattr(gang_messages, "ARRIVE_S", 0.3)
        assert isinstance(zero, RankZero)
        for rank, key in ((1, KEY), (0, KEY), (2, KEY), (1, bytes(32)), (True, KEY), ("1", KEY)):
            with refused(RankGone, f"rank {rank}", f"rank 0 at {zero.host}:{zero.port}", "dtrain_network_interface"):
                OtherRank(rank, 2, zero.host, zero.port, key)  # type: ignore[arg-type]


def test_what_a_rank_has_sent_counts_once_whoever_sends_it_again() -> None:
    with connected(3) as ranks:
        zero = ranks[0]
        assert isinstance(zero, RankZero)
        with closing(RankZero(2, "127.0.0.1", KEY)) as other, relay((other.host, other.port)) as between:
            with closing(OtherRank(1, 2, between.host, between.port, KEY)) as one:
                one.to_rank_0("kind", "recorded")
                wait_for(lambda: other._values.get("kind") == {1: "recorded"})
            for listener in (other, zero):
                with socket.create_connection((listener.host, listener.port), DEADLINE_S) as again:
                    again.sendall(between.recorded["to listener"])
                    while again.recv(4096):  # until the listener closes the connection
                        pass
            assert other._arrivals["kind"] == 1
        assert "kind" not in zero._values


def test_a_rank_that_finds_nobody_says_where_it_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gang_messages, "ARRIVE_S", 0.1)
    with refused(RankGone, "rank 1", "rank 0 at 127.0.0.1:1", "dtrain_network_interface") as error:
        OtherRank(1, 2, "127.0.0.1", 1, KEY)
    assert not isinstance(error.value, HpcDetError), "no mistake of the user's: the next attempt may succeed"


def test_nothing_runs_any_more_after_the_end() -> None:
    before = {*threading.enumerate()}, len(os.listdir("/proc/self/fd"))
    with connected(4) as ranks:
        assert len({*threading.enumerate()} - before[0]) == 4
        assert len(ranks) == 4
    assert ({*threading.enumerate()}, len(os.listdir("/proc/self/fd"))) == before


@pytest.mark.integration
def test_a_forked_child_keeps_no_connection() -> None:
    """Otherwise a DataLoader's worker that outlives its rank would hide that the rank has ended."""
    with connected(2) as (zero, one):
        go, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(tell)
            os.read(go, 1)
            os._exit(0)
        os.close(go)
        one.close()
        wait_for(lambda: 1 in zero._gone)
        os.close(tell)
        os.waitpid(pid, 0)


# --- among processes


def comes_after_rank_0(distributed: Distributed, folder: Path) -> list[bool]:
    seen = []
    for turn in range(20):
        done = folder / str(turn)
        if distributed.is_chief:
            done.touch()
        distributed.wait_for_rank_0()
        seen.append(done.exists())
    return seen


def test_ranks_wait_for_rank_0(on_ranks: OnRanks, tmp_path: Path) -> None:
    assert on_ranks(3, comes_after_rank_0, tmp_path) == [[True] * 20] * 3


def with_a_secret_of_its_own(distributed: Distributed) -> str:
    env = {"HPC_DET_SECRET": f"of rank {distributed.rank}"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankZero, "await_all", partialmethod(RankZero.await_all, limit_s=0.5))
        with pytest.raises((UsageError, RankGone)) as error:
            open_messages(distributed.rank, distributed.size, distributed.nodes, env)
    return f"{type(error.value).__name__}: {error.value}"


def test_ranks_that_share_no_secret_are_told_so(on_ranks: OnRanks) -> None:
    zero, one = on_ranks(2, with_a_secret_of_its_own)
    assert unnamed(zero, "RankGone", "rank 1", "rank 0 at 127.0.0.1") == []
    assert unnamed(one, "UsageError", "rank 1", "rank 0", "secret") == []


@pytest.mark.integration
def test_rank_0_waits_for_some_ranks_and_sends_to_some() -> None:
    with connected(4) as ranks:
        ranks[2].to_rank_0("kind", "two")
        ranks[0].to_rank_0("kind", "zero")
        assert ranks[0].from_all("kind", "sent it", limit_s=DEADLINE_S, ranks=[0, 2]) == ["zero", "two"]
        ranks[0].to_ranks([0, 2], "answer", 1)
        ranks[0].to_all("end", None)
        for each in ranks:
            each.from_rank_0("end", "sent it", limit_s=DEADLINE_S, is_it=lambda value: True)
            assert each.arrivals("answer") == (each.rank in (0, 2))
