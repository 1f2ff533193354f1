"""Reports of training metrics, and the thread that writes them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import pytest

from hpc_det.core import reports as reports_module
from hpc_det.core.reports import Reports
from hpc_det.core.tensorboard import TensorBoard
from hpc_det.distributed.metrics import MetricsLog
from tests.wait import DEADLINE_S


class SlowLog:
    """A log whose writes in other threads than that of the training last until `go` is set."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.is_writing, self.go = threading.Event(), threading.Event()

    def report_all(self, records: Sequence[Mapping[str, Any]]) -> None:
        if threading.current_thread() is not threading.main_thread():
            self.is_writing.set()
            assert self.go.wait(DEADLINE_S)
        self.steps += [record["steps"] for record in records]


@pytest.fixture
def log() -> Iterator[SlowLog]:
    log = SlowLog()
    yield log
    log.go.set()


@pytest.fixture
def reports(log: SlowLog) -> Iterator[Reports]:
    reports = Reports(cast(MetricsLog, log), TensorBoard(None))
    yield reports
    log.go.set()
    reports.close()


def test_a_report_does_not_wait_for_a_write(reports: Reports, log: SlowLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports_module, "WRITE_S", 0.001)
    reports.training(1, {"loss": 0.5})
    while not log.is_writing.is_set():  # the write before may have ended more than WRITE_S ago
        reports.training(2, {"loss": 0.5})
    monkeypatch.setattr(reports_module, "WRITE_S", DEADLINE_S)
    written = len(log.steps)
    for steps in (3, 4, 5):
        reports.training(steps, {"loss": 0.5})
    assert len(log.steps) == written
    log.go.set()
    reports.write()
    assert log.steps[-3:] == [3, 4, 5]


def test_training_writes_no_report_that_waits_for_the_thread(
    reports: Reports, log: SlowLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that reports at each batch would otherwise write a second's reports itself whenever a second is over."""
    monkeypatch.setattr(reports_module, "WRITE_S", DEADLINE_S)
    reports.training(1, {"loss": 0.5})
    reports.training(2, {"loss": 0.5})
    monkeypatch.setattr(reports, "_write_at", 0.0)
    reports.training(3, {"loss": 0.5})
    assert log.steps == [1]
    reports.write()
    assert log.steps == [1, 2, 3]


def test_a_report_after_a_pause_is_written_at_once(reports: Reports, log: SlowLog) -> None:
    for steps in (1, 2, 3):
        reports.training(steps, {"loss": 0.5})
        reports.write()
        reports._write_at = 0.0
    reports.training(4, {"loss": 0.5})
    assert log.steps == [1, 2, 3, 4]


def test_a_close_between_the_threads_two_looks_ends_it(
    reports: Reports, log: SlowLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`close` comes when the thread has waited in vain for it, and has not yet forgotten the news."""
    monkeypatch.setattr(reports_module, "WRITE_S", 0.001)
    log.go.set()
    close_begins = threading.Event()

    class News(threading.Event):
        def clear(self) -> None:
            close_begins.set()
            assert reports._is_closed.wait(DEADLINE_S)
            assert self.wait(DEADLINE_S)
            super().clear()

    monkeypatch.setattr(reports, "_has_news", News())
    for steps in (1, 2):
        reports.training(steps, {"loss": 0.5})
    assert reports._thread is not None
    assert close_begins.wait(DEADLINE_S)
    reports._is_closed.set()
    reports._has_news.set()
    reports._thread.join(DEADLINE_S)
    assert not reports._thread.is_alive()
