"""hpc-det experiment logs: selection and format of lines."""

from __future__ import annotations

import csv
import io
import json
import os
import resource
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest

from hpc_det.requeue import Action, Cause
from hpc_det.schedulers.scheduler import JobState
from hpc_det.store.folders import TrialFolder
from tests.cli.conftest import Command
from tests.cli.experiment.test_wait import after, lines_of
from tests.cli.life import FakeScheduler, Life, random_search
from tests.facts import unnamed
from tests.view.logs.test_log_file import write

NOON = datetime(2026, 11, 20, 12).astimezone().timestamp()


def prints(trial: TrialFolder, rank: int, text: str, time: float) -> None:
    write(trial.rank_log(1, rank), text, time)


@pytest.fixture
def life(life: Life) -> Life:
    """Return an experiment whose two ranks have printed in turns from noon on, a line per second."""
    life.begins()
    write(life.trial.job_log, "", NOON)
    for number in range(4):
        prints(life.trial, number % 2, f"line {number}\n", NOON + number)
    return life


ALL = [
    "---------- attempt 1 ----------",
    "hpc-det: 10:00:01 attempt 1 begins",
    "[rank=0] line 0",
    "[rank=1] line 1",
    "[rank=0] line 2",
    "[rank=1] line 3",
]


def test_lines_of_ranks_are_merged_by_time(hpc_det: Command, life: Life) -> None:
    assert lines_of(hpc_det("e", "logs", "1")) == ALL


def test_the_border_of_an_attempt_tells_when_and_where_it_was_and_how_it_ended(hpc_det: Command, life: Life) -> None:
    begun, *_ = hpc_det("e", "logs", "1").out.splitlines()
    assert begun.startswith("---------- attempt 1 on ")
    assert " since " in begun
    life.ends(Cause.PREEMPTED, Action.REQUEUE, steps=120)
    ended, *_ = hpc_det("e", "logs", "1").out.splitlines()
    assert not unnamed(ended, "preempted at batch 120")


@pytest.mark.parametrize("count", [0, 1, 3, 9])
def test_the_first_and_the_last_lines(hpc_det: Command, life: Life, count: int) -> None:
    border, *lines = ALL
    shown = [border] if count else []
    assert lines_of(hpc_det("e", "logs", "1", "--head", count)) == shown + lines[:count]
    assert lines_of(hpc_det("e", "logs", "1", "--tail", count)) == shown + lines[max(len(lines) - count, 0) :]


def test_head_and_tail_exclude_each_other(hpc_det: Command, life: Life) -> None:
    result = hpc_det("e", "logs", "1", "--head", 2, "--tail", 3)
    assert result.fails(2, "--head", "--tail")


def test_the_rank_may_be_spelled_as_determined_does(hpc_det: Command, life: Life) -> None:
    assert hpc_det("t", "logs", "1/1", "--rank-id", 1) == hpc_det("t", "logs", "1/1", "--rank", 1)
    assert lines_of(hpc_det("t", "logs", "1/1", "--rank-id", 1))[1:] == ["[rank=1] line 1", "[rank=1] line 3"]


def test_lines_of_a_level_or_above(hpc_det: Command, life: Life) -> None:
    prints(life.trial, 1, "WARNING:root:slow\n", NOON + 9)
    prints(life.trial, 0, "Traceback (most recent call last):\n  File ...\nValueError: x\n", NOON + 10)
    _, *lines = hpc_det("e", "logs", "1", "--level", "warning").out.splitlines()
    assert lines == [
        "[rank=1] WARNING:root:slow",
        "[rank=0] Traceback (most recent call last):",
        "[rank=0]   File ...",
        "[rank=0] ValueError: x",
    ]
    assert hpc_det("e", "logs", "1", "--level", "CRITICAL").out == ""


@pytest.mark.parametrize("since", ["2026-11-20T12:00:02", datetime.fromtimestamp(NOON + 2).astimezone().isoformat()])
def test_lines_since_a_moment(hpc_det: Command, life: Life, since: str) -> None:
    assert lines_of(hpc_det("e", "logs", "1", "--since", since))[1:] == ["[rank=0] line 2", "[rank=1] line 3"]


def test_lines_of_the_last_minutes(hpc_det: Command, life: Life) -> None:
    prints(life.trial, 0, "two hours ago\n", time.time() - 7200)
    prints(life.trial, 0, "a minute ago\n", time.time() - 60)
    assert lines_of(hpc_det("e", "logs", "1", "--since", "10m"))[1:] == ["[rank=0] a minute ago"]
    assert len(lines_of(hpc_det("e", "logs", "1", "--since", "1d"))[1:]) == 2


@pytest.mark.parametrize("since", ["yesterday", "10", "10y", "", "2026-13-01", "-1h"])
def test_what_is_not_a_time_is_refused_with_examples(hpc_det: Command, life: Life, since: str) -> None:
    result = hpc_det("e", "logs", "1", f"--since={since}")
    assert result.fails(2, "--since", repr(since), "2026-11-20T10:00", "10m, 2h or 1d")


