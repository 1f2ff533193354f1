"""Causes: whether an attempt had time to save a checkpoint, from its files; the lines that log policies match."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hpc_det.launch.job.causes import SHORTEST_S, AttemptFacts, Match, matches
from hpc_det.launch.log_tail import LONGEST_LINE
from hpc_det.node.json_files import append_line, write_json
from hpc_det.requeue import Cause
from hpc_det.store.attempt import Failure, request_stop
from hpc_det.store.folders import ExperimentFolder, TrialFolder
from hpc_det.store.metrics import BEGINS
from tests.facts import unnamed
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


@pytest.mark.parametrize("pattern", [".*CUDA out of memory.*", ".*.*memory", "x*y|memory", r"\.*memory"])
def test_a_line_of_many_characters_is_matched_in_linear_time(tmp_path: Path, pattern: str) -> None:
    log = tmp_path / "job.log"
    log.write_text("x" * 200_000 + "\nCUDA out of memory\n")
    began = time.process_time()
    (match,) = matches([{**OOM, "pattern": pattern}], {log: 0})
    assert match.line == "CUDA out of memory"
    assert time.process_time() - began < 20  # minutes in quadratic time


@pytest.mark.parametrize("pattern", [".*?a", ".*+a", ".*{0}a", "(?i).*A", ".*a|b"])
def test_a_pattern_that_begins_with_any_text_matches_as_it_is_written(tmp_path: Path, pattern: str) -> None:
    with suppress(re.error):  # possessive quantifiers are new in Python 3.11
        re.compile(pattern)
        (tmp_path / "job.log").write_text("c\nca\n")
        assert [match.line for match in matches([{**OOM, "pattern": pattern}], {tmp_path / "job.log": 0})] == (
            ["ca"] if pattern != ".*+a" else []
        )


# --- what the output adds to a failure


def explained(trial: TrialFolder, output: str, *, host: str = "node2", **failure: Any) -> Failure:
    plan = job_plan(code=str(trial.path), environment=())
    noted = Failure(host=host, time=time.time(), **{"rank": 1, "message": "exit code 1", **failure})
    return AttemptFacts(trial, plan, 1).explained(noted, output)


@pytest.mark.parametrize(
    ("line", "is_permanent"),
    [
        ("ModuleNotFoundError: No module named 'no_such_module'", True),
        ("ModuleNotFoundError: No module named 'json'", False),
        ("python3: can't open file '/no/such/file.py': [Errno 2] No such file or directory", True),
        (f"python3: can't open file '{__file__}': [Errno 2] No such file or directory", False),
        ("SyntaxError: invalid syntax", True),
        ("ValueError: loss is nan", False),
    ],
)
def test_code_that_another_node_cannot_load_is_permanent_unless_this_node_has_it(
    trial: TrialFolder, line: str, is_permanent: bool
) -> None:
    assert explained(trial, "", printed=line).user_error is is_permanent
    is_of_the_code = not line.startswith("ValueError")
    assert explained(trial, "", printed=line, host=socket.gethostname()).user_error is is_of_the_code


@pytest.mark.parametrize("code", [-9, 137, 134])
def test_a_program_that_a_signal_has_ended_is_started_again_whatever_it_has_printed(
    trial: TrialFolder, code: int
) -> None:
    line, here = "ModuleNotFoundError: No module named 'no_such_module'", socket.gethostname()
    for rank in (1, None):
        assert not explained(trial, line, printed=line, host=here, rank=rank, code=code).user_error
        assert explained(trial, line, printed=line, host=here, rank=rank, code=1).user_error


def test_a_rank_that_a_signal_has_ended_counts_though_its_launcher_exits_with_1(trial: TrialFolder) -> None:
    line = "ModuleNotFoundError: No module named 'no_such_module'"
    report = "mpirun noticed that process rank 1 with PID 0 on node vm exited on signal 9 (Killed)."
    assert not explained(trial, report, printed=line, host=socket.gethostname(), rank=None, code=1).user_error


def test_code_that_has_been_loaded_before_is_tried_again(trial: TrialFolder) -> None:
    reports(begins(trial, LONG), 1)
    assert not explained(trial, "", printed="ModuleNotFoundError: No module named 'no_such_module'").user_error


def test_a_rank_without_a_cause_gets_that_of_the_log_and_the_schedulers_notice(trial: TrialFolder) -> None:
    trace = 'Traceback (most recent call last):\n  File "train.py", line 1, in <module>\nValueError: loss is nan\n'
    notice = "slurmstepd: error: Detected 1 oom_kill event in StepId=4.0.\n"
    found = explained(trial, trace + notice)
    assert unnamed(found.message, "exit code 1", "ValueError: loss is nan", trial.job_log, "Slurm", "oom_kill") == []
    clear = explained(trial, trace, message="KeyError: 'x'", traceback="...")
    assert (clear.message, clear.user_error) == ("KeyError: 'x'", False)
