from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from hpc_det.cli.experiment.follow import MetricsReader, OneTrial, Tail, follow
from hpc_det.errors import HpcDetError
from hpc_det.node.files import write_atomic
from hpc_det.requeue import Action, Cause
from hpc_det.schedulers.scheduler import JobState
from hpc_det.view.state import ExperimentState, ExperimentView
from hpc_det.view.trial_history import Metrics, Validation
from tests.cli.experiment.test_wait import after
from tests.cli.life import SINGLE, FakeScheduler, Life
from tests.facts import each_names, unnamed


def validates(life: Life, steps: int, accuracy: float) -> None:
    life.reports("training", steps, {"loss": 0.5})
    life.reports("validation", steps, {"accuracy": accuracy})


@pytest.mark.integration
def test_following_tells_states_validations_and_what_came_of_it(
    life: Life, scheduler: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    def trains() -> None:
        validates(life, 100, 0.8)
        validates(life, 200, 0.9)
        life.saves(200)
        validates(life, 400, 0.7)
        life.saves(400)

    scheduler.states = [JobState.QUEUED, after(life.begins), after(trains), after(life.finishes)]
    follow(life.folder)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:5] == [
        "experiment 1: QUEUED",
        "experiment 1: RUNNING",
        "batch 100 of 400: training: loss 0.5   validation: accuracy 0.8",
        "batch 200 of 400: training: loss 0.5   validation: accuracy 0.9",
        "batch 400 of 400: training: loss 0.5   validation: accuracy 0.7",
    ]
    assert lines[5] == "experiment 1: COMPLETED"
    assert lines[6].startswith("Experiment 1: COMPLETED after 400 batches in ")
    assert lines[7] == "Best validation: accuracy 0.9 at batch 200"
    assert lines[8].startswith(f"Checkpoint: {life.trial.checkpoints}/")
    assert lines[8].endswith("(batch 200)")
    assert lines[9:] == ["Next: hpc-det experiment describe 1"]


@pytest.mark.integration
def test_an_attempt_that_fails_is_named_with_its_cause_while_the_next_one_runs(
    life: Life, scheduler: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> None:
        life.begins()
        why = "failure 1; max_restarts is 5"
        life.ends(Cause.FAILED, Action.RESTART, why=why, failure="rank 1 on vm: ValueError: no padding token")

    scheduler.states = [JobState.QUEUED, after(fails), after(life.begins), after(life.finishes)]
    follow(life.folder)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("attempt ")]
    assert not unnamed(line, "attempt 1", "rank 1 on vm: ValueError: no padding token", "failure 1; max_restarts is 5")