def test_each_line_with_its_time(hpc_det: Command, life: Life) -> None:
    lines = hpc_det("e", "logs", "1", "-T", "--rank", 1).out.splitlines()
    assert lines[0].startswith("2026-11-20 12:00:01 ---------- attempt 1 on ")
    assert lines[1:] == ["2026-11-20 12:00:01 [rank=1] line 1", "2026-11-20 12:00:03 [rank=1] line 3"]


def test_for_programs_each_line_is_a_record(hpc_det: Command, life: Life) -> None:
    write(life.trial.job_log, "[rank=1] WARNING:root:slow\n", NOON + 9)
    records = [json.loads(line) for line in hpc_det("e", "logs", "1", "--json", "--tail", 2).out.splitlines()]
    assert [datetime.fromisoformat(record.pop("time")).timestamp() for record in records] == [NOON + 3, NOON + 9]
    who = {"trial": 1, "attempt": 1, "rank": 1, "job": None}
    assert records == [
        {**who, "level": "INFO", "line": "line 3"},
        {**who, "level": "WARNING", "line": "WARNING:root:slow"},
    ]


def test_for_spreadsheets_each_line_is_a_row(hpc_det: Command, life: Life) -> None:
    prints(life.trial, 0, 'a "line", with commas\n', NOON + 9)
    life.job_prints("module loaded\n")
    rows = list(csv.DictReader(io.StringIO(hpc_det("e", "logs", "1", "--csv").out)))
    assert [(row["job"], row["rank"], row["line"]) for row in (rows[0], rows[-1])] == [
        ("1", "", "module loaded"),
        ("", "0", 'a "line", with commas'),
    ]


@pytest.mark.integration
def test_following_from_the_last_lines_on_loses_none_and_repeats_none(
    hpc_det: Command, life: Life, scheduler: FakeScheduler
) -> None:
    def goes_on() -> None:
        prints(life.trial, 0, "line 4\nno e", NOON + 4)
        prints(life.trial, 2, "late\n", NOON + 5)

    def ends() -> None:
        prints(life.trial, 0, "nd", NOON + 6)
        life.finishes()

    scheduler.states = [after(goes_on), JobState.RUNNING, after(ends)]
    result = hpc_det("e", "logs", "1", "--tail", 1, "-f")
    assert lines_of(result)[1:] == ["[rank=1] line 3", "[rank=0] line 4", "[rank=2] late", "[rank=0] no end"]
    assert result.err == "hpc-det: experiment 1: COMPLETED\n"


def test_following_the_first_lines_ends_with_them(hpc_det: Command, life: Life, scheduler: FakeScheduler) -> None:
    scheduler.states = [after(lambda: prints(life.trial, 0, "line 4\nline 5\n", NOON + 4))]
    result = hpc_det("e", "logs", "1", "--head", 6, "-f")
    assert (lines_of(result)[-1], result.err) == ("[rank=0] line 4", "")


def test_the_last_lines_of_several_trials_are_those_that_were_written_last(hpc_det: Command, root: Path) -> None:
    life = Life.submitted(root, workers=2, **random_search(2))
    for worker in range(2):
        life.begins(worker)
    for number in range(4):
        prints(life.folder.trial(number % 2 + 1), 0, f"line {number}\n", time.time() + 10 + number)
    life.job_prints("module loaded\n")
    answer = hpc_det("e", "logs", "1", "--tail", 3).out.splitlines()
    assert [line for line in answer if "attempt" not in line] == [
        "[trial=2] [rank=0] line 1",
        "[trial=1] [rank=0] line 2",
        "[trial=2] [rank=0] line 3",
    ]


def test_a_gang_may_have_more_ranks_than_files_may_be_open(hpc_det: Command, life: Life) -> None:
    _, most = limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    for rank in range(100):
        prints(life.trial, rank, "said by all\n", NOON + 10)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 50, most))
    try:
        answer = hpc_det("e", "logs", "1").out
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert answer.count("said by all") == 100


@pytest.mark.integration
def test_whoever_reads_no_further_gets_no_complaint(life: Life, root: Path) -> None:
    prints(life.trial, 0, "a long line\n" * 100_000, NOON + 9)
    command = [
        sys.executable,
        "-c",
        "import sys; from hpc_det.cli.main import main; sys.exit(main())",
        "e",
        "logs",
        "1",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_lines_that_a_level_left_keep_it_whatever_is_cut_off(hpc_det: Command, life: Life) -> None:
    life.begins()
    life.rank_prints(0, "epoch 1\nTraceback (most recent call last):\n  File x\nValueError: no\n")
    answer = hpc_det("e", "logs", "1", "--level", "error", "--tail", 2, "--json").out.splitlines()
    records = [json.loads(line) for line in answer]
    assert [(record["level"], record["line"]) for record in records] == [
        ("ERROR", "  File x"),
        ("ERROR", "ValueError: no"),
    ]
