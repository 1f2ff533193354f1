from __future__ import annotations

import random
import threading
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_det.distributed.collectives import Distributed
from hpc_det.distributed.gang_messages import GangMessages, RankGone
from hpc_det.distributed.preempt import StopAgreement, give_notice
from tests.distributed.connected import connected
from tests.distributed.ranks import OnRanks
from tests.facts import refused
from tests.wait import DEADLINE_S, wait_for

LONGEST = 20_000
"""Ticks within which a gang always stops after a request."""

Step = Callable[[int, int, StopAgreement], bool]
"""(rank, tick, agreement) -> whether to stop: one call of should_stop."""


class Gang:
    """Ranks as threads, each at its own speed; no rank is more than one tick ahead of another, as with DDP."""

    def __init__(self, messages: list[GangMessages], seed: int) -> None:
        size = len(messages)
        self.agreements = [StopAgreement(each) for each in messages]
        self.stopped_at: list[int | None] = [None] * size
        self._pace = [random.Random(f"{seed} {rank}") for rank in range(size)]
        self._lockstep = threading.Barrier(size, timeout=DEADLINE_S)

    def close(self) -> None:
        for agreement in self.agreements:
            agreement.close()

    def run(self, step: Step) -> list[int | None]:
        """Return the tick at which each rank left; None for a rank that did not leave."""
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


@contextmanager
def gang_of(size: int, seed: int) -> Iterator[tuple[Gang, list[GangMessages]]]:
    with connected(size) as messages, closing(Gang(messages, seed)) as gang:
        yield gang, messages


@contextmanager
def agreements(size: int) -> Iterator[tuple[list[StopAgreement], list[GangMessages]]]:
    with gang_of(size, 0) as (gang, messages):
        yield gang.agreements, messages


@pytest.mark.integration
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
    with gang_of(size, seed) as (gang, messages):

        def step(rank: int, tick: int, agreement: StopAgreement) -> bool:
            if (rank, tick) in notices or tick == 12:
                give_notice(messages[rank])
            return agreement.should_stop()

        stopped_at = gang.run(step)
        assert stopped_at[0] is not None
        assert stopped_at == [stopped_at[0]] * size
        assert all(agreement.stopped for agreement in gang.agreements)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_notice_before_the_first_tick_is_not_lost(size: int) -> None:
    with gang_of(size, seed=size) as (gang, messages):
        give_notice(messages[-1])
        assert len(set(gang.run(ask))) == 1
        assert gang.stopped_at[0] is not None


def test_every_rank_comes_to_know_that_a_stop_is_on_its_way() -> None:
    with agreements(3) as (ranks, messages):
        assert not any(agreement.noticed for agreement in ranks)
        give_notice(messages[2])
        wait_for(lambda: all(agreement._settled for agreement in ranks))
        assert all(agreement.noticed for agreement in ranks)


def test_a_tick_that_never_comes_is_no_stop() -> None:
    """The last batch is done when the ranks agree on a later tick: training has finished and was not stopped."""
    with agreements(1) as ([agreement], [messages]):
        assert not agreement.should_stop()
        give_notice(messages)
        wait_for(lambda: agreement._settled)
        assert not agreement.stopped
        assert [agreement.should_stop() for _ in range(2)][-1]
        assert agreement.stopped


def test_nobody_stops_without_notice() -> None:
    with agreements(1) as ([agreement], _):
        assert not any(agreement.should_stop() for _ in range(1000))


def test_a_step_without_notice_costs_next_to_nothing() -> None:
    with agreements(1) as ([agreement], _):
        took_s = min(timeit.repeat(agreement.should_stop, timer=time.thread_time, number=20_000, repeat=5))
    cost_us = took_s / 20_000 * 1e6
    print(f"should_stop: {cost_us:.3f} us")
    assert cost_us < 5


def test_two_agreements_over_the_same_messages_are_two() -> None:
    with connected(2) as messages:
        first, second = ([StopAgreement(each, name) for each in messages] for name in ("first", "second"))
        give_notice(messages[1], "first")
        wait_for(lambda: all(agreement._settled for agreement in first))
        assert not any(agreement.noticed for agreement in second)
        for agreement in (*first, *second):
            agreement.close()
        assert not any(each._values for each in messages), "nothing is left behind"


def until_stopped(agreement: StopAgreement) -> None:
    while not agreement.should_stop():
        pass


def test_a_rank_that_is_gone_ends_the_agreement_on_every_other_and_is_named() -> None:
    with agreements(3) as (ranks, messages):
        messages[2].close()
        give_notice(messages[1])
        for agreement in ranks[:2]:
            with refused(RankGone, "rank 2"):
                until_stopped(agreement)


def test_rank_0_that_is_gone_ends_the_agreement() -> None:
    with agreements(2) as ([_, one], messages):
        one._stop_at = 1  # a proposal whose confirmation does not come
        messages[0].close()
        with refused(RankGone, "rank 0"):
            one.should_stop()


def stop_of_processes(distributed: Distributed, notice_by: int, notice_at: int) -> int:
    """Return the tick at which this rank left. Every step has a collective, as the exchange of gradients is one."""
    agreement = StopAgreement(distributed.messages)
    for tick in range(1, LONGEST):
        if tick == notice_at and distributed.rank == notice_by:
            give_notice(distributed.messages)
        if agreement.should_stop():
            return tick
        distributed.barrier()
    return -1


@pytest.mark.parametrize(("notice_by", "notice_at"), [(0, 1), (1, 5)])
def test_processes_stop_at_the_same_tick(on_ranks: OnRanks, notice_by: int, notice_at: int) -> None:
    first, second = on_ranks(2, stop_of_processes, notice_by, notice_at)
    assert first == second >= notice_at


def closes(distributed: Distributed) -> tuple[bool, bool]:
    """Return whether a rank counts as stopped at the end of training, and whether its thread still runs."""
    agreement = StopAgreement(distributed.messages)
    for _ in range(5):
        agreement.should_stop()
    agreement.close()
    return agreement.stopped, any(thread.name == "stop-agreement" for thread in threading.enumerate())


def test_after_the_end_no_rank_has_stopped_and_no_thread_waits(on_ranks: OnRanks) -> None:
    assert on_ranks(3, closes) == [(False, False)] * 3


# --- the listener; in a process of its own, since signals belong to a whole process
