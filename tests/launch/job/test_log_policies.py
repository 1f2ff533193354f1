from __future__ import annotations

from pathlib import Path

from hpc_det.launch.job.log_policies import Match, matches
from hpc_det.launch.log_tail import LONGEST_LINE

OOM = {"name": "OOM", "pattern": "out of memory", "action": "cancel_retries"}
OFF = {"name": "ECC Error", "pattern": None, "action": None}
NAMELESS = {"name": None, "pattern": "^slow", "action": "exclude_node"}


def test_each_policy_tells_its_first_line_and_one_that_is_switched_off_none(tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").write_text("ECC Error\nout of memory: 1\n")
    (tmp_path / "rank-1.log").write_bytes(b"\xff not UTF-8\nout of memory: 2\nslow disk\n")
    logs = {tmp_path / "rank-0.log": 0, tmp_path / "rank-1.log": 0}
    assert matches([OOM, OFF, NAMELESS], logs) == [
        Match("OOM", "out of memory: 1", "cancel_retries", tmp_path / "rank-0.log"),
        Match("^slow", "slow disk", "exclude_node", tmp_path / "rank-1.log"),
    ]


def test_what_was_written_before_the_attempt_is_not_read(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text("out of memory\n")
    assert matches([OOM], {log: log.stat().st_size}) == []


def test_of_a_long_line_the_beginning_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text("out of memory" + "!" * 10_000)
    (match,) = matches([OOM], {log: 0})
    assert match.line.startswith("out of memory!")
    assert len(match.line) == LONGEST_LINE
