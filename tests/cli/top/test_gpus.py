from __future__ import annotations

import time
from typing import Any

import pytest

from hpc_det.cli.top.gpus import NEW_S, gpu_use
from hpc_det.node.json_files import append_line
from hpc_det.store.folders import TrialFolder


@pytest.fixture
def trial(tmp_path: Any) -> TrialFolder:
    trial = TrialFolder(tmp_path)
    trial.profile.mkdir()
    return trial


def looked(trial: TrialFolder, node: int, *uses: float, ago_s: float = 0) -> None:
    gpus = {f"GPU-{number}": {"util": use, "memory_free": 0} for number, use in enumerate(uses)}
    append_line(trial.system_metrics(node), {"time": time.time() - ago_s, "gpus": gpus}, durable=False)


def test_the_use_of_gpus_is_the_mean_of_the_newest_look_at_each_node(trial: TrialFolder) -> None:
    looked(trial, 0, 10, 20)
    looked(trial, 0, 90, 100)
    looked(trial, 1, 80, 30)
    trial.timings(0).write_text("no look")
    assert gpu_use(trial) == 75


def test_a_look_that_is_torn_or_old_does_not_count(trial: TrialFolder) -> None:
    looked(trial, 0, 40)
    with trial.system_metrics(0).open("a") as file:
        file.write('{"time": 17')
    looked(trial, 1, 100, ago_s=2 * NEW_S)
    assert gpu_use(trial) == 40


def test_without_gpus_or_measurements_nothing_is_said(trial: TrialFolder) -> None:
    assert gpu_use(trial) is None
    looked(trial, 0)
    assert gpu_use(trial) is None
    trial.system_metrics(0).unlink()
    trial.profile.rmdir()
    assert gpu_use(trial) is None


def test_of_a_long_file_only_the_end_is_read(trial: TrialFolder) -> None:
    looked(trial, 0, 50)
    with trial.system_metrics(0).open("a") as file:
        file.write("x" * 10**6 + "\n")
    looked(trial, 0, 60)
    assert gpu_use(trial) == 60
