"""Many writers without a lock: no entry is lost or duplicated and all see one order, even if writers are killed."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hpc_det.node.json_files import DamagedFile
from hpc_det.store import shared_log
from hpc_det.store.shared_log import SharedLog
from tests.facts import refused


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "search"
    path.mkdir()
    return path


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_log, "CHUNK", 4)


def entries(folder: Path) -> list[dict[str, Any]]:
    return list(SharedLog(folder).new())


def numbers(folder: Path) -> list[int]:
    return [entry["n"] for entry in entries(folder)]


# --- one process


def test_an_entry_is_read_by_others_and_by_its_writer_once(folder: Path) -> None:
    writer, reader = SharedLog(folder), SharedLog(folder)
    assert writer.append({"n": 0}) == [{"n": 0}]
    assert list(reader.new()) == [{"n": 0}]
    assert list(reader.new()) == list(writer.new()) == []


def test_a_writer_is_told_what_others_wrote_before_it(folder: Path) -> None:
    one, other = SharedLog(folder), SharedLog(folder)
    one.append({"n": 0})
    one.append({"n": 1})
    assert other.append({"n": 2}) == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert one.append({"n": 3}) == [{"n": 2}, {"n": 3}]


def test_a_reader_that_stops_in_the_middle_goes_on_there(folder: Path, small_chunks: None) -> None:
    writer, reader = SharedLog(folder), SharedLog(folder)
    for n in range(10):
        writer.append({"n": n})
    first = reader.new()
    assert [next(first)["n"] for _ in range(3)] == [0, 1, 2]
    first.close()  # type: ignore[attr-defined]
    assert [entry["n"] for entry in reader.new()] == list(range(3, 10))


def test_any_text_comes_back_as_it_was(folder: Path) -> None:
    text = 'a line\nand\u2028another, "quoted" \x1c\x85 größe \ud83d'
    SharedLog(folder).append({"text": text})
    assert entries(folder) == [{"text": text}]


def test_an_entry_that_something_has_emptied_is_an_error(folder: Path) -> None:
    SharedLog(folder).append({"event": "asked"})
    (folder / "000000000.json").write_bytes(b"")
    with refused(DamagedFile, folder / "000000000.json"):
        list(SharedLog(folder).new())


def test_an_entry_with_an_impossible_format_version_is_named_by_its_file(folder: Path) -> None:
    log = SharedLog(folder)
    log.append({"event": "asked"})
    log.append({"event": "asked"})
    (folder / "000000001.json").write_text('{"hpc_det_format": "x", "event": "asked"}')
    with refused(DamagedFile, folder / "000000001.json"):
        list(SharedLog(folder).new())


def test_files_are_the_owners_alone(folder: Path, small_chunks: None) -> None:
    writer = SharedLog(folder)
    for n in range(6):
        writer.append({"n": n})
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_what_is_no_json_leaves_nothing_behind(folder: Path) -> None:
    with refused(ValueError, "JSON"):
        SharedLog(folder).append({"value": float("nan")})
    assert list(folder.iterdir()) == []


# --- chunks


def test_a_full_chunk_becomes_one_file(folder: Path, small_chunks: None) -> None:
    writer = SharedLog(folder)
    for n in range(9):
        writer.append({"n": n})
    assert sorted(path.name for path in folder.iterdir()) == [
        "000000000-000000003.jsonl",
        "000000004-000000007.jsonl",
        "000000008.json",
    ]
    assert numbers(folder) == list(range(9))


def test_a_reader_inside_a_chunk_goes_on_when_that_is_sealed(folder: Path, small_chunks: None) -> None:
    writer, reader = SharedLog(folder), SharedLog(folder)
    writer.append({"n": 0})
    assert len(list(reader.new())) == 1
    for n in range(1, 7):
        writer.append({"n": n})
    assert [entry["n"] for entry in reader.new()] == list(range(1, 7))


def test_a_late_writer_whose_number_was_sealed_and_deleted_takes_the_next_one(
    folder: Path, small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was suspended just before it named its entry, while others filled the chunk."""
    late, others = SharedLog(folder), SharedLog(folder)
    others.append({"n": 0})
    link, here = os.link, iter([True])

    def after_the_others(partial: Path, entry: Path) -> None:
        if next(here, False):
            for n in range(1, 6):
                others.append({"n": n})
            assert not entry.exists()
        link(partial, entry)

    monkeypatch.setattr(os, "link", after_the_others)
    assert late.append({"n": 6})[-1] == {"n": 6}
    assert numbers(folder) == list(range(7))
    assert not (folder / "000000001.json").exists()


