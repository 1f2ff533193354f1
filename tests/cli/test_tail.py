from __future__ import annotations

from pathlib import Path

from hpc_det.cli.experiment.follow import Tail
from hpc_det.node.files import write_atomic


def test_each_call_gives_the_whole_lines_since_the_last(tmp_path: Path) -> None:
    file = tmp_path / "log"
    tail = Tail(file)
    assert list(tail.lines()) == []
    file.write_bytes(b"one\ntwo")
    assert list(tail.lines()) == ["one"]
    with file.open("ab") as more:
        more.write(b" and more\r\xff\nend")
    assert list(tail.lines()) == ["two and more\r\ufffd"]
    assert list(tail.lines()) == []


def test_a_replaced_or_cut_file_is_read_from_its_top(tmp_path: Path) -> None:
    file = tmp_path / "log"
    tail = Tail(file)
    write_atomic(file, "one\ntwo\n")
    assert list(tail.lines()) == ["one", "two"]
    write_atomic(file, "three\nfour\nfive\n")
    assert list(tail.lines()) == ["three", "four", "five"]
    file.write_text("six\n")
    assert list(tail.lines()) == ["six"]
