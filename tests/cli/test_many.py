"""list, describe, logs, follow and kill for experiments with several trials."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from hpc_det.cli.experiment.follow import ManyTrials, follow
from hpc_det.errors import HpcDetError
from hpc_det.requeue import Action, Cause
from hpc_det.schedulers.scheduler import JobState
from hpc_det.search.method import Exit
from hpc_det.store.attempt import read_stop
from hpc_det.view.state import ExperimentState, ExperimentView
from tests.cli.conftest import Command
from tests.cli.experiment.test_wait import WAIT, after, lines_of
from tests.cli.life import FakeScheduler, Life, halving, random_search
from tests.facts import unnamed


@pytest.fixture
def life(root: Path) -> Life:
    """Return experiment 1: four trials, of which two are under way, one is paused and one has not begun."""
    life = Life.submitted(root, workers=2, **halving(4))
    life.begins(0)
    life.reports("validation", 100, {"accuracy": 0.91})
    life.saves(100)
    life.begins(1)
    life.reaches(0.91, worker=0)
    return life


# --- list and describe


def test_the_list_shows_trials_that_have_ended_and_the_best_one(
    hpc_det: Command, life: Life, scheduler: FakeScheduler
) -> None:
    life.ends(Cause.FAILED, Action.GIVE_UP, worker=1)
    row = hpc_det("e", "list").out.splitlines()[1]
    assert row.startswith("1   digits  RUNNING  1/4 trials, ")
    assert "accuracy 0.91 (trial 1)" in row
    (record,) = json.loads(hpc_det("e", "list", "--json").out)
    assert record["trials"] == {"expected": 4, "created": 4, "running": 2, "completed": 0, "failed": 1, "invalid": 0}
    assert (record["batches"], record["total_batches"]) == (None, None)
    assert record["best"] == {"metric": "accuracy", "value": 0.91, "batches": 100, "trial": 1}
    assert 0 < record["progress"] < 1


def test_a_list_reads_no_file_of_a_trial(
    hpc_det: Command, life: Life, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a trial was read")

    for read in ("trial_history.Metrics.read", "trial_history.Journal"):
        monkeypatch.setattr(f"hpc_det.view.{read}", refuse)
    assert "RUNNING  0/4 trials, " in hpc_det("e", "list").out


def test_nothing_runs_any_more_when_the_jobs_have_ended(hpc_det: Command, life: Life, scheduler: FakeScheduler) -> None:
    scheduler.states = [JobState.ENDED]
    (record,) = json.loads(hpc_det("e", "list", "--json").out)
    assert (record["state"], record["trials"]["running"]) == ("ERROR", 0)


def test_describe_shows_a_line_for_each_trial(hpc_det: Command, life: Life, scheduler: FakeScheduler) -> None:
    checkpoint = life.trial.checkpoints / life.saves(100).uuid
    answer = hpc_det("e", "describe", "1").out
    assert f"  Checkpoint: {checkpoint} (batch 100)\n" in answer
    assert "  State:      RUNNING\n" in answer
    assert "; 3 created, 2 running, 0 failed; best accuracy 0.91 in trial 1\n" in answer
    heading, *rows = answer.split("Trials:\n")[1].splitlines()
    assert heading.split() == ["ID", "STATE", "BATCHES", "LAST", "BEST", "lr", "WORKER", "JOB"]
    cells = [row.split() for row in rows]
    assert [row[:2] for row in cells] == [["1", "PAUSED"], ["2", "RUNNING"], ["3", "RUNNING"]]
    assert cells[0][2:5] == ["100/400", "0.91", "0.91"]
    assert [row[6:] for row in cells] == [["-", "4711_0"], ["1", "4711_1"], ["0", "4711_0"]]


def test_trials_with_invalid_hyperparameters_are_no_progress(
    hpc_det: Command, root: Path, scheduler: FakeScheduler
) -> None:
    life = Life.submitted(root, **random_search(2))
    life.begins()
    for _ in range(3):
        life.ends(Cause.FAILED, Action.GIVE_UP, why="for good", failure="too narrow", how=Exit.INVALID_HP)
    life.reaches(0.8)
    life.reaches(0.9)
    assert "COMPLETED  2/2 trials, 100%" in hpc_det("e", "list").out
    answer = hpc_det("e", "describe", "1").out
    assert "; 5 created, 0 running, 0 failed, 3 invalid; best" in answer
    assert [row.split()[1] for row in answer.split("Trials:\n")[1].splitlines()[1:4]] == ["INVALID"] * 3
    record = json.loads(hpc_det("e", "describe", "1", "--json").out)
    assert record["trial_counts"] == {
        "expected": 2, "created": 5, "running": 0, "completed": 2, "failed": 0, "invalid": 3,
    }  # fmt: skip
    summary = next(ManyTrials(ExperimentView(life.folder)).summary(ExperimentState.COMPLETED, 1.0))
    assert summary == "Experiment 1: COMPLETED with 5 trials in 1.0 s, 3 invalid"


def test_a_trial_that_ends_by_itself_shows_its_last_value_and_its_checkpoint_the_kept_one(
    hpc_det: Command, root: Path, scheduler: FakeScheduler
) -> None:
    life = Life.submitted(root, **halving(4))
    life.begins()
    life.reports("validation", 8, {"accuracy": 0.75})
    life.reports("validation", 12, {"accuracy": 0.5})
    life.saves(8)
    life.search.end(0, 1, Exit.COMPLETED, value=0.5, batches=12)
    view = ExperimentView(life.folder)
    assert [*ManyTrials(view).news()] == ["trial 1 at 12 batches: accuracy 0.5 (best), completed"]
    _, best, checkpoint = ManyTrials(view).summary(ExperimentState.COMPLETED, 1.0)
    assert best == "Best validation: accuracy 0.5 of trial 1 at 12 batches"
    assert checkpoint.endswith("(batch 8: accuracy 0.75)")
    record = json.loads(hpc_det("e", "list", "--json").out)
    assert record[0]["best"] == {"metric": "accuracy", "value": 0.5, "batches": 12, "trial": 1}


def test_describe_says_why_the_first_trials_failed(hpc_det: Command, root: Path, scheduler: FakeScheduler) -> None:
    life = Life.submitted(root, **random_search(8))
    life.begins()
    life.reaches(0.8)
    for trial in range(2, 9):
        life.ends(Cause.FAILED, Action.GIVE_UP, why="too often", failure=f"ValueError: {trial}")
    answer = hpc_det("e", "describe", "1").out
    assert "State:      COMPLETED\n" in answer
    assert answer.split("Failures:\n")[1].splitlines() == [
        *(f"  trial {trial}: ValueError: {trial} (too often)" for trial in range(2, 7)),
        "  and 2 more",
    ]


def test_describe_names_the_trials_of_a_common_cause_together(
    hpc_det: Command, root: Path, scheduler: FakeScheduler
) -> None:
    life = Life.submitted(root, **random_search(3))
    life.begins()
    for trial in range(1, 4):
        failure = f"rank {trial} on node1: ValueError: {'bad' if trial < 3 else 'worse'}"
        life.ends(Cause.FAILED, Action.GIVE_UP, why="too often", failure=failure)
    answer = hpc_det("e", "describe", "1").out
    assert "State:      ERROR: 3 of 3 trials failed\n" in answer
    assert answer.split("Failures:\n")[1].split("\n\n")[0].splitlines() == [
        "  trials 1, 2: rank 1 on node1: ValueError: bad (too often)",
        "  trial 3: rank 3 on node1: ValueError: worse (too often)",
    ]


def test_describe_as_json_has_a_record_for_each_trial(hpc_det: Command, life: Life, scheduler: FakeScheduler) -> None:
    record = json.loads(hpc_det("e", "describe", "1", "--json").out)
    assert record["trial_counts"]["running"] == 2
    assert (record["job_ids"], record["batches"], record["attempts"]) == (["4711"], None, [])
    paused, running, _ = record["trials"]
    assert (paused["id"], paused["state"], paused["worker"], paused["batches"]) == (1, "PAUSED", None, 100)
    assert paused["hyperparameters"]["width"] == 64
    assert paused["hyperparameters"]["lr"] != running["hyperparameters"]["lr"]
    assert paused["seed"] == life.search.sample(1).seed
    assert [attempt["cause"] for attempt in paused["attempts"]] == ["waiting"]


def test_a_trial_is_described_by_itself(hpc_det: Command, life: Life, scheduler: FakeScheduler) -> None:
    answer = hpc_det("t", "describe", "1/1").out
    assert answer.startswith("Trial 1/1\n  State:      PAUSED\n  Progress:   100 of 400 batches\n")
    assert f"  Seed:       {life.search.sample(1).seed}\n" in answer
    assert "waits for the searcher at batch 100\n" in answer
    assert "best validation: accuracy 0.91 at batch 100\n" in answer
    assert json.loads(hpc_det("trial", "describe", "1/1", "--json").out)["state"] == "PAUSED"


@pytest.mark.parametrize(
    ("trial", "facts"),
    [
        ("1/9", ["experiment 1", "trial 9", "1 to 3"]),
        ("7/1", ["experiment 7"]),
    ],
)
def test_a_trial_that_is_not_there(hpc_det: Command, life: Life, trial: str, facts: list[str]) -> None:
    for command in ("describe", "logs"):
        assert hpc_det("trial", command, trial).fails(2, *facts)


@pytest.mark.parametrize(
    ("trial", "example"), [("1", "1/1"), ("a/1", "12/7"), ("1/", "12/7"), ("/1", "12/7"), ("1/2/3", "12/7")]
)
def test_a_word_that_names_no_trial(hpc_det: Command, life: Life, trial: str, example: str) -> None:
    assert not unnamed(hpc_det("trial", "describe", trial).err, "EXPERIMENT/TRIAL", example)


# --- logs


def test_logs_name_the_trial_of_each_line(hpc_det: Command, life: Life) -> None:
    life.job_prints("module loaded\n")
    life.rank_prints(1, "two\n", trial=2)
    assert lines_of(hpc_det("e", "logs", "1")) == [
        "[job=1] module loaded",
        "[trial=1] ---------- attempt 1 ----------",
        "[trial=1] hpc-det: 10:00:01 attempt 1 begins",
        "[trial=2] ---------- attempt 1 ----------",
        "[trial=2] hpc-det: 10:00:01 attempt 1 begins",
        "[trial=2] [rank=1] two",
        "[trial=3] ---------- attempt 1 ----------",
        "[trial=3] hpc-det: 10:00:01 attempt 1 begins",
    ]


def test_logs_of_one_trial(hpc_det: Command, life: Life) -> None:
    life.job_prints("module loaded\n")
    life.rank_prints(1, "two\n", trial=2)
    life.rank_prints(0, "zero\n", trial=2)
    answer = hpc_det("e", "logs", "1", "--trial", 2, "--rank", 1)
    assert lines_of(answer) == ["---------- attempt 1 ----------", "[rank=1] two"]
    assert hpc_det("trial", "logs", "1/2", "--rank", "1") == answer
    assert "attempt 1 begins" in hpc_det("trial", "logs", "1/2").out


def test_what_a_job_says_before_any_trial_is_shown(hpc_det: Command, root: Path) -> None:
    life = Life.submitted(root, workers=12, **random_search(12))
    life.job_prints("Lmod has detected an error\n", job="1-10")
    life.job_prints("disk quota exceeded\n", job="1-9")
    assert hpc_det("e", "logs", "1").out.splitlines() == [
        "[job=1-9] disk quota exceeded",
        "[job=1-10] Lmod has detected an error",
    ]


def test_following_the_logs_of_a_trial_ends_with_the_trial(
    hpc_det: Command, life: Life, scheduler: FakeScheduler
) -> None:
    def fails() -> None:
        life.rank_prints(0, "no end", trial=2)
        life.ends(Cause.FAILED, Action.GIVE_UP, worker=1)

    scheduler.states = [JobState.RUNNING, after(fails)]
    result = hpc_det("trial", "logs", "1/2", "--follow")
    assert result.out.endswith("[rank=0] no end\n")
    assert not unnamed(result.err, "trial 1/2", "ERROR")


# --- follow


@pytest.mark.integration
def test_following_a_search_tells_each_report(
    root: Path, scheduler: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    life = Life.submitted(root, **random_search(3))

    def trains() -> None:
        life.begins()
        life.reports("validation", 400, {"accuracy": 0.8})
        life.saves(400)
        life.reaches(0.8)
        life.ends(Cause.FAILED, Action.GIVE_UP, why="too often", failure="rank 1 on node1: ValueError: x")
        life.reaches(0.5)

    scheduler.states = [JobState.QUEUED, JobState.RUNNING, after(trains)]
    follow(life.folder)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:6] == [
        "experiment 1: QUEUED",
        "experiment 1: RUNNING",
        "trial 1 at 400 batches: accuracy 0.8 (best), completed",
        "trial 2 ended: failed: rank 1 on node1: ValueError: x (too often)",
        "trial 3 at 400 batches: accuracy 0.5, completed",
        "experiment 1: COMPLETED",
    ]
    assert re.fullmatch(r"Experiment 1: COMPLETED with 3 trials in [\d.]+ (ms|s), 1 failed", lines[6])
    assert lines[7] == "Best validation: accuracy 0.8 of trial 1 at 400 batches"
    assert lines[8].startswith(f"Checkpoint: {life.trial.checkpoints}/")
    assert lines[9:] == ["Next: hpc-det experiment describe 1"]


@pytest.mark.integration
def test_a_checkpoint_of_another_validation_than_the_best_report_says_which_it_is(
    root: Path, scheduler: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    life = Life.submitted(root, **random_search(2))

    def trains() -> None:
        life.begins()
        life.reports("validation", 100, {"accuracy": 0.9})
        life.saves(100)
        life.reports("validation", 400, {"accuracy": 0.8})
        life.saves(400)
        life.reaches(0.8)
        life.reaches(0.5)

    scheduler.states = [JobState.RUNNING, after(trains)]
    follow(life.folder)
    lines = capsys.readouterr().out.splitlines()
    best, checkpoint = lines[lines.index("experiment 1: COMPLETED") + 2 :][:2]
    assert unnamed(best, "accuracy 0.8", "trial 1", "400 batches") == []
    assert checkpoint.endswith("(batch 100: accuracy 0.9)")


def test_following_a_search_that_fails_says_of_whom(root: Path, scheduler: FakeScheduler) -> None:
    life = Life.submitted(root, **random_search(2))
    life.begins()
    for _ in range(2):
        life.ends(Cause.FAILED, Action.GIVE_UP, why="too often", failure="rank 1 on node1: ValueError: x")
    with pytest.raises(HpcDetError) as error:
        follow(life.folder)
    facts = ["experiment 1", "ERROR", "2 of 2 trials", "trial 1", "rank 1 on node1: ValueError: x", "too often"]
    assert not unnamed(error.value.problems[0], *facts)


def test_the_bar_shows_the_search_in_one_line(life: Life) -> None:
    bar = ManyTrials(ExperimentView(life.folder)).bar(ExperimentState.RUNNING)
    shown = io.StringIO()
    Console(file=shown, width=160).print(bar)
    assert "experiment 1 RUNNING" in shown.getvalue()
    assert "0/4 trials, 2 running, best accuracy 0.91 of trial 1 at 100 batches" in shown.getvalue()


# --- wait and kill


def test_wait_ends_when_all_trials_have(hpc_det: Command, root: Path, scheduler: FakeScheduler) -> None:
    life = Life.submitted(root, workers=2, **random_search(2))
    life.begins(0)
    life.begins(1)
    finishes = [after(lambda worker=worker: life.finishes(worker)) for worker in (0, 1)]  # type: ignore[misc]
    scheduler.states = [JobState.RUNNING, finishes[0], JobState.RUNNING, finishes[1]]
    assert hpc_det(*WAIT) == (0, "", "")


def test_kill_ends_every_trial_and_every_job(hpc_det: Command, life: Life, scheduler: FakeScheduler) -> None:
    life.search.ask(7, "5000")
    assert hpc_det("e", "kill", "1").succeeds("experiment 1")
    assert scheduler.cancelled == ["4711", "5000"]
    for trial in (2, 3, 4):
        request = read_stop(life.folder.trial(trial).stop, 1)
        assert request is not None
        assert request.reason == "kill"
    assert not life.folder.trial(1).stop.exists()
    assert life.search.state().present == {}
    (record,) = json.loads(hpc_det("e", "list", "--json").out)
    assert record["state"] == "CANCELED"


def test_kill_leaves_jobs_alone_that_have_ended(
    hpc_det: Command, life: Life, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    life.search.ask(7, "5000")
    life.search.lose(7, "5000")
    assert hpc_det("e", "kill", "1").code == 0
    assert scheduler.cancelled == ["4711"]


def test_an_experiment_without_a_good_trial_is_an_error(hpc_det: Command, root: Path, scheduler: FakeScheduler) -> None:
    life = Life.submitted(root, **random_search(1))
    life.begins()
    life.search.end(0, 1, Exit.FAILED)
    life.search.leave(0)
    assert hpc_det(*WAIT).code == 1
