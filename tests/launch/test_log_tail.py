"""What a log is asked for when a program has failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_det.launch.log_tail import last_line

REPORT = """\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("", ""),
        ("begins\nout of memory\n\n", "out of memory"),
        ("ValueError: handled\nKilled\n", "Killed"),
        (
            f"ModuleNotFoundError: No module named 'x'\nW1121 rank 1\n{REPORT}",
            "ModuleNotFoundError: No module named 'x'",
        ),
        (REPORT, "=" * 60),
    ],
)
def test_the_last_line_is_told_but_for_a_frame_that_torchrun_draws(tmp_path: Path, written: str, told: str) -> None:
    log = tmp_path / "job.log"
    log.write_text(written)
    assert last_line(log, 0) == told
