"""The logs of a trial merged by time: files as ranks write them, and times as agents record them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_det.store.folders import TrialFolder
from hpc_det.store.journal import Journal
from hpc_det.view.logs.merged import TrialLogs
from hpc_det.view.logs.selection import Wanted
from tests.view.logs.test_log_file import write


@pytest.fixture
def trial(tmp_path: Path) -> TrialFolder:
    return TrialFolder(tmp_path / "trials" / "7")


def begins(trial: TrialFolder, attempt: int, time: float) -> None:
    trial.logs.mkdir(parents=True, exist_ok=True)
    Journal(trial.journal).started(attempt, "4711")
    write(trial.job_log, f"hpc-det: 10:00:00 attempt {attempt} begins\n", time)


def lines_of(logs: TrialLogs, *, final: bool = False) -> list[str]:
    return [
        f"{passage.source.attempt}/{'job' if passage.source.rank is None else passage.source.rank}: {line}"
        for passage in logs.passages(final=final)
        for line in passage.lines
    ]


def read(trial: TrialFolder, **wanted: float | str) -> list[str]:
    return lines_of(TrialLogs(trial, Wanted(**wanted)), final=True)  # type: ignore[arg-type]


def test_lines_of_all_ranks_and_the_job_are_merged_by_time(trial: TrialFolder) -> None:
    begins(trial, 1, 10)
    for time in (11, 13, 15):
        write(trial.rank_log(1, 0), f"zero at {time}\n", time)
        write(trial.rank_log(1, 1), f"one at {time + 1}\n", time + 1)
    write(trial.job_log, "srun: a word\n", 13.5)
    assert read(trial)[1:] == [
        "1/0: zero at 11",
        "1/1: one at 12",
        "1/0: zero at 13",
        "1/job: srun: a word",
        "1/1: one at 14",
        "1/0: zero at 15",
        "1/1: one at 16",
    ]


def test_lines_of_the_same_moment_stay_together_and_come_by_rank(trial: TrialFolder) -> None:
    for rank in (10, 2):
        write(trial.rank_log(1, rank), "Traceback (most recent call last):\nValueError: x\n", 20)
    expected = [
        f"1/{rank}: {line}" for rank in (2, 10) for line in ("Traceback (most recent call last):", "ValueError: x")
    ]
    assert read(trial) == expected


def test_an_attempt_comes_after_the_one_before_whatever_its_times_say(trial: TrialFolder) -> None:
    begins(trial, 1, 10)
    write(trial.rank_log(1, 0), "late\n", 99)
    begins(trial, 2, 30)
    write(trial.rank_log(2, 0), "resumed\n", 31)
    assert [line for line in read(trial) if "job" not in line] == ["1/0: late", "2/0: resumed"]
    assert read(trial).index("1/0: late") < read(trial).index("2/job: hpc-det: 10:00:00 attempt 2 begins")


def test_logs_without_times_come_first_one_after_the_other(trial: TrialFolder) -> None:
    write(trial.rank_log(1, 1), "one\n", 20)
    write(trial.rank_log(1, 2), "two\n", 10, noted=False)
    write(trial.rank_log(1, 0), "zero\n", 30, noted=False)
    assert read(trial) == ["1/0: zero", "1/2: two", "1/1: one"]


def test_a_rank_whose_first_line_is_not_noted_yet_comes_after_what_was_said_before(trial: TrialFolder) -> None:
    write(trial.rank_log(1, 0), "zero\n", 10)
    write(trial.rank_log(1, 1), "one\n", 11, noted=False)
    assert lines_of(TrialLogs(trial, Wanted())) == ["1/0: zero", "1/1: one"]


def test_each_call_gives_what_is_new_and_logs_may_come_late(trial: TrialFolder) -> None:
    logs = TrialLogs(trial, Wanted())
    assert lines_of(logs) == []
    write(trial.rank_log(1, 0), "zero\nno e", 10)
    assert lines_of(logs) == ["1/0: zero"]
    write(trial.rank_log(1, 1), "one\n", 11)
    write(trial.rank_log(1, 0), "nd\n", 12)
    assert lines_of(logs) == ["1/0: no end", "1/1: one"]
    assert lines_of(logs, final=True) == []


def test_a_rank_that_was_killed_in_the_middle_of_a_line_is_heard_when_the_next_attempt_begins(
    trial: TrialFolder,
) -> None:
    logs = TrialLogs(trial, Wanted())
    write(trial.rank_log(1, 0), "last wo", 10)
    assert lines_of(logs) == []
    write(trial.rank_log(2, 0), "resumed\n", 20)
    assert lines_of(logs) == ["1/0: last wo", "2/0: resumed"]


def test_lines_of_one_rank_are_also_those_that_a_launcher_of_the_users_own_has_marked(trial: TrialFolder) -> None:
    begins(trial, 1, 10)
    write(trial.job_log, "[rank=1] marked\n[rank=11] eleven\n", 11)
    write(trial.rank_log(1, 1), "one\n", 12)
    write(trial.rank_log(1, 0), "zero\n", 13)
    assert read(trial, rank=1) == ["1/job: [rank=1] marked", "1/1: one"]


def test_lines_since_a_time(trial: TrialFolder) -> None:
    begins(trial, 1, 10)
    for time in (11, 21):
        write(trial.rank_log(1, 0), f"zero at {time}\n", time)
    write(trial.job_log, "a word\n", 22)
    assert read(trial, since=20) == ["1/0: zero at 21", "1/job: a word"]


def test_lines_from_a_level_on(trial: TrialFolder) -> None:
    write(trial.rank_log(1, 0), "INFO:root:a\nERROR:root:b\n  more\nDEBUG:root:c\n", 10)
    write(trial.rank_log(1, 1), "WARNING:root:d\n", 11)
    assert read(trial, level="WARNING") == ["1/0: ERROR:root:b", "1/0:   more", "1/1: WARNING:root:d"]
    assert read(trial, level="ERROR") == ["1/0: ERROR:root:b", "1/0:   more"]


def last(trial: TrialFolder, count: int, **wanted: float | str) -> list[str]:
    logs = TrialLogs(trial, Wanted(**wanted))  # type: ignore[arg-type]
    return [line for passage in logs.last(count, final=True) for line in passage.lines]


@pytest.fixture
def attempts(trial: TrialFolder) -> TrialFolder:
    """Write two attempts of two ranks, with lines numbered in the order of time."""
    for attempt in (1, 2):
        begins(trial, attempt, attempt * 100)
        for number in range(20):
            text = f"{'ERROR' if number % 5 == 0 else 'INFO'}:root:{attempt}.{number}\n"
            write(trial.rank_log(attempt, number % 2), text, attempt * 100 + number + 1)
        write(trial.job_log, f"hpc-det: 10:00:09 attempt {attempt} ended\n", attempt * 100 + 50)
    return trial


@pytest.mark.parametrize("count", [0, 1, 3, 22, 23, 30, 44, 50])
def test_the_last_lines_are_those_that_all_would_end_with(attempts: TrialFolder, count: int) -> None:
    everything = [line.partition(": ")[2] for line in read(attempts)]
    assert len(everything) == 44
    assert last(attempts, count) == everything[max(len(everything) - count, 0) :]


def test_the_last_lines_of_a_rank_or_a_level(attempts: TrialFolder) -> None:
    assert last(attempts, 2, rank=1) == ["INFO:root:2.17", "INFO:root:2.19"]
    assert last(attempts, 3, level="ERROR") == ["ERROR:root:2.5", "ERROR:root:2.10", "ERROR:root:2.15"]


def test_what_the_job_said_last_is_known_by_its_attempt(attempts: TrialFolder) -> None:
    assert [passage.source.attempt for passage in TrialLogs(attempts, Wanted()).last(24)] == [1] * 2 + [2] * 22


def test_after_the_last_lines_come_those_that_are_new(attempts: TrialFolder) -> None:
    logs = TrialLogs(attempts, Wanted())
    logs.last(1)
    write(attempts.rank_log(2, 1), "more\n", 260)
    assert lines_of(logs) == ["2/1: more"]
