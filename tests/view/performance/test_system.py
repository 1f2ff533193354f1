"""Results from the samples of nodes."""

from __future__ import annotations

import time
from typing import Any

import pytest

from hpc_det.node.json_files import append_line
from hpc_det.store.folders import TrialFolder
from hpc_det.view.performance.system import NEW_S, gpu_use, over_batches, read_system
from hpc_det.view.performance.timings import read_timings
from tests.view.performance.profiles import BEGAN, gpus, sample, stretch


def test_a_metric_has_a_mean_a_least_and_a_greatest_value(trial: TrialFolder) -> None:
    for at, util in enumerate((10.0, 20.0, 60.0)):
        sample(trial, at=at, cpu_util=util)
    (node,) = read_system(trial.profile)
    usage = node.metrics["cpu_util"]
    assert (node.host, node.samples, usage.mean, usage.low, usage.high) == ("n1", 3, 30, 10, 60)


def test_each_gpu_has_its_own(trial: TrialFolder) -> None:
    sample(trial, at=0, gpus=gpus(a=100, b=20))
    sample(trial, at=1, gpus=gpus(a=80, b=0))
    (node,) = read_system(trial.profile)
    assert {uuid: its["util"].mean for uuid, its in node.gpus.items()} == {"GPU-a": 90, "GPU-b": 10}
    assert [its["util"].mean for its in node.busiest_gpus(1)] == [90]


def test_nodes_are_told_apart_by_their_hosts_whichever_numbers_they_had(trial: TrialFolder) -> None:
    sample(trial, 0, at=0, host="n1")
    sample(trial, 1, at=0, host="n2")
    sample(trial, 0, at=9, host="n2", attempt=2)
    assert [(node.host, node.samples) for node in read_system(trial.profile)] == [("n1", 1), ("n2", 2)]


def test_torn_lines_and_what_a_machine_does_not_count_are_left_out(trial: TrialFolder) -> None:
    sample(trial, at=0, disk_read=None)
    with trial.system_metrics(0).open("a") as file:
        file.write('{"time": 1')
    (node,) = read_system(trial.profile)
    assert node.samples == 1
    assert "disk_read" not in node.metrics


def test_samples_are_placed_by_the_batches_of_their_own_host_whose_clock_may_be_wrong(trial: TrialFolder) -> None:
    slow_s = 5000.0
    for batches in (100, 200):
        stretch(trial, 0, batches=batches)
        stretch(trial, 1, batches=batches, host="n2", end=BEGAN + slow_s + batches / 10)
    for at, util in ((5, 10), (15, 30)):
        sample(trial, 0, at=at, cpu_util=util)
        sample(trial, 1, at=slow_s + at, host="n2", cpu_util=util + 40)
    sample(trial, 0, at=-3, cpu_util=99)  # before the first batch
    sample(trial, 0, at=21, cpu_util=99)  # after the last
    curves = over_batches(trial.profile, read_timings(trial.profile), [100, 200])
    assert curves["cpu_util"] == [(100, 30, 10, 50), (200, 50, 30, 70)]


def test_stretches_that_are_drawn_as_one_share_their_samples(trial: TrialFolder) -> None:
    for batches in (100, 200, 300):
        stretch(trial, batches=batches)
        sample(trial, at=batches / 10 - 1, gpus=gpus(a=batches / 10, b=0))
    curves = over_batches(trial.profile, read_timings(trial.profile), [200, 300])
    assert curves["gpu_util"] == [(200, 7.5, 0, 20), (300, 15, 0, 30)]
    assert "gpu_memory_free" in curves


def test_samples_of_what_was_lost_are_nowhere(trial: TrialFolder) -> None:
    stretch(trial, batches=100)
    stretch(trial, batches=200)
    stretch(trial, batches=200, attempt=2, end=BEGAN + 90)
    sample(trial, at=15, cpu_util=100)
    sample(trial, at=85, attempt=2, cpu_util=50)
    curves = over_batches(trial.profile, read_timings(trial.profile), [100, 200])
    assert curves["cpu_util"] == [(200, 50, 50, 50)]


@pytest.mark.parametrize("ends", [[], [100]])
def test_without_timings_no_sample_has_a_place(trial: TrialFolder, ends: list[int]) -> None:
    sample(trial, at=0)
    assert over_batches(trial.profile, {}, ends) == {}


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
