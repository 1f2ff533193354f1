"""The progress file of an attempt, from heartbeats of rank 0."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from hpc_det.launch.watch.live_progress import PROGRESS_S, LiveProgress
from hpc_det.node.json_files import read_map
from hpc_det.store.folders import ExperimentFolder, TrialFolder


@pytest.fixture
def trial(tmp_path: Path) -> TrialFolder:
    trial = ExperimentFolder(tmp_path / "12").trial()
    trial.path.mkdir(parents=True)
    return trial


def beat(batch: int, *, rank: int = 0, phase: str = "training") -> dict[str, Any]:
    return {"heartbeat": rank, "phase": phase, "steps": batch + 7, "alone": 0, "warm": True, "batch": batch}


def test_the_batches_of_rank_0_are_written_at_the_next_question(trial: TrialFolder) -> None:
    progress = LiveProgress(trial, 3)
    assert progress.is_due(0)
    assert not trial.live_progress.exists()
    progress.take([beat(99, rank=1), beat(42), beat(5, phase="validation")])
    assert not progress.is_due(PROGRESS_S / 2)
    assert progress.is_due(PROGRESS_S)
    written = read_map(trial.live_progress) or {}
    assert (written["attempt"], written["batches"]) == (3, 42)


def test_without_progress_or_with_a_newer_report_nothing_is_written(trial: TrialFolder) -> None:
    progress = LiveProgress(trial, 3)
    progress.take([beat(42)])
    trial.metrics.touch()
    assert progress.is_due(0)
    assert not trial.live_progress.exists()
    long_ago = time.time() - 2 * PROGRESS_S
    os.utime(trial.metrics, (long_ago, long_ago))
    assert progress.is_due(PROGRESS_S)
    trial.live_progress.unlink()
    progress.take([beat(42)])
    assert progress.is_due(2 * PROGRESS_S)
    assert not trial.live_progress.exists()


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    progress = LiveProgress(TrialFolder(tmp_path / "none" / "1"), 3)
    progress.take([beat(42)])
    assert progress.is_due(0)
