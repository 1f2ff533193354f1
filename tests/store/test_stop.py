from __future__ import annotations

import time
from pathlib import Path

import pytest

from hpc_det.store.stop import Reason, read_stop, request_stop


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "stop.json"


def ask(path: Path, attempt: int | None, reason: Reason, source: str = "a test") -> str:
    return request_stop(path, attempt=attempt, reason=reason, source=source).reason


def test_without_a_request_nothing_stops(path: Path) -> None:
    assert read_stop(path, 1) is None


def test_a_request_reads_back_with_its_source_and_time(path: Path) -> None:
    before = time.time()
    asked = request_stop(path, attempt=3, reason="signal", source="SIGTERM on node1")
    assert read_stop(path, 3) == asked
    assert (asked.reason, asked.source) == ("signal", "SIGTERM on node1")
    assert before <= asked.time <= time.time()


def test_a_request_left_over_from_an_earlier_attempt_does_not_fire(path: Path) -> None:
    ask(path, 1, "signal")
    assert read_stop(path, 2) is None


def test_a_left_over_request_gives_way_to_a_new_one(path: Path) -> None:
    ask(path, 1, "kill")
    assert ask(path, 2, "signal") == "signal"
    assert read_stop(path, 1) is None


def test_a_request_for_no_attempt_in_particular_fires_in_whichever_comes(path: Path) -> None:
    ask(path, None, "cancel")
    assert [request.reason for attempt in (1, 2, 9) if (request := read_stop(path, attempt))] == ["cancel"] * 3


@pytest.mark.parametrize("standing_for", [1, None])
@pytest.mark.parametrize(
    ("standing", "then", "stands"),
    [
        ("signal", "signal", "signal"),
        ("signal", "cancel", "signal"),
        ("cancel", "signal", "cancel"),
        ("kill", "signal", "kill"),
        ("kill", "cancel", "kill"),
        ("signal", "kill", "kill"),
        ("cancel", "kill", "kill"),
    ],
)
def test_the_first_request_stands_but_kill_overrules_all(
    path: Path, standing_for: int | None, standing: Reason, then: Reason, stands: Reason
) -> None:
    ask(path, standing_for, standing, "the first")
    assert ask(path, 1, then, "the second") == stands
    found = read_stop(path, 1)
    assert found is not None
    assert (found.reason, found.source) == (stands, "the second" if stands == then != standing else "the first")
