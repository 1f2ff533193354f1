from __future__ import annotations

import time
from pathlib import Path

import pytest

from hpc_det.cli import story
from hpc_det.cli.story import AttemptStory, ExperimentState, Metrics, Validation
from hpc_det.launch.failure import failure_now, note_failure
from hpc_det.requeue import Action, Cause
from hpc_det.store.stop import request_stop
from hpc_det.submit.scheduler import JobState, JobStatus
from tests.cli.life import Life

QUEUED, RUNNING = ExperimentState.QUEUED, ExperimentState.RUNNING
COMPLETED, ERROR, CANCELED = ExperimentState.COMPLETED, ExperimentState.ERROR, ExperimentState.CANCELED


@pytest.fixture
def life(tmp_path: Path) -> Life:
    return Life.submitted(tmp_path)


def state(life: Life, job: JobState) -> ExperimentState:
    return story.state(life.trial, JobStatus(job))


@pytest.mark.parametrize(
    ("cause", "action", "expected"),
    [
        (Cause.FINISHED, Action.DONE, COMPLETED),
        (Cause.CANCELLED, Action.DONE, CANCELED),
        (Cause.FAILED, Action.GIVE_UP, ERROR),
        (Cause.PREEMPTED, Action.GIVE_UP, ERROR),
    ],
)
def test_the_verdict_stands_whatever_the_scheduler_says(
    life: Life, cause: Cause, action: Action, expected: ExperimentState
) -> None:
    life.begins()
    life.ends(cause, action)
    assert {state(life, job) for job in JobState} == {expected}
    assert story.settled(life.trial) is expected


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (JobState.QUEUED, QUEUED),
        (JobState.HELD, QUEUED),
        (JobState.RUNNING, RUNNING),
        (JobState.ENDED, ERROR),
        (JobState.UNKNOWN, QUEUED),
    ],
)
def test_a_preempted_experiment_is_where_the_scheduler_says(
    life: Life, job: JobState, expected: ExperimentState
) -> None:
    life.begins()
    life.ends(Cause.PREEMPTED, Action.REQUEUE, steps=120)
    assert state(life, job) is expected


def test_without_news_an_open_attempt_is_running(life: Life) -> None:
    assert state(life, JobState.UNKNOWN) is QUEUED
    life.begins()
    assert state(life, JobState.UNKNOWN) is RUNNING


def test_a_job_that_ended_without_a_word_is_an_error_with_the_first_failure(life: Life) -> None:
    assert story.why_not_completed(life.trial, ERROR) == "the job ended without a word, before its first attempt"
    life.begins()
    note_failure(life.trial, 1, failure_now(3, "OSError: disk\nfull"))
    assert state(life, JobState.ENDED) is ERROR
    why = story.why_not_completed(life.trial, ERROR)
    assert why.startswith("the job ended without a word: rank 3 on ")
    assert why.endswith("OSError: disk; full")


def test_a_job_that_could_not_go_back_into_the_queue_says_why(life: Life) -> None:
    life.begins()
    life.ends(Cause.PREEMPTED, Action.REQUEUE, steps=120)
    life.journal.problem(1, "scontrol: refused with exit code 1: disabled")
    assert state(life, JobState.ENDED) is ERROR
    assert story.why_not_completed(life.trial, ERROR) == "the job ended: scontrol: refused with exit code 1: disabled"


@pytest.mark.parametrize("reason", ["kill", "cancel"])
def test_a_job_that_was_told_to_end_is_canceled(life: Life, reason: str) -> None:
    request_stop(life.trial.stop, attempt=None, reason=reason, source="ada")  # type: ignore[arg-type]
    assert state(life, JobState.ENDED) is CANCELED
    assert story.why_not_completed(life.trial, CANCELED) == "cancelled by ada"


def test_a_signal_is_no_cancellation(life: Life) -> None:
    request_stop(life.trial.stop, attempt=1, reason="signal", source="TERM on node1")
    assert state(life, JobState.ENDED) is ERROR


def test_torn_files_are_no_error(life: Life) -> None:
    life.begins()
    for file in (life.trial.journal, life.trial.metrics):
        with file.open("a") as torn:
            torn.write('{"event": "end')
    life.trial.stop.write_text('{"attempt"')
    life.trial.job.write_text("")
    assert state(life, JobState.ENDED) is ERROR
    assert story.job(life.trial) is None
    assert Metrics.read(life.trial).batches == 0


def test_what_ended_a_failed_experiment_is_its_first_failure(life: Life) -> None:
    life.begins()
    life.ends(Cause.FAILED, Action.GIVE_UP, why="1 failures, max_restarts is 0", failure="rank 1 on node1: ValueError")
    assert story.why_not_completed(life.trial, ERROR) == "rank 1 on node1: ValueError (1 failures, max_restarts is 0)"


# --- attempts

TEN = time.mktime((2026, 11, 20, 10, 2, 11, 0, 0, -1))


