"""The times at which rank 0 saves, for a gang of one rank and a clock that the test controls."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_det.checkpoint.committed import Committed
from hpc_det.checkpoint.save_schedule import LastSave, SaveSchedule
from hpc_det.checkpoint.seals import FileEntry
from hpc_det.distributed.collectives import Distributed
from hpc_det.plan.checkpoint_interval import UNKNOWN_MEAN_TIME_S, UNMEASURED_STALL_S, best_interval_s
from hpc_det.requeue import Action, AttemptEnd, Cause, Decision
from hpc_det.store.folders import TrialFolder
from hpc_det.store.journal import Journal
from hpc_det.store.save_times import read_each_save, write_save
from tests.checkpoint.saved import save
from tests.facts import unnamed

GUESSED_S = best_interval_s(UNMEASURED_STALL_S, UNKNOWN_MEAN_TIME_S)


class Training:
    """A training in which batches and saves take as long as the test specifies."""

    def __init__(self, path: Path, steps: int = 0, **settings: Any) -> None:
        path.mkdir(exist_ok=True)
        self.now, self.steps, self.looks = 1e9, steps, 0
        self.saves: list[int] = []
        self.folder = TrialFolder(path)
        self.pace = SaveSchedule(self.folder, Distributed(), clock=lambda: self.now, **settings)
        self.pace.begin(steps)

    def train(self, batches: int, batch_s: float, save_s: float = 1.0) -> None:
        """Train in steps that end at the next look of the schedule, as the loop does."""
        end = self.steps + batches
        while self.steps < end:
            count = int(min(end, self.pace.next_look)) - self.steps
            assert count > 0
            self.now += count * batch_s
            self.steps += count
            self.pace.trained(count, count * batch_s)
            self.looks += self.steps >= self.pace.next_look
            if self.pace.is_due(self.steps):
                self.save(save_s)

    def save(self, save_s: float) -> None:
        self.pace.save_begins()
        self.now += save_s
        self.pace.save_committed()
        self.pace.training_goes_on()
        self.pace.save_ends(self.steps, committed(self.steps, self.now))
        self.saves.append(self.steps)

    def last_save(self, left_s: float | None, *, in_flight: bool = False) -> LastSave:
        return self.pace.last_save(None if left_s is None else self.now + left_s, in_flight=in_flight)


def committed(steps: int, now: float) -> Committed:
    files = {"state_dict.pth": FileEntry(size=70, crc32=0), "progress.pth": FileEntry(size=7, crc32=0)}
    return Committed(path=Path("uuid"), steps=steps, time=now, files=files)


def test_each_save_is_measured_for_whoever_comes_later(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.train(10, batch_s=0.5)
    began = training.now
    training.save(3)
    training.save(5)
    assert read_each_save(training.folder.saves) == [
        save(took_s, took_s, batch_s=0.5, batches=10, began=at, size_bytes=77)
        for took_s, at in ((3, began), (5, began + 3))
    ]


def test_without_auto_nobody_ever_looks(tmp_path: Path) -> None:
    training = Training(tmp_path, grace_s=30)
    training.train(10_000, batch_s=10, save_s=1)
    training.save(29)
    assert (training.saves, training.looks, training.pace.next_look) == ([10_000], 0, math.inf)


@settings(max_examples=50, deadline=None)
@given(batch_s=st.floats(0.001, 30), save_s=st.floats(0.1, 60))
def test_auto_saves_as_often_as_costs_least(
    tmp_path_factory: pytest.TempPathFactory, batch_s: float, save_s: float
) -> None:
    training = Training(tmp_path_factory.mktemp("trial"), auto=True)
    training.train(math.ceil(GUESSED_S / batch_s) + 1, batch_s, save_s)
    interval_s = best_interval_s(save_s, UNKNOWN_MEAN_TIME_S)
    training.train(math.ceil(interval_s / batch_s) + 1, batch_s, save_s)
    first, second = training.saves[:2]
    assert 0 <= first * batch_s - GUESSED_S + 1e-3 <= batch_s + 2e-3
    assert 0 <= (second - first) * batch_s - interval_s + 1e-3 <= batch_s + 2e-3


def test_looks_are_rare(tmp_path: Path) -> None:
    training = Training(tmp_path, auto=True)
    training.train(1_000_000, batch_s=0.001)
    assert len(training.saves) == int(1000 / (GUESSED_S + 1))
    assert training.looks <= 25


def test_a_slow_first_batch_does_not_make_saves_more_frequent(tmp_path: Path) -> None:
    training = Training(tmp_path, auto=True)
    training.train(1, batch_s=60)
    training.train(100_000, batch_s=0.01)
    gaps = [later - earlier for earlier, later in zip(training.saves, training.saves[1:], strict=False)]
    assert min(gaps) * 0.01 >= 0.99 * GUESSED_S
    assert training.looks <= 60


def test_a_grace_time_that_turns_out_too_short_switches_it_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = Training(tmp_path, grace_s=30)
    training.save(31)
    assert training.pace.next_look == 1
    assert not capsys.readouterr().out, "nothing is due yet"
    training.train(2000, batch_s=1)
    assert len(training.saves) > 1
    assert unnamed(capsys.readouterr().out, "auto", "grace time", "30 s") == []


def test_a_grace_time_of_zero_switches_it_on_from_the_beginning(tmp_path: Path) -> None:
    assert Training(tmp_path, steps=7, grace_s=0).pace.next_look == 7 + 1


def test_work_that_an_earlier_attempt_lost_switches_it_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = Journal(TrialFolder(tmp_path).journal)
    journal.started(1, "7")
    journal.ended(1, AttemptEnd(cause=Cause.PREEMPTED, steps=0), Decision(Action.REQUEUE, "preempted"), None)
    training = Training(tmp_path)
    training.pace.leave_to_period()
    training.train(200, batch_s=1)
    assert training.saves
    assert unnamed(capsys.readouterr().out, "auto", "attempt") == []


def test_the_period_of_a_script_replaces_auto(tmp_path: Path) -> None:
    training = Training(tmp_path, auto=True)
    training.pace.leave_to_period()
    training.train(10_000, batch_s=1)
    assert not training.saves


# --- deadlines


def test_a_save_that_would_be_torn_is_left_out_where_a_checkpoint_is_near(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = Training(tmp_path)
    training.save(20)
    training.now += 60
    assert training.last_save(20) is LastSave.AFTER_THE_ONE_IN_FLIGHT
    assert training.last_save(19) is LastSave.NONE
    out = capsys.readouterr().out
    assert "stopping without a save: a save takes 20 s, and the job ends in 19 s; the checkpoint at 0 batches" in out
    assert "is 60 s old" in out


def test_a_save_is_tried_where_much_would_be_lost_or_nothing_is_known(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.save(20)
    assert training.last_save(None) is LastSave.AFTER_THE_ONE_IN_FLIGHT
    training.now += 2 * best_interval_s(20, UNKNOWN_MEAN_TIME_S)
    assert training.last_save(1) is LastSave.AFTER_THE_ONE_IN_FLIGHT


def test_a_first_save_is_always_tried(tmp_path: Path) -> None:
    write_save(TrialFolder(tmp_path).saves, save(20, 20))
    assert Training(tmp_path).last_save(-1e9) is LastSave.AFTER_THE_ONE_IN_FLIGHT
    assert Training(tmp_path, steps=3).last_save(0) is LastSave.NONE


@pytest.mark.parametrize(
    ("left_s", "expected"),
    [
        (35, LastSave.AFTER_THE_ONE_IN_FLIGHT),  # 15 s for the rest of the save in flight, and 20 s for the last one
        (34, LastSave.INSTEAD),
        (20, LastSave.INSTEAD),
        (19, LastSave.NONE),
    ],
)
def test_a_save_in_flight_is_finished_first_if_that_leaves_time_for_the_last_one(
    tmp_path: Path, left_s: float, expected: LastSave
) -> None:
    training = Training(tmp_path)
    training.save(20)
    training.pace.save_begins()
    training.now += 5
    assert training.last_save(left_s, in_flight=True) is expected


def test_a_save_behind_training_stalls_it_less_than_it_takes(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.pace.save_begins()
    training.now += 1
    training.pace.training_goes_on()
    training.now += 9
    training.pace.save_committed()
    training.pace.save_ends(1, committed(1, training.now))
    assert read_each_save(training.folder.saves) == [save(10, 1, began=1e9, batches=1, size_bytes=77, batch_s=None)]


def test_however_little_a_save_stalls_training_the_next_one_waits_until_it_is_committed(tmp_path: Path) -> None:
    write_save(TrialFolder(tmp_path).saves, save(1000, 1e-6))
    training = Training(tmp_path, auto=True)
    training.train(1500, batch_s=1)
    assert training.saves == [pytest.approx(1000, abs=2)]
