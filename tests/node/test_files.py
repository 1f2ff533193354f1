from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_det.node import disk, files, full_disk
from hpc_det.node.files import write_atomic, write_first
from hpc_det.node.json_files import append_line, append_lines, read_counted, read_json, read_lines, write_json
from tests.facts import refused, unnamed

WRITER = """
import itertools, sys
from pathlib import Path
from hpc_det.node.files import write_atomic

for letter in itertools.cycle("ab"):
    write_atomic(Path(sys.argv[1]), letter * 300_000)
"""


@pytest.mark.integration
def test_a_reader_beside_a_writer_sees_whole_files_only(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_atomic(path, "a" * 300_000)
    seen: set[str] = set()
    reads = 0
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)]) as writer:
        try:
            while len(seen) < 2 or reads < 300:
                text = path.read_text()
                assert text in ("a" * 300_000, "b" * 300_000)
                seen.add(text)
                reads += 1
        finally:
            writer.kill()


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "state"
    write_atomic(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "new \ud800")
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]
    assert path.read_text() == "old"


@pytest.mark.parametrize("write", [lambda path: write_json(path, {}), lambda path: append_line(path, {})])
def test_files_are_the_owners_alone(tmp_path: Path, write: object) -> None:
    path = tmp_path / "file"
    write(path)  # type: ignore[operator]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_json_reads_back_and_a_missing_file_is_none(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    assert read_json(path) is None
    write_json(path, {"name": "Größe\n", "list": [1, None, 2.5]})
    assert read_json(path) == {"name": "Größe\n", "list": [1, None, 2.5]}


def test_numbers_that_json_lacks_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with refused(ValueError, "JSON"):
        write_json(tmp_path / "a.json", {"loss": float("nan")})
    with refused(ValueError, "JSON"):
        append_line(tmp_path / "b.jsonl", {"loss": float("inf")})
    assert list(tmp_path.iterdir()) == []


def test_a_missing_file_has_no_lines(tmp_path: Path) -> None:
    assert read_lines(tmp_path / "journal.jsonl") == []


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    append_line(path, {"n": 1})
    with path.open("a") as file:
        file.write('{"n": 2, "text": "to')
    assert read_lines(path) == [{"n": 1}]


def test_what_is_appended_after_a_torn_line_is_not_lost_with_it(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text('{"n": 1}\n{"n": 2, "te')
    append_line(path, {"n": 3})
    append_line(path, {"n": 4})
    assert read_lines(path) == [{"n": 1}, {"n": 3}, {"n": 4}]


def test_a_line_that_lacks_only_its_end_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text('{"n": 1}')
    append_line(path, {"n": 2})
    assert read_lines(path) == [{"n": 1}, {"n": 2}]


def test_every_place_where_a_line_can_tear_leaves_the_others_readable(tmp_path: Path) -> None:
    whole = json.dumps({"n": 2, "text": "zwei\n"})
    for kept in range(len(whole)):
        path = tmp_path / f"{kept}.jsonl"
        path.write_text('{"n": 1}\n' + whole[:kept])
        append_line(path, {"n": 3})
        assert [line["n"] for line in read_lines(path)] == [1, 3]


@pytest.mark.integration
def test_a_line_for_which_there_is_no_space_is_an_error(tmp_path: Path) -> None:
    code = f"""
import resource
from pathlib import Path
from hpc_det.node.json_files import append_line
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
append_line(Path({str(tmp_path / "journal")!r}), {{"text": "x" * 200}})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert unnamed(done.stderr, f"[Errno {errno.ENOSPC}]", tmp_path / "journal") == []


def test_lines_that_are_written_again_make_the_former_ones_void(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for n, by in [(1, "a"), (2, "a"), (3, "a"), (2, "b"), (3, "b")]:
        append_line(path, {"n": n, "by": by})
    assert read_counted(path, "n") == [{"n": 1, "by": "a"}, {"n": 2, "by": "b"}, {"n": 3, "by": "b"}]


# --- errors of the disk


def failing(monkeypatch: pytest.MonkeyPatch, call: str, code: int, times: int, *, after: bool = False) -> None:
    """Make the first `times` calls of `disk.CALL` raise OSError; with `after`, once the call is done."""
    former, left = getattr(disk, call), [times]

    def fails(*args: Any, **kwargs: Any) -> Any:
        found = former(*args, **kwargs) if after or not left[0] else None
        if left[0]:
            left[0] -= 1
            raise OSError(code, os.strerror(code))
        return found

    monkeypatch.setattr(disk, call, fails)


@pytest.mark.parametrize("call", ["write", "flush"])
def test_lines_that_find_no_space_at_first_are_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A file server may accept the lines and report a full disk only at the flush."""
    path = tmp_path / "journal.jsonl"
    append_line(path, {"attempt": 1})
    failing(monkeypatch, call, errno.ENOSPC, 2, after=True)
    with full_disk.waited_for(lambda error: True):
        append_lines(path, [{"attempt": 2}, {"attempt": 3}])
    assert [line["attempt"] for line in read_lines(path)] == [1, 2, 3]


def test_lines_that_were_written_in_part_are_there_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, whole, calls = tmp_path / "journal.jsonl", disk.write, [0]

    def in_part(descriptor: int, data: bytes) -> int:
        calls[0] += 1
        return whole(descriptor, data if calls[0] > 1 else data[:20])

    monkeypatch.setattr(disk, "write", in_part)
    with full_disk.waited_for(lambda error: True):
        append_lines(path, [{"attempt": 2}, {"attempt": 3}])
    assert [line["attempt"] for line in read_lines(path)] == [2, 3]
    assert calls == [2]


@pytest.mark.parametrize("write", [write_atomic, write_first])
def test_a_half_written_file_that_another_process_has_removed_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, str], object]
) -> None:
    """The other process took the suspended writer for a killed one."""
    call = "replace" if write is write_atomic else "link"
    former, calls = getattr(disk, call), [0]

    def suspended(source: Path, target: Path) -> None:
        calls[0] += 1
        if calls[0] == 1:
            source.unlink()
        former(source, target)

    monkeypatch.setattr(disk, call, suspended)
    write(tmp_path / "state.json", "whole")
    assert (tmp_path / "state.json").read_text() == "whole"
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


def test_what_cannot_be_removed_hides_no_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "write", errno.ENOSPC, 1)
    failing(monkeypatch, "unlink", errno.EIO, 1)
    with refused(OSError) as raised:
        write_atomic(tmp_path / "state.json", "x")
    assert raised.value.errno == errno.ENOSPC


@pytest.mark.parametrize(
    ("release", "reports_errors"), [("5.7.19-1", False), ("5.8.0-63-generic", True), ("6.1", True)]
)
def test_a_file_system_is_flushed_at_once_where_the_kernel_reports_errors(
    release: str, reports_errors: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release=release))
    assert disk.flush_file_system(tmp_path) is reports_errors


@pytest.mark.parametrize("flushes_at_once", [True, False])
def test_a_folder_of_many_files_is_flushed_by_one_call_if_possible(
    flushes_at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("a", "sub/b"):
        (tmp_path / name).touch()
    flushed = list[str]()
    monkeypatch.setattr(files, "MANY_FILES", 2)
    monkeypatch.setattr(disk, "flush_file_system", lambda folder: flushes_at_once)
    monkeypatch.setattr(files, "flush_file", lambda path: flushed.append(path.name))
    files.flush_tree(tmp_path)
    assert sorted(flushed) == ([] if flushes_at_once else ["a", "b"])