@pytest.mark.parametrize(
    ("cause", "action", "why", "failure", "expected"),
    [
        ("preempted", "requeue", "preempted", None, "preempted at batch 120, back into the queue"),
        ("time limit", "requeue", "time limit", None, "out of time at batch 120, back into the queue"),
        ("finished", "done", "finished", None, "finished at batch 120"),
        ("cancelled", "done", "cancelled", None, "cancelled; newest checkpoint at batch 120"),
        (
            "node lost",
            "requeue",
            "node lost",
            None,
            "lost its node; newest checkpoint at batch 120, back into the queue",
        ),
        (
            "failed",
            "restart",
            "failure 1 of 5",
            "rank 1 on node1: ValueError",
            "rank 1 on node1: ValueError; failed; newest checkpoint at batch 120, started again (failure 1 of 5)",
        ),
        (
            "failed",
            "give up",
            "too often",
            "rank 0 on node1: KeyError",
            "rank 0 on node1: KeyError; failed; newest checkpoint at batch 120, given up (too often)",
        ),
    ],
)
def test_an_ended_attempt_in_words(cause: str, action: str, why: str, failure: str | None, expected: str) -> None:
    attempt = AttemptStory(
        number=1,
        host="node1",
        started=TEN,
        ended=TEN + 209,
        cause=cause,
        batches=120,
        action=action,
        why=why,
        failure=failure,
    )
    told = story.in_words(attempt, QUEUED, now=TEN + 300)
    assert told == f"attempt 1 on node1 from 10:02:11 to 10:05:40: {expected}"


def test_an_open_attempt_in_words() -> None:
    attempt = AttemptStory(number=2, host="node1", started=TEN)
    assert story.in_words(attempt, RUNNING, now=TEN) == "attempt 2 on node1 since 10:02:11"
    tomorrow = story.in_words(attempt, ERROR, now=TEN + 86400)
    assert tomorrow == "attempt 2 on node1 from 2026-11-20 10:02:11: its end was not written"


def test_attempts_carry_their_problems(life: Life) -> None:
    life.begins()
    life.ends(Cause.PREEMPTED, Action.REQUEUE, steps=120)
    life.journal.problem(1, "scontrol: refused")
    life.begins()
    first, second = story.attempts(life.trial)
    assert (first.cause, first.batches, first.problems) == ("preempted", 120, ["scontrol: refused"])
    assert (second.number, second.ended, second.problems) == (2, None, [])


# --- metrics


def test_the_best_validation_is_the_searchers(tmp_path: Path) -> None:
    life = Life.submitted(tmp_path, metric="loss", smaller_is_better=True)
    for steps, loss in ((100, "NaN"), (200, 0.5), (300, "-Infinity"), (400, 0.1)):
        life.reports("validation", steps, {"loss": loss})
    assert Metrics.read(life.trial).best == Validation("loss", "-Infinity", 300)


def test_nan_is_never_the_best(life: Life) -> None:
    life.reports("validation", 100, {"accuracy": "NaN"})
    assert Metrics.read(life.trial).best is None
    life.reports("validation", 200, {"accuracy": 0.5})
    life.reports("validation", 300, {"accuracy": "NaN"})
    assert Metrics.read(life.trial).best == Validation("accuracy", 0.5, 200)


def test_metrics_so_far(life: Life) -> None:
    life.reports("training", 100, {"loss": 2.0})
    life.reports("validation", 100, {"accuracy": 0.3})
    life.reports("training", 120, {"loss": 1.0})
    metrics = Metrics.read(life.trial)
    assert (metrics.batches, metrics.total) == (120, 400)
    assert (metrics.training, metrics.validation) == ({"loss": 1.0}, {"accuracy": 0.3})


def test_a_torn_record_is_passed_over(life: Life) -> None:
    life.reports("validation", 100, {"accuracy": 0.3})
    with life.trial.metrics.open("a") as torn:
        torn.write('{"kind": "training", "ste')
    assert Metrics.read(life.trial).batches == 100
    life.reports("training", 120, {"loss": 1.0})
    assert Metrics.read(life.trial).batches == 120


# --- checkpoints


def test_the_checkpoint_to_take_is_that_of_the_best_validation_or_the_newest(life: Life) -> None:
    assert story.checkpoint_to_take(life.trial, None) is None
    older, newer = life.saves(100), life.saves(200)
    assert story.checkpoint_to_take(life.trial, Validation("accuracy", 1.0, 100)) == older
    assert story.checkpoint_to_take(life.trial, Validation("accuracy", 1.0, 150)) == newer
    assert story.checkpoint_to_take(life.trial, None) == newer


def test_a_cut_or_missing_file_makes_a_checkpoint_incomplete(life: Life) -> None:
    whole, cut, bare = (life.saves(steps) for steps in (100, 200, 300))
    (cut.path / "state_dict.pth").write_bytes(b"wei")
    (bare.path / "state_dict.pth").unlink()
    assert [story.is_complete(checkpoint) for checkpoint in (whole, cut, bare)] == [True, False, False]
