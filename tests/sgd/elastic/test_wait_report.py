from __future__ import annotations

import pytest

from hpc_det.sgd.elastic.wait_report import REPORT_S, WaitReport


def test_there_is_a_line_every_ten_seconds_with_the_state_of_that_moment(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now, states = 1000.0, iter(["job 7 is queued", "job 7 is running"])
    monkeypatch.setattr("time.monotonic", lambda: now)
    report = WaitReport(lambda: next(states))
    for _ in range(25):
        report.look()
        now += 1
    assert caplog.messages == ["waiting for 10 s: job 7 is queued", "waiting for 20 s: job 7 is running"]
    assert {record.levelname for record in caplog.records} == {"WARNING"}  # shown unless the program says otherwise
    assert REPORT_S == 10
