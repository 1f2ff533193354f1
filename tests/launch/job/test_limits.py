from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_det.launch.job.limits import MARGIN_S, NOTICE_S, READ_EVERY_S, JobClock, ring_at
from hpc_det.store.save_times import SaveTimes, after_save, write_save
from tests.checkpoint.saved import save
from tests.plan.plans import job_plan

SECONDS = st.floats(0, 1e5)


def measured(longest_s: float, batch_s: float | None = None) -> SaveTimes:
    return after_save(None, save(longest_s, batch_s=batch_s))


@given(save_s=SECONDS, batch_s=SECONDS)
def test_a_save_as_long_as_the_longest_ends_before_the_deadline(save_s: float, batch_s: float) -> None:
    rung = ring_at(1e6, 90, measured(save_s, batch_s))
    assert rung + NOTICE_S + batch_s + save_s <= 1e6 - MARGIN_S + 1e-6


def test_an_unmeasured_save_is_taken_to_be_as_long_as_the_schedulers_own_lead() -> None:
    assert ring_at(1000, 90, None) == 1000 - MARGIN_S - 90


class Now:
    def __init__(self) -> None:
        self.s = 1000.0

    def __call__(self) -> float:
        return self.s


@pytest.fixture
def now() -> Now:
    return Now()


def clock(ends_at: float | None, saves: Path, now: Now) -> JobClock:
    return JobClock(ends_at, job_plan(signal_lead_s=90), saves, now)


def test_a_job_without_a_limit_is_never_told(tmp_path: Path, now: Now) -> None:
    endless = clock(None, tmp_path / "saves.jsonl", now)
    assert (endless.next_ring(), endless.timeout_s(), endless.rings()) == (None, None, False)


def test_it_rings_once_and_then_waits_for_ever(tmp_path: Path, now: Now) -> None:
    job = clock(1103, tmp_path / "saves.jsonl", now)
    assert (job.timeout_s(), job.rings()) == (3, False)
    now.s = 1003
    assert job.timeout_s() == 0
    assert [job.rings(), job.rings()] == [True, False]
    assert job.timeout_s() is None


def test_the_time_for_which_a_job_is_suspended_does_not_count(
    tmp_path: Path, now: Now, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "monotonic", now)
    job = clock(1600, tmp_path / "saves.jsonl", now)
    now.s += 1000 + READ_EVERY_S
    assert (job.rings(), job.ends_at) == (False, 2600)
    now.s += READ_EVERY_S
    assert (job.rings(), job.ends_at) == (False, 2600)


def test_a_longer_save_that_is_measured_on_the_way_makes_it_ring_earlier(tmp_path: Path, now: Now) -> None:
    saves = tmp_path / "saves.jsonl"
    job = clock(1600, saves, now)
    assert not job.rings()
    write_save(saves, save(400))
    assert job.rings()


def test_it_looks_now_and_then_although_the_end_is_far(tmp_path: Path, now: Now) -> None:
    assert clock(1e6, tmp_path / "saves.jsonl", now).timeout_s() == READ_EVERY_S


def test_only_term_begins_a_grace_time_that_somebody_knows() -> None:
    assert job_plan(grace_time_s=None).end_of_grace() is None
    assert job_plan(grace_time_s=30).end_of_grace("SIGUSR2") is None
    end = job_plan(grace_time_s=1000).end_of_grace()
    assert end is not None
    assert 0 < end - time.time() <= 1000
