from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hpc_det.node.files import write_atomic
from hpc_det.store.log_lines import LogTimes
from hpc_det.view.logs.log_file import LogFile, Passage, Source, first, last

PASSAGES = [Passage(Source(), 0.0, lines) for lines in (["1", "2"], ["3"], ["4", "5", "6"])]


def lines(passages: Iterator[Passage] | list[Passage]) -> str:
    return "".join(line for passage in passages for line in passage.lines)


@pytest.mark.parametrize(
    ("count", "head", "tail"),
    [(0, "", ""), (1, "1", "6"), (2, "12", "56"), (3, "123", "456"), (4, "1234", "3456"), (9, "123456", "123456")],
)
def test_some_lines_from_either_end(count: int, head: str, tail: str) -> None:
    assert lines(first(PASSAGES, count)) == head
    assert lines(last(PASSAGES, count)) == tail


def test_nothing_is_read_behind_the_first_lines() -> None:
    passages = iter(PASSAGES)
    assert lines(first(passages, 2)) == "12"
    assert lines(passages) == "3456"


def write(log: Path, text: str, time: float, *, noted: bool = True) -> None:
    """Append to the log at `time`. `noted`: record that time in the index, as an agent does."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        file.write(text)
    os.utime(log, (time, time))
    if noted:
        with closing(LogTimes(log)) as times:
            times.look()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank-0.log"


@pytest.fixture
def log(path: Path) -> LogFile:
    return LogFile(path, Source(rank=0))


def passages(log: LogFile, *, final: bool = False) -> list[tuple[float, list[str]]]:
    return [(passage.time, passage.lines) for passage in log.passages(final=final)]


def test_lines_that_were_written_between_two_looks_are_a_passage(path: Path, log: LogFile) -> None:
    assert passages(log) == []
    write(path, "one\ntwo\n", 10)
    write(path, "\nfour\n", 20)
    assert passages(log) == [(10, ["one", "two"]), (20, ["", "four"])]
    assert passages(log, final=True) == []


def test_lines_that_are_not_in_the_index_have_the_time_of_the_last_write(path: Path, log: LogFile) -> None:
    write(path, "one\n", 10)
    write(path, "two\n", 20, noted=False)
    assert passages(log) == [(10, ["one"]), (20, ["two"])]


def test_a_log_without_times_is_one_passage_without_a_place_in_time(path: Path, log: LogFile) -> None:
    write(path, "one\ntwo\n", 10, noted=False)
    (passage,) = log.passages(final=True)
    assert (passage.lines, passage.is_timed) == (["one", "two"], False)


def test_while_more_may_come_a_log_has_its_place_before_anybody_has_looked_at_it(path: Path, log: LogFile) -> None:
    write(path, "one\n", 10, noted=False)
    (passage,) = log.passages()
    assert (passage.time, passage.is_timed) == (10, True)


def test_a_line_without_an_end_waits_for_it_or_for_the_end_of_all(path: Path, log: LogFile) -> None:
    write(path, "one\ntw", 10)
    assert passages(log) == [(10, ["one"])]
    write(path, "o\nthr", 20)
    assert passages(log) == [(10, ["two"])]
    assert passages(log, final=True) == [(20, ["thr"])]


def test_a_line_belongs_to_the_moment_at_which_it_began(path: Path, log: LogFile) -> None:
    write(path, "one\ntw", 10)
    write(path, "o\nthree\n", 20)
    assert passages(log) == [(10, ["one", "two"]), (20, ["three"])]


def test_a_log_that_is_replaced_is_read_from_its_top(path: Path, log: LogFile) -> None:
    write(path, "one\n", 10, noted=False)
    passages(log)
    write_atomic(path, "two\nthree\n")
    assert [lines for _, lines in passages(log)] == [["two", "three"]]


def test_bytes_that_are_no_text_are_shown_as_such(path: Path, log: LogFile) -> None:
    path.write_bytes(b"\xff\r\n")
    assert [lines for _, lines in passages(log)] == [["\ufffd\r"]]


def test_long_logs_come_in_pieces_and_none_is_lost(path: Path, log: LogFile) -> None:
    lines = [f"line {number} " + "x" * (number % 300) for number in range(3000)]
    write(path, "".join(f"{line}\n" for line in lines), 10)
    pieces = passages(log)
    assert len(pieces) > 3
    assert [line for _, piece in pieces for line in piece] == lines


def test_a_line_of_many_blocks_is_one_line(path: Path, log: LogFile) -> None:
    write(path, "x" * 300_000, 10)
    write(path, "\nend\n", 20)
    assert passages(log) == [(10, ["x" * 300_000]), (20, ["end"])]


@pytest.mark.parametrize("end", ["", "\n"])
@pytest.mark.parametrize("count", [0, 1, 2, 15_000])
def test_the_last_lines_are_found_from_the_end(path: Path, log: LogFile, count: int, end: str) -> None:
    lines = [f"line {number}" for number in range(20_000)]
    write(path, "\n".join(lines) + end, 10)
    assert log.skip_to_last(count)
    found = [line for _, piece in passages(log, final=True) for line in piece]
    assert found[len(found) - count :] == lines[len(lines) - count :]
    assert len(found) <= count + 1


def test_a_log_may_have_fewer_lines_than_asked_for(path: Path, log: LogFile) -> None:
    assert not log.skip_to_last(5)
    write(path, "one\ntwo\n", 10)
    assert not log.skip_to_last(5)
    assert passages(log) == [(10, ["one", "two"])]


@pytest.mark.parametrize(
    ("since", "left"), [(9, ["one", "two", "three"]), (10, ["one", "two", "three"]), (11, ["three"]), (21, [])]
)
def test_what_was_written_before_a_time_is_left_out(path: Path, log: LogFile, since: float, left: list[str]) -> None:
    write(path, "one\ntw", 10)
    write(path, "o\nthree\n", 20)
    log.skip_before(since)
    assert [line for _, lines in passages(log) for line in lines] == left


def test_a_log_without_times_is_left_out_only_where_all_of_it_is_older(path: Path, log: LogFile) -> None:
    write(path, "one\ntwo\n", 10, noted=False)
    log.skip_before(5)
    assert passages(log) == [(10, ["one", "two"])]
