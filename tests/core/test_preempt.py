from __future__ import annotations

import random
import threading
import time
import timeit
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

from hpc_det.core.distributed import Distributed
from hpc_det.core.preempt import StopAgreement, give_notice
from tests.core.ranks import OnRanks
from tests.wait import DEADLINE_S

LONGEST = 20_000
"""Ticks: a gang that was asked to stop is never this late."""

Step = Callable[[int, int, StopAgreement], bool]
"""(rank, tick, agreement) -> whether to stop: one call of should_stop."""


class Gang:
    """Ranks as threads on one store, each at its own speed, none more than a tick ahead of another, as with DDP."""

    def __init__(self, size: int, seed: int) -> None:
        self.store = HashStore()
        self.agreements = [StopAgreement(rank, size, self.store, "test") for rank in range(size)]
        self.stopped_at: list[int | None] = [None] * size
        self._pace = [random.Random(f"{seed} {rank}") for rank in range(size)]
        self._lockstep = threading.Barrier(size, timeout=DEADLINE_S)

    def notice(self) -> None:
        give_notice(self.store, "test")

    def run(self, step: Step) -> list[int | None]:
        """The tick at which each rank left; None for one that did not."""
        threads = [threading.Thread(target=self._train, args=(rank, step)) for rank in range(len(self.agreements))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), "deadlock"
        return self.stopped_at

    def _train(self, rank: int, step: Step) -> None:
        pace = self._pace[rank]
        for tick in range(1, LONGEST):
            time.sleep(pace.choice([0, 0, 0, 1e-5, 1e-4, 1e-3]))
            if step(rank, tick, self.agreements[rank]):
                self.stopped_at[rank] = tick
                return
            self._lockstep.wait()


def ask(rank: int, tick: int, agreement: StopAgreement) -> bool:
    return agreement.should_stop()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@settings(max_examples=150)
@given(
    size=st.integers(1, 5),
    notices=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 12)), min_size=1, max_size=3),
    seed=st.integers(0, 2**32),
)
def test_all_ranks_stop_at_the_same_tick_whenever_notice_is_given(
    size: int, notices: list[tuple[int, int]], seed: int
) -> None:
    gang = Gang(size, seed)

    def step(rank: int, tick: int, agreement: StopAgreement) -> bool:
        if (rank, tick) in notices or tick == 12:
            gang.notice()
        return agreement.should_stop()

    stopped_at = gang.run(step)
    assert stopped_at[0] is not None
    assert stopped_at == [stopped_at[0]] * size
    assert all(agreement.stopped for agreement in gang.agreements)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_notice_before_the_first_tick_is_not_lost(size: int) -> None:
    gang = Gang(size, seed=size)
    gang.notice()
    assert len(set(gang.run(ask))) == 1
    assert gang.stopped_at[0] is not None


def test_every_rank_comes_to_know_that_a_stop_is_on_its_way() -> None:
    store = HashStore()
    agreements = [StopAgreement(rank, 3, store, "test") for rank in range(3)]
    assert not any(agreement.noticed for agreement in agreements)
    give_notice(store, "test")
    store.wait(["test/verdict/0"])
    assert all(agreement.noticed for agreement in agreements)


def test_a_tick_that_never_comes_is_no_stop() -> None:
    """The last batch is done when the ranks agree on a later tick: training has finished and was not stopped."""
    store = HashStore()
    agreement = StopAgreement(0, 1, store, "test")
    assert not agreement.should_stop()
    give_notice(store, "test")
    store.wait(["test/verdict/0"])
    assert not agreement.stopped
    assert [agreement.should_stop() for _ in range(2)][-1]
    assert agreement.stopped


def test_nobody_stops_without_notice() -> None:
    store = HashStore()
    agreement = StopAgreement(0, 1, store, "test")
    assert not any(agreement.should_stop() for _ in range(1000))
    give_notice(store, "test")  # so that its thread ends


def test_a_step_without_notice_costs_next_to_nothing() -> None:
    store = HashStore()
    agreement = StopAgreement(0, 1, store, "test")
    took_s = min(timeit.repeat(agreement.should_stop, timer=time.thread_time, number=20_000, repeat=5))
    cost_us = took_s / 20_000 * 1e6
    print(f"should_stop: {cost_us:.3f} us")
    give_notice(store, "test")
    assert cost_us < 5


def stop_over_tcp(distributed: Distributed, notice_by: int, notice_at: int) -> int:
    """The tick at which this rank left; a collective in every step, as the gradients' own."""
    waiting, speaking = (distributed.side_store() for _ in range(2))
    agreement = StopAgreement(distributed.rank, distributed.size, waiting, "stop/secret")
    for tick in range(1, LONGEST):
        if tick == notice_at and distributed.rank == notice_by:
            give_notice(speaking, "stop/secret")
        if agreement.should_stop():
            return tick
        distributed.barrier()
    return -1


@pytest.mark.parametrize(("notice_by", "notice_at"), [(0, 1), (1, 5)])
def test_processes_on_a_tcp_store_stop_at_the_same_tick(on_ranks: OnRanks, notice_by: int, notice_at: int) -> None:
    first, second = on_ranks(2, stop_over_tcp, notice_by, notice_at)
    assert first == second >= notice_at


def closes(distributed: Distributed) -> tuple[bool, bool]:
    """Whether a rank at the end of training takes itself for stopped, and whether its thread still runs."""
    waiting, speaking = (distributed.side_store() for _ in range(2))
    agreement = StopAgreement(distributed.rank, distributed.size, waiting, "stop/secret")
    for _ in range(5):
        agreement.should_stop()
    give_notice(speaking, "stop/secret")
    agreement.close()
    return agreement.stopped, any(thread.name == "stop-agreement" for thread in threading.enumerate())


def test_after_the_end_no_rank_has_stopped_and_no_thread_waits(on_ranks: OnRanks) -> None:
    assert on_ranks(3, closes) == [(False, False)] * 3


# --- the listener; in a process of its own, since signals belong to a whole process
