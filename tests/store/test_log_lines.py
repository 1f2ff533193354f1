"""What a job prints of itself is found again by its patterns."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_det.store.log_lines import (
    ATTEMPT_BEGINS,
    OF_WORKER,
    printed_to,
    say,
    say_attempt_begins,
    say_of_worker,
)
from hpc_det.store.log_times import moments_after


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


def test_when_a_job_prints_is_noted_apart_from_what_others_printed_before(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text("of a job that was lost\n")
    os.utime(log, (100, 100))
    with printed_to(log):
        say("attempt 1 ended: node lost")
    first, last = moments_after(log, 0)
    assert first == (23, 100)
    assert last.size == log.stat().st_size
    assert last.time == pytest.approx(log.stat().st_mtime, abs=0.001)
