from __future__ import annotations

import time
from pathlib import Path

import pytest

from hpc_det.node.json_files import write_json
from hpc_det.requeue import Action, AttemptEnd, Cause, Decision
from hpc_det.view.attempt_sentences import attempt_in_words
from hpc_det.view.trial_history import (
    AttemptHistory,
    Metrics,
    Validation,
    checkpoint_to_take,
    hosts_of,
    is_complete,
    read_attempts,
)
from tests.cli.life import Life
from tests.facts import golden, unnamed

ACCURACY = {"metric": "accuracy", "smaller_is_better": False}


@pytest.fixture
def life(tmp_path: Path) -> Life:
    return Life.submitted(tmp_path)


def metrics_of(life: Life) -> Metrics:
    return Metrics.read(life.trial, ACCURACY)


# --- attempts

TEN = time.mktime((2026, 11, 20, 10, 2, 11, 0, 0, -1))


ENDED: list[tuple[str, str, str, str | None, list[str]]] = [
    ("preempted", "requeue", "preempted", None, ["preempted", "batch 120"]),
    ("time limit", "requeue", "time limit", None, ["time", "batch 120"]),
    ("finished", "done", "finished", None, ["finished", "batch 120"]),
    ("cancelled", "done", "cancelled", None, ["cancelled", "batch 120"]),
    ("waiting", "wait", "waiting", None, ["waits", "batch 120"]),
    ("node lost", "requeue", "node lost", None, ["node", "batch 120"]),
    (
        "failed",
        "restart",
        "failure 1 of 5",
        "rank 1 on node1: ValueError",
        ["rank 1 on node1: ValueError", "failed", "batch 120", "failure 1 of 5"],
    ),
    (
        "failed",
        "give up",
        "too often",
        "rank 0 on node1: KeyError",
        ["rank 0 on node1: KeyError", "failed", "batch 120", "too often"],
    ),
]


def ended(cause: str, action: str, why: str, failure: str | None) -> str:
    """Return the sentence about a first attempt of 209 s on node1."""
    attempt = AttemptHistory(
        number=1,
        job_id="4711",
        worker=0,
        host="node1",
        started=TEN,
        ended=TEN + 209,
        cause=cause,
        batches=120,
        action=action,
        why=why,
        failure=failure,
    )
    return attempt_in_words(attempt, TEN + 300, is_over=False)


@pytest.mark.parametrize(("cause", "action", "why", "failure", "facts"), ENDED)
def test_an_ended_attempt_in_words(cause: str, action: str, why: str, failure: str | None, facts: list[str]) -> None:
    text = ended(cause, action, why, failure)
    assert not unnamed(text, "attempt 1", "node1", "10:02:11", "10:05:40", *facts)


def test_the_words_for_an_ended_attempt() -> None:
    assert [ended(cause, action, why, failure) for cause, action, why, failure, _ in ENDED] == golden(
        __file__, "attempts.txt"
    )


def test_an_open_attempt_in_words() -> None:
    attempt = AttemptHistory(number=2, job_id="4711", worker=0, host="node1", started=TEN)
    assert not unnamed(attempt_in_words(attempt, TEN, is_over=False), "attempt 2", "node1", "10:02:11")
    tomorrow = attempt_in_words(attempt, TEN + 86400, is_over=True)
    assert not unnamed(tomorrow, "attempt 2", "node1", "2026-11-20 10:02:11")


def test_attempts_carry_their_problems(life: Life) -> None:
    life.begins()
    life.ends(Cause.PREEMPTED, Action.REQUEUE, steps=120)
    life.journal.problem(1, "scontrol: refused")
    life.begins()
    first, second = read_attempts(life.trial)
    assert (first.cause, first.batches, first.problems) == ("preempted", 120, ["scontrol: refused"])
    assert (second.number, second.ended, second.problems) == (2, None, [])


def test_an_ended_attempt_has_all_its_nodes_and_an_older_journal_the_first(life: Life) -> None:
    life.begins()
    preempted = AttemptEnd(cause=Cause.PREEMPTED, steps=3)
    life.journal.ended(1, preempted, Decision(Action.REQUEUE, "preempted"), None, nodes=["node1", "node2"])
    first, *_ = read_attempts(life.trial)
    assert first.nodes == hosts_of(life.trial, first) == ["node1", "node2"]
    assert not unnamed(attempt_in_words(first, TEN, is_over=False), "on node1, node2 from")
    text = life.trial.journal.read_text()
    life.trial.journal.write_text(text.replace(', "nodes": ["node1", "node2"]', ""))
    (older,) = read_attempts(life.trial)
    assert (older.nodes, hosts_of(life.trial, older)) == ([], [older.host])


