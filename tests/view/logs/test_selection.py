from __future__ import annotations

import pytest

from hpc_det.view.logs.log_file import Passage, Source
from hpc_det.view.logs.selection import Levels, level_of


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("WARNING:root:disk is slow", "WARNING"),
        ("INFO: [12] root: Running on node1", "INFO"),
        ("ERROR - model - no gradient", "ERROR"),
        ("DEBUG    model:train.py:12 a batch", "DEBUG"),
        ("2026-11-20 10:02:05,123 CRITICAL model: out of memory", "CRITICAL"),
        ("2026-11-20 10:02:05,123 - model - WARN - slow", "WARNING"),
        ("[2026-11-20 10:02:05,123] [INFO] [logging.py:96:log_dist] [Rank 0] step=1", "INFO"),
        ("[2026-11-20 10:02:05,123][model][ERROR] - no gradient", "ERROR"),
        ("2026-11-20 10:02:05.123 | WARNING  | model:train:12 - slow", "WARNING"),
        ("[WARNING] slow", "WARNING"),
        ("[rank=3] [FATAL] gone", "CRITICAL"),
        ("[rank0]:[W1120 10:02:05.123456789 ProcessGroupNCCL.cpp:1538] Warning: not destroyed", "WARNING"),
        ("E1120 10:02:05.123000 4711 torch/distributed/elastic/multiprocessing/api.py:874] failed", "ERROR"),
        ("Traceback (most recent call last):", "ERROR"),
        ("[rank1]: Traceback (most recent call last):", "ERROR"),
        ("/code/model_def.py:12: UserWarning: slow", "WARNING"),
        ("srun: error: node1: task 0: Killed", "ERROR"),
        ("slurmstepd-node1: error: *** STEP 12.0 CANCELLED ***", "ERROR"),
        ("hpc-det: warning: not uploaded", "WARNING"),
        ("hpc-det: 10:02:05 first failure: rank 1 on node1: ValueError: x", "ERROR"),
        ("hpc-det: 10:02:05 attempt 1 begins", "INFO"),
        ("no ERROR so far", None),
        ("ERROR", None),
        ("epoch 3: loss 0.1", None),
        ("  File 'model_def.py', line 12, in train_batch", None),
        ("", None),
    ],
)
def test_the_level_of_a_line(line: str, level: str | None) -> None:
    assert level_of(line) == level


def levels(reader: Levels, *lines: str, rank: int = 0, time: float = 1.0) -> list[str]:
    return list(reader.of(Passage(Source(rank=rank), time, list(lines))))


def test_the_lines_of_a_traceback_stay_together() -> None:
    traceback = ["Traceback (most recent call last):", "  File ...", "RuntimeError: CUDA error", "Compile with ..."]
    assert levels(Levels(), "epoch 1", *traceback) == ["INFO", *["ERROR"] * 4]


def test_what_is_printed_later_is_no_part_of_a_message() -> None:
    reader = Levels()
    assert levels(reader, "WARNING:root:slow", "very slow") == ["WARNING", "WARNING"]
    assert levels(reader, "slow indeed") == ["WARNING"]
    assert levels(reader, "epoch 1", time=2) == ["INFO"]


def test_a_traceback_that_was_looked_at_half_way_goes_on() -> None:
    reader = Levels()
    levels(reader, "Traceback (most recent call last):", "  File ...")
    assert levels(reader, "epoch 1", rank=1) == ["INFO"]
    assert levels(reader, "    train()", "ValueError: x", time=2) == ["ERROR", "ERROR"]
