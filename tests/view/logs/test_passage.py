from __future__ import annotations

from collections.abc import Iterator

import pytest

from hpc_det.view.logs.passage import Passage, Source, first, last

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