# --- metrics


def test_progress_is_the_newest_of_report_heartbeat_and_checkpoint(life: Life) -> None:
    def batches() -> int:
        return Metrics.read(life.trial, ACCURACY).batches

    life.begins()
    life.trains_from(0)
    life.reports("training", 100, {"loss": 0.5})
    assert batches() == 100
    write_json(life.trial.live_progress, {"attempt": 1, "batches": 153, "time": TEN})
    assert batches() == 153
    life.reports("training", 200, {"loss": 0.5})
    assert batches() == 200
    life.saves(221)
    life.ends(Cause.PREEMPTED, Action.REQUEUE, steps=221)
    assert batches() == 221
    life.begins()  # the file is that of the former attempt
    write_json(life.trial.live_progress, {"attempt": 1, "batches": 999, "time": TEN})
    assert batches() == 221
    life.trial.live_progress.write_text("{")
    assert batches() == 221


def test_the_saves_of_a_script_without_reports_are_no_batches(life: Life) -> None:
    life.begins()
    life.ends(Cause.PREEMPTED, Action.REQUEUE, steps=3)
    assert Metrics.read(life.trial, ACCURACY).batches == 0


def test_the_best_validation_is_the_searchers(tmp_path: Path) -> None:
    life = Life.submitted(tmp_path)
    life.begins()
    for steps, loss in ((100, "NaN"), (200, 0.5), (300, "-Infinity"), (400, 0.1)):
        life.reports("validation", steps, {"loss": loss})
    searcher = {"metric": "loss", "smaller_is_better": True}
    assert Metrics.read(life.trial, searcher).best == Validation("loss", "-Infinity", 300)


def test_nan_is_never_the_best(life: Life) -> None:
    life.begins()
    life.reports("validation", 100, {"accuracy": "NaN"})
    assert metrics_of(life).best is None
    life.reports("validation", 200, {"accuracy": 0.5})
    life.reports("validation", 300, {"accuracy": "NaN"})
    assert metrics_of(life).best == Validation("accuracy", 0.5, 200)


def test_metrics_so_far(life: Life) -> None:
    life.begins()
    life.reports("training", 100, {"loss": 2.0})
    life.reports("validation", 100, {"accuracy": 0.3})
    life.reports("training", 120, {"loss": 1.0})
    metrics = metrics_of(life)
    assert (metrics.batches, metrics.total) == (120, 400)
    assert (metrics.training, metrics.validation) == ({"loss": 1.0}, {"accuracy": 0.3})


def test_what_a_lost_stretch_had_reported_counts_no_more(life: Life) -> None:
    life.begins()
    for steps, accuracy in ((100, 0.3), (200, 0.9)):
        life.reports("training", steps, {"loss": 2.0 - steps / 100})
        life.reports("validation", steps, {"accuracy": accuracy})
    life.trains_from(100)
    metrics = metrics_of(life)
    assert (metrics.batches, metrics.best) == (100, Validation("accuracy", 0.3, 100))
    assert (metrics.training, metrics.validation) == ({"loss": 1.0}, {"accuracy": 0.3})
    life.reports("training", 150, {"loss": 0.5})
    assert metrics_of(life).training == {"loss": 0.5}


def test_a_torn_record_is_passed_over(life: Life) -> None:
    life.begins()
    life.reports("validation", 100, {"accuracy": 0.3})
    with life.trial.metrics.open("a") as torn:
        torn.write('{"kind": "training", "ste')
    assert metrics_of(life).batches == 100
    life.reports("training", 120, {"loss": 1.0})
    assert metrics_of(life).batches == 120


# --- checkpoints


def test_the_checkpoint_to_take_is_that_of_the_best_validation_or_the_newest(life: Life) -> None:
    life.begins()
    assert checkpoint_to_take(life.trial, None) is None
    older, newer = life.saves(100), life.saves(200)
    assert checkpoint_to_take(life.trial, Validation("accuracy", 1.0, 100)) == older
    assert checkpoint_to_take(life.trial, Validation("accuracy", 1.0, 150)) == newer
    assert checkpoint_to_take(life.trial, None) == newer


def test_a_cut_or_missing_file_makes_a_checkpoint_incomplete(life: Life) -> None:
    life.begins()
    whole, cut, bare = (life.saves(steps) for steps in (100, 200, 300))
    (cut.path / "state_dict.pth").write_bytes(b"wei")
    (bare.path / "state_dict.pth").unlink()
    assert [is_complete(checkpoint) for checkpoint in (whole, cut, bare)] == [True, False, False]
