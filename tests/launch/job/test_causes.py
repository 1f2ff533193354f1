"""Causes: whether an attempt had time to save a checkpoint, from its files; the lines that log policies match."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_det.launch.job.causes import SHORTEST_S, AttemptFacts, Match, matches
from hpc_det.launch.log_tail import LONGEST_LINE
from hpc_det.node.json_files import append_line, write_json
from hpc_det.requeue import Cause
from hpc_det.store.attempt import request_stop
from hpc_det.store.folders import ExperimentFolder, TrialFolder
from hpc_det.store.metrics import BEGINS
from tests.plan.plans import job_plan


@pytest.fixture
def trial(tmp_path: Path) -> TrialFolder:
    folder = ExperimentFolder(tmp_path / "experiments" / "12").trial()
    folder.path.mkdir(parents=True)
    return folder


def begins(trial: TrialFolder, ago_s: float, attempt: int = 2) -> TrialFolder:
    moment = time.time() - ago_s
    append_line(
        trial.metrics, {"kind": BEGINS, "trained": 0, "validated": 0, "attempt": attempt, "time": moment, "more": 1}
    )
    return trial


def reports(trial: TrialFolder, ago_s: float, attempt: int = 2) -> None:
    append_line(trial.metrics, {"kind": "training", "steps": 5, "attempt": attempt, "time": time.time() - ago_s})


def is_told_to_stop(trial: TrialFolder) -> TrialFolder:
    request_stop(trial.stop, attempt=2, reason="signal", source="a test")
    return trial


def leaves(trial: TrialFolder, *, saved: bool) -> TrialFolder:
    write_json(trial.outcome, {"attempt": 2, "kind": "stopped", "steps": 5, "saved": saved})
    return trial


LONG = 2 * SHORTEST_S


def was_too_short(trial: TrialFolder, *, late: bool) -> bool:
    plan = job_plan(entrypoint=("python3", "-m", "hpc_det.launch.direct", "--trial", "m:C"))
    return AttemptFacts(trial, plan, 2).was_too_short(Cause.PREEMPTED, late=late)


@pytest.mark.parametrize(
    ("happens", "expected"),
    [
        pytest.param(lambda trial: trial, True, id="training did not begin"),
        pytest.param(lambda trial: begins(trial, LONG, attempt=1), True, id="only an earlier one began"),
        pytest.param(lambda trial: begins(trial, 1), True, id="a stint of a second"),
        pytest.param(lambda trial: begins(trial, LONG), False, id="a long stint"),
        pytest.param(lambda trial: is_told_to_stop(begins(trial, LONG)), True, id="killed within the save"),
        pytest.param(
            lambda trial: leaves(is_told_to_stop(begins(trial, LONG)), saved=False),
            True,
            id="no time for a save",
        ),
        pytest.param(
            lambda trial: leaves(is_told_to_stop(begins(trial, LONG)), saved=True),
            False,
            id="all that was trained is saved",
        ),
    ],
)
def test_an_attempt_that_ends_now(trial: TrialFolder, happens: Callable[[TrialFolder], object], expected: bool) -> None:
    happens(trial)
    assert was_too_short(trial, late=False) is expected


def test_without_a_recorded_end_the_time_of_the_reports_counts(trial: TrialFolder) -> None:
    begins(trial, 2 * LONG)
    reports(trial, 2 * LONG - 5)
    assert was_too_short(trial, late=True)
    reports(trial, LONG / 2)
    assert not was_too_short(trial, late=True)


SCRIPT = ("python3", "-m", "hpc_det.launch.direct", "train.py")


@pytest.mark.parametrize(
    ("happens", "expected"),
    [
        pytest.param(lambda trial: trial, False, id="whether it saves is unknown"),
        pytest.param(lambda trial: begins(trial, LONG, attempt=1), True, id="only an earlier training began"),
        pytest.param(lambda trial: begins(trial, 1), True, id="a stint of a second"),
        pytest.param(lambda trial: begins(trial, LONG), False, id="a long stint"),
        pytest.param(lambda trial: leaves(is_told_to_stop(begins(trial, LONG)), saved=False), True, id="no time"),
        pytest.param(lambda trial: leaves(is_told_to_stop(begins(trial, LONG)), saved=True), False, id="saved"),
    ],
)
def test_an_attempt_of_a_script_is_judged_once_it_reports_its_training(
    trial: TrialFolder, happens: Callable[[TrialFolder], object], expected: bool
) -> None:
    happens(trial)
    assert AttemptFacts(trial, job_plan(entrypoint=SCRIPT), 2).was_too_short(Cause.PREEMPTED, late=False) is expected


def test_a_script_that_reports_its_training_has_finished_only_with_an_outcome(trial: TrialFolder) -> None:
    facts = AttemptFacts(trial, job_plan(entrypoint=SCRIPT), 2)
    assert facts.cause(0, None) is Cause.FINISHED
    begins(trial, 1)
    assert facts.cause(0, None) is Cause.FAILED
    write_json(trial.outcome, {"attempt": 2, "kind": "finished", "steps": 5, "saved": True})
    assert facts.cause(0, None) is Cause.FINISHED


OOM = {"name": "OOM", "pattern": "out of memory", "action": "cancel_retries"}
OFF = {"name": "ECC Error", "pattern": None, "action": None}
NAMELESS = {"name": None, "pattern": "^slow", "action": "exclude_node"}


def test_each_policy_reports_its_first_line_and_a_disabled_one_none(tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").write_text("ECC Error\nout of memory: 1\n")
    (tmp_path / "rank-1.log").write_bytes(b"\xff not UTF-8\nout of memory: 2\nslow disk\n")
    logs = {tmp_path / "rank-0.log": 0, tmp_path / "rank-1.log": 0}
    assert matches([OOM, OFF, NAMELESS], logs) == [
        Match("OOM", "out of memory: 1", "cancel_retries", tmp_path / "rank-0.log"),
        Match("^slow", "slow disk", "exclude_node", tmp_path / "rank-1.log"),
    ]


def test_what_was_written_before_the_attempt_is_not_read(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text("out of memory\n")
    assert matches([OOM], {log: log.stat().st_size}) == []


def test_of_a_long_line_the_beginning_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text("out of memory" + "!" * 10_000)
    (match,) = matches([OOM], {log: 0})
    assert match.line.startswith("out of memory!")
    assert len(match.line) == LONGEST_LINE
