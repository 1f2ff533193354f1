from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_det.store.files import append_line, read_counted, read_json, read_lines, write_atomic, write_json

WRITER = """
import itertools, sys
from pathlib import Path
from hpc_det.store.files import write_atomic

for letter in itertools.cycle("ab"):
    write_atomic(Path(sys.argv[1]), letter * 300_000)
"""


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
    with pytest.raises(ValueError, match="Out of range"):
        write_json(tmp_path / "a.json", {"loss": float("nan")})
    with pytest.raises(ValueError, match="Out of range"):
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


def test_a_line_for_which_there_is_no_space_is_an_error(tmp_path: Path) -> None:
    code = f"""
import resource
from pathlib import Path
from hpc_det.store.files import append_line
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
append_line(Path({str(tmp_path / "journal")!r}), {{"text": "x" * 200}})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "no space left for whole lines" in done.stderr


def test_lines_that_are_written_again_make_the_former_ones_void(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for n, by in [(1, "a"), (2, "a"), (3, "a"), (2, "b"), (3, "b")]:
        append_line(path, {"n": n, "by": by})
    assert read_counted(path, "n") == [{"n": 1, "by": "a"}, {"n": 2, "by": "b"}, {"n": 3, "by": "b"}]
