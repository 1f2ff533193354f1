from __future__ import annotations

import socket
from pathlib import Path

import pytest

from hpc_det.requeue import Action, AttemptEnd, Cause, Decision
from hpc_det.store.journal import Journal

REQUEUE = Decision(Action.REQUEUE, "preempted")


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal.jsonl")


def test_a_new_journal_knows_nothing(journal: Journal) -> None:
    assert (journal.last_attempt(), journal.open_attempt(), journal.verdict()) == (0, None, None)
    assert journal.history() == []


def test_an_attempt_is_open_from_its_start_to_its_end(journal: Journal) -> None:
    journal.started(1, "4711")
    assert (journal.last_attempt(), journal.open_attempt()) == (1, 1)
    journal.ended(1, AttemptEnd(cause=Cause.PREEMPTED, steps=120), REQUEUE, None)
    assert (journal.last_attempt(), journal.open_attempt()) == (1, None)
    journal.started(2, "4711")
    assert (journal.last_attempt(), journal.open_attempt()) == (2, 2)


def test_the_history_reads_back_as_it_was_written(journal: Journal) -> None:
    written = [
        AttemptEnd(cause=Cause.PREEMPTED, steps=120),
        AttemptEnd(cause=Cause.FAILED, steps=120, user_error=True, failure="rank 1 on node1: ValueError: no"),
        AttemptEnd(cause=Cause.TIME_LIMIT, steps=300),
    ]
    for number, end in enumerate(written, start=1):
        journal.started(number, "4711")
        journal.ended(number, end, REQUEUE, end.failure or None)
    assert journal.history() == written


def test_the_verdict_is_the_last_end_even_while_the_next_attempt_runs(journal: Journal) -> None:
    journal.started(1, "4711")
    failure = "rank 1 on node1: ValueError: no"
    end = AttemptEnd(cause=Cause.FAILED, steps=0)
    journal.ended(1, end, Decision(Action.RESTART, "failure 1 of 5"), failure)
    journal.started(2, "4711")
    assert journal.verdict() == (Cause.FAILED, Action.RESTART, "failure 1 of 5")
    assert journal.events()[1]["failure"] == failure


def test_a_start_says_which_job_began_where(journal: Journal) -> None:
    journal.started(1, "4711")
    (event,) = journal.events()
    assert (event["job_id"], event["host"]) == ("4711", socket.gethostname())


def test_a_problem_ends_no_attempt(journal: Journal) -> None:
    journal.started(1, "4711")
    journal.problem(1, "scontrol: refused")
    assert journal.open_attempt() == 1
    assert journal.verdict() is None


def test_an_end_that_was_torn_by_a_crash_leaves_its_attempt_open(journal: Journal) -> None:
    journal.started(1, "4711")
    journal.ended(1, AttemptEnd(cause=Cause.FINISHED, steps=9), Decision(Action.DONE, "finished"), None)
    text = journal.path.read_text()
    journal.path.write_text(text[:-20])
    assert journal.open_attempt() == 1
    journal.ended(1, AttemptEnd(cause=Cause.NODE_LOST, steps=9), REQUEUE, None)
    assert journal.open_attempt() is None
    assert [end.cause for end in journal.history()] == [Cause.NODE_LOST]
