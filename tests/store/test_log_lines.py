"""The patterns for log lines match the lines that a job prints about itself."""

from __future__ import annotations

import os
import stat
from contextlib import closing
from pathlib import Path

import pytest

from hpc_det.errors import HpcDetError
from hpc_det.store.folders import times_of
from hpc_det.store.log_lines import (
    ATTEMPT_BEGINS,
    LINE_BYTES,
    OF_WORKER,
    LogTimes,
    Moment,
    moments_after,
    printed_to,
    say,
    say_attempt_begins,
    say_of_worker,
    size_before,
)
from tests.facts import refused


def write(log: Path, text: str, time: float) -> None:
    with log.open("a") as file:
        file.write(text)
    os.utime(log, (time, time))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Return a log that had 10, 20 and 30 bytes at 100, 200.5 and 300 s."""
    log = tmp_path / "rank-0.log"
    with closing(LogTimes(log)) as times:
        for time in (100, 200.5, 300):
            write(log, "123456789\n", time)
            assert times.look()
            assert not times.look()
    return log


def test_each_growth_is_noted_with_its_time(log: Path) -> None:
    assert list(moments_after(log, 0)) == [Moment(10, 100), Moment(20, 200.5), Moment(30, 300)]
    assert list(moments_after(log, 9)) == list(moments_after(log, 0))
    assert list(moments_after(log, 10)) == [Moment(20, 200.5), Moment(30, 300)]
    assert list(moments_after(log, 30)) == []


def test_a_moment_has_the_bytes_that_were_there_before_it(log: Path) -> None:
    assert [size_before(log, time) for time in (99, 100, 100.1, 200.5, 201, 1e12)] == [0, 0, 10, 10, 20, 30]


def test_a_log_without_an_index_has_no_times(tmp_path: Path) -> None:
    assert list(moments_after(tmp_path / "rank-0.log", 0)) == []
    assert size_before(tmp_path / "rank-0.log", 1e12) == 0


def test_a_log_that_is_not_there_yet_has_not_grown(tmp_path: Path) -> None:
    log = tmp_path / "not-yet" / "rank-0.log"
    assert not LogTimes(log).look()
    assert not log.parent.exists()


def test_the_next_writer_goes_on(log: Path) -> None:
    write(log, "more\n", 400)
    with closing(LogTimes(log)) as times:
        assert times.look()
    assert list(moments_after(log, 20)) == [Moment(30, 300), Moment(35, 400)]


def test_a_line_that_a_full_disk_has_cut_is_written_over(log: Path) -> None:
    index = times_of(log)
    os.truncate(index, 2 * LINE_BYTES + 5)
    assert list(moments_after(log, 0)) == [Moment(10, 100), Moment(20, 200.5)]
    with closing(LogTimes(log)) as times:
        times.look()
    assert list(moments_after(log, 0)) == [Moment(10, 100), Moment(20, 200.5), Moment(30, 300)]


def test_an_index_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text("a line\n")
    times_of(log).mkdir()
    assert not LogTimes(log).look()


def test_a_damaged_index_is_named_with_the_remedy(log: Path) -> None:
    times_of(log).write_bytes(b"\0" * 3 * LINE_BYTES)
    with refused(HpcDetError, times_of(log), "remove"):
        list(moments_after(log, 0))


def test_the_index_is_its_owners_alone(log: Path) -> None:
    assert stat.S_IMODE(times_of(log).stat().st_mode) == 0o600


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
