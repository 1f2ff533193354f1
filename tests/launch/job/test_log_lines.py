"""What a job prints of itself is found again by its patterns."""

from __future__ import annotations

import pytest

from hpc_det.launch.job.log_lines import ATTEMPT_BEGINS, OF_WORKER, say, say_attempt_begins, say_of_worker


def test_the_beginning_of_an_attempt_is_known_by_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    say_attempt_begins(12)
    found = ATTEMPT_BEGINS.fullmatch(capsys.readouterr().out.rstrip("\n"))
    assert found
    assert found[1] == "12"


def test_the_lines_of_a_worker_are_known_by_their_beginning(capsys: pytest.CaptureFixture[str]) -> None:
    say_of_worker(3, "trial 7 until 100")
    line = capsys.readouterr().out
    assert OF_WORKER.match(line)
    assert line.endswith(" worker 3: trial 7 until 100\n")


def test_other_lines_are_neither(capsys: pytest.CaptureFixture[str]) -> None:
    say("attempt 1 ended: finished")
    line = capsys.readouterr().out.rstrip("\n")
    assert not ATTEMPT_BEGINS.fullmatch(line)
    assert not OF_WORKER.match(line)
