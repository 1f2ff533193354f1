from __future__ import annotations

from pathlib import Path

import pytest

from hpc_det.node.json_files import read_lines
from hpc_det.pytorch.profiling.lines import Lines


def test_lines_wait_for_each_other_and_none_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, now = tmp_path / "timings-0.jsonl", 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    waiting = Lines(file)
    waiting.write()
    assert not file.exists(), "nothing was measured"
    for now in (1.0, 9.9):
        waiting.add({"time": now})
        assert not file.exists()
    for now in (10.0, 12.0):
        waiting.add({"time": now})
        assert [line["time"] for line in read_lines(file)] == [1.0, 9.9, 10.0]
    waiting.write()
    assert [line["time"] for line in read_lines(file)] == [1.0, 9.9, 10.0, 12.0]