def test_an_entry_that_came_too_late_is_read_by_nobody(
    folder: Path, small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer was killed before it removed the name, and a reader has just found no sealed chunk."""
    writer, reader = SharedLog(folder), SharedLog(folder)
    writer.append({"n": 0})
    assert len(list(reader.new())) == 1
    read, here = Path.read_text, iter([True])

    def after_the_others(path: Path, *args: Any, **kwargs: Any) -> str:
        if path.parent == folder and next(here, False):
            for n in range(1, 6):
                writer.append({"n": n})
            (folder / "000000001.json").write_text('{"n": "too late"}\n')
        return read(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", after_the_others)
    assert [entry["n"] for entry in reader.new()] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("killed_in", ["write_atomic", "_delete_small_ones"])
def test_a_chunk_whose_writer_was_killed_before_it_was_sealed_is_whole(
    folder: Path, small_chunks: None, monkeypatch: pytest.MonkeyPatch, killed_in: str
) -> None:
    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    writer = SharedLog(folder)
    for n in range(3):
        writer.append({"n": n})
    with monkeypatch.context() as patch:
        patch.setattr(shared_log if killed_in == "write_atomic" else SharedLog, killed_in, killed)
        with pytest.raises(KeyboardInterrupt):
            writer.append({"n": 3})
    other = SharedLog(folder)
    assert [entry["n"] for entry in other.append({"n": 4})] == [0, 1, 2, 3, 4]
    assert (folder / "000000000-000000003.jsonl").exists()
    assert numbers(folder) == [0, 1, 2, 3, 4]


def test_a_disk_too_full_for_a_whole_chunk_loses_nothing(
    folder: Path, small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: str) -> None:
        raise OSError(errno.ENOSPC, "no space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(shared_log, "write_atomic", full)
        writer = SharedLog(folder)
        for number in range(6):
            assert writer.append({"n": number}) == [{"n": number}]
        assert numbers(folder) == list(range(6)), "reading needs no space"
    assert numbers(folder) == list(range(6))
    assert len(list(folder.glob("*.jsonl"))) == 1, "sealed by the next reader"
    assert writer.append({"n": 6}) == [{"n": 6}]
    assert numbers(folder) == list(range(7))


def test_a_half_written_entry_that_another_process_has_removed_is_written_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process took the suspended writer for a killed one."""
    link, calls = os.link, [0]

    def suspended(source: Path, target: Path) -> None:
        calls[0] += 1
        if calls[0] == 1:
            source.unlink()
        link(source, target)

    monkeypatch.setattr(os, "link", suspended)
    writer = SharedLog(folder)
    assert writer.append({"n": 0}) == [{"n": 0}]
    assert writer.append({"n": 1}) == [{"n": 1}]
    assert numbers(folder) == [0, 1]


def test_a_lost_answer_of_nfs_is_no_second_entry(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has created the link, its answer is lost, and the repeated call fails because the name exists."""
    link = os.link

    def twice(partial: Path, entry: Path) -> None:
        link(partial, entry)
        link(partial, entry)

    monkeypatch.setattr(os, "link", twice)
    writer = SharedLog(folder)
    writer.append({"n": 0})
    assert writer.append({"n": 1}) == [{"n": 1}]
    assert numbers(folder) == [0, 1]


# --- many processes


class Appender:
    def __init__(self, folder: Path, name: str, count: int, chunk: int) -> None:
        command = [sys.executable, "-m", "tests.store.appenders", str(folder), name, str(count), str(chunk)]
        self.name = name
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def let_go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def acknowledged(self) -> list[tuple[str, int]]:
        """Wait until the process ends; return the entries that it has reported as written."""
        return [(self.name, int(line)) for line in self.process.communicate(timeout=60)[0].split()]


@contextmanager
def at_once(folder: Path, names: list[str], count: int, chunk: int) -> Iterator[list[Appender]]:
    appenders = [Appender(folder, name, count, chunk) for name in names]
    try:
        for appender in appenders:
            assert appender.process.stdout is not None
            assert appender.process.stdout.readline() == "ready\n"
        for appender in appenders:
            appender.let_go()
        yield appenders
    finally:
        for appender in appenders:
            appender.process.kill()
            appender.process.communicate()


def written(folder: Path) -> list[tuple[str, int]]:
    return [(entry["by"], entry["number"]) for entry in entries(folder)]


@pytest.mark.integration
def test_32_writers_at_once_lose_nothing_and_every_reader_sees_one_order(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_log, "CHUNK", 50)
    early, seen = SharedLog(folder), []
    names = [str(number) for number in range(32)]
    with at_once(folder, names, 10, chunk=50) as appenders:
        while any(appender.process.poll() is None for appender in appenders):
            seen += [(entry["by"], entry["number"]) for entry in early.new()]
    seen += [(entry["by"], entry["number"]) for entry in early.new()]
    assert sorted(seen) == sorted((name, number) for name in names for number in range(10))
    assert written(folder) == seen
    for name in names:
        assert [number for by, number in seen if by == name] == list(range(10))
    assert len(list(folder.glob("*.jsonl"))) == 6


@pytest.mark.integration
def test_writers_killed_at_any_point_leave_whole_entries_and_all_that_was_acknowledged(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_log, "CHUNK", 20)
    generator = random.Random(5)
    acknowledged: list[tuple[str, int]] = []
    for turn in range(3):
        names = [f"{turn}-{number}" for number in range(12)]
        with at_once(folder, names, 10_000, chunk=20) as appenders:
            for appender in generator.sample(appenders, len(appenders)):
                time.sleep(generator.uniform(0, 0.03))  # the kill may come at any point
                os.kill(appender.process.pid, signal.SIGKILL)
                acknowledged += appender.acknowledged()
    found = written(folder)
    assert len(set(found)) == len(found)
    assert set(acknowledged) <= set(found)
    # A kill may come after the entry is named and before its writer reports it: at most one entry per writer.
    assert len(found) - len(acknowledged) <= 36
    assert written(folder) == found
    for path in folder.glob("*.json"):
        json.loads(path.read_text())


@pytest.mark.integration
def test_a_hundred_thousand_entries_are_read_in_seconds(folder: Path) -> None:
    """The bound is loose; `tests/benchmarks` measures the time."""
    for first in range(0, 100_000, shared_log.CHUNK):
        lines = (json.dumps({"event": "asked", "worker": n, "job": "4711"}) for n in range(shared_log.CHUNK))
        SharedLog(folder)._sealed(first).write_text("\n".join(lines) + "\n")
    began = time.process_time()
    assert len(entries(folder)) == 100_000
    assert time.process_time() - began < 5