def test_on_a_terminal_a_bar_comes_before_what_came_of_it(
    life: Life, scheduler: FakeScheduler, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    life.begins()
    validates(life, 400, 0.7)
    life.finishes()
    terminal = io.StringIO()
    shown = Console(file=terminal, force_terminal=True, color_system=None, width=90)
    monkeypatch.setattr("hpc_det.cli.experiment.follow.Console", lambda: shown)
    follow(life.folder)
    assert "experiment 1 COMPLETED" in terminal.getvalue()
    assert "400/400 batches" in terminal.getvalue()
    assert capsys.readouterr().out.startswith("Experiment 1: COMPLETED after 400 batches in ")


def test_following_a_failure_ends_with_its_sentence_and_the_logs(
    life: Life, scheduler: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    life.begins()
    life.ends(Cause.FAILED, Action.GIVE_UP, why="too often", failure="rank 1 on node1: ValueError: x")
    with pytest.raises(HpcDetError) as error:
        follow(life.folder)
    failure = ["experiment 1", "ERROR", "rank 1 on node1: ValueError: x", "too often"]
    each_names(error.value.problems, failure, ["`hpc-det experiment logs 1`"])
    assert "Next:" not in capsys.readouterr().out


def test_an_initial_validation_has_no_training_metrics(
    life: Life, scheduler: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    def validates_first() -> None:
        life.begins()
        life.reports("validation", 0, {"accuracy": 0.1})

    scheduler.states = [after(validates_first), after(life.finishes)]
    follow(life.folder)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["experiment 1: RUNNING", "batch 0 of 400: validation: accuracy 0.1"]


@pytest.mark.integration
def test_a_metric_that_no_validation_has_is_named_with_those_that_they_have(
    life: Life, scheduler: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    def trains() -> None:
        life.begins()
        life.reports("validation", 400, {"test_loss": 0.1})
        life.finishes()

    scheduler.states = [after(trains)]
    follow(life.folder)
    lines = capsys.readouterr().out.splitlines()
    assert [unnamed(line, "'accuracy'", "test_loss") for line in lines if line.startswith("Best")] == [[]]
    assert Metrics.read(life.trial, {"metric": "test_loss", "smaller_is_better": True}).lacking_metric is None


@pytest.mark.integration
def test_a_training_whose_metric_is_never_a_number_says_so(
    life: Life, scheduler: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    def trains() -> None:
        life.begins()
        life.reports("validation", 400, {"accuracy": "NaN"})
        life.finishes()

    scheduler.states = [after(trains)]
    follow(life.folder)
    lines = capsys.readouterr().out.splitlines()
    assert [unnamed(line, "'accuracy'", "NaN") for line in lines if line.startswith("Best")] == [[]]


@pytest.mark.integration
def test_following_lifts_a_hold(life: Life, scheduler: FakeScheduler, capsys: pytest.CaptureFixture[str]) -> None:
    scheduler.states = [JobState.HELD, after(life.begins), after(life.finishes)]
    follow(life.folder)
    assert scheduler.released == ["4711"]
    assert "released job 4711, it may start now" in capsys.readouterr().err


def test_an_interrupt_only_stops_the_following(
    life: Life, scheduler: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> JobState:
        raise KeyboardInterrupt

    scheduler.states = [interrupt]
    with pytest.raises(KeyboardInterrupt):
        follow(life.folder)
    out = capsys.readouterr().out
    assert not unnamed(out, "experiment 1")
    assert "hpc-det experiment logs 1 -f\n" in out
    assert "hpc-det experiment kill 1\n" in out
    assert scheduler.cancelled == []


def test_only_what_is_new_is_read(life: Life) -> None:
    life.begins()
    reader = MetricsReader(life.trial, SINGLE)
    assert reader.read() == []
    life.reports("training", 100, {"loss": 2.0})
    assert [record["steps"] for record in reader.read()] == [100]
    with life.trial.metrics.open("a") as torn:
        torn.write('{"kind": "tr')
    assert reader.read() == []
    life.reports("training", 200, {"loss": 1.0})
    assert [record["steps"] for record in reader.read()] == [200]
    assert reader.metrics.training == {"loss": 1.0}


def test_a_resumed_attempt_takes_back_what_a_lost_stretch_had_reported(life: Life) -> None:
    life.begins()
    validates(life, 100, 0.8)
    validates(life, 200, 0.9)
    reader = MetricsReader(life.trial, SINGLE)
    reader.read()
    life.ends(Cause.NODE_LOST, Action.REQUEUE)
    life.begins()
    life.trains_from(100)
    assert reader.read() == []
    assert reader.metrics.best == Validation("accuracy", 0.8, 100)
    validates(life, 200, 0.7)
    assert [(record["attempt"], record["steps"]) for record in reader.read()] == [(2, 200), (2, 200)]


def test_the_bar_shows_state_batches_and_metrics_as_they_are(life: Life) -> None:
    life.begins()
    life.reports("training", 120, {"[red]loss": 0.5})
    life.reports("validation", 120, {"accuracy": "NaN"})
    bar = OneTrial(ExperimentView(life.folder)).bar(ExperimentState.RUNNING)
    shown = io.StringIO()
    Console(file=shown, width=90).print(bar)
    assert "experiment 1 RUNNING" in shown.getvalue()
    assert "120/400 batches" in shown.getvalue()
    assert "training: [red]loss 0.5   validation: accuracy NaN" in shown.getvalue()


def test_each_call_gives_the_whole_lines_since_the_last(tmp_path: Path) -> None:
    file = tmp_path / "log"
    tail = Tail(file)
    assert list(tail.lines()) == []
    file.write_bytes(b"one\ntwo")
    assert list(tail.lines()) == ["one"]
    with file.open("ab") as more:
        more.write(b" and more\r\xff\nend")
    assert list(tail.lines()) == ["two and more\r\ufffd"]
    assert list(tail.lines()) == []


def test_a_replaced_or_cut_file_is_read_from_its_top(tmp_path: Path) -> None:
    file = tmp_path / "log"
    tail = Tail(file)
    write_atomic(file, "one\ntwo\n")
    assert list(tail.lines()) == ["one", "two"]
    write_atomic(file, "three\nfour\nfive\n")
    assert list(tail.lines()) == ["three", "four", "five"]
    file.write_text("six\n")
    assert list(tail.lines()) == ["six"]
