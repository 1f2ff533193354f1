"""System metrics of this machine, and of GPUs that a replacement of NVIDIA's library simulates."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_det.core import system_metrics as system
from hpc_det.core.system_metrics import BufferedLines, Counters, Gpus, SystemMetrics
from hpc_det.node.json_files import read_lines
from tests.facts import unnamed
from tests.wait import wait_for

FACTS = {"attempt": 2, "host": "n1"}


class Nvml(SimpleNamespace):
    """Two GPUs, the second of which is split into MIG devices; the answers have the form of pynvml's."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, has_driver: bool = True) -> None:
        super().__init__()
        self.open = False
        self._has_driver = has_driver

    def nvmlInit(self) -> None:
        if not self._has_driver:
            raise self.NVMLError("NVML Shared Library Not Found")
        self.open = True

    def nvmlShutdown(self) -> None:
        self.open = False

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        if handle:
            raise self.NVMLError("Not Supported")
        return SimpleNamespace(gpu=87, memory=40)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=80, free=30, used=50)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    library = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    return library


def test_a_node_is_looked_at_until_the_end(tmp_path: Path, nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "EVERY_S", 0.01)
    monkeypatch.setattr("hpc_det.core.system_metrics.WRITTEN_S", 0.02)
    file = tmp_path / "system-0.jsonl"
    metrics = SystemMetrics(BufferedLines(file), FACTS)
    wait_for(lambda: len(read_lines(file)) > 3)
    metrics.close()
    lines = read_lines(file)
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)
    for line in lines:
        assert {name: line[name] for name in FACTS} == FACTS
        assert 0 <= line["cpu_util"] <= 100
        assert line["memory_free"] > 2**20
        rates = ("disk_iops", "disk_read", "disk_write", "net_sent", "net_received")
        assert all(line[rate] >= 0 for rate in rates)
        assert line["gpus"] == {"GPU-0": {"util": 87, "memory_free": 30}}
    assert not nvml.open


def test_a_training_that_is_over_at_once_has_one_look(tmp_path: Path) -> None:
    SystemMetrics(BufferedLines(tmp_path / "system-0.jsonl"), FACTS).close()
    assert len(read_lines(tmp_path / "system-0.jsonl")) == 1


def test_disks_and_networks_have_rates() -> None:
    before, after = Counters(10.0, 5, 1000, 0, 0, 7), Counters(12.0, 25, 3000, 50, 0, 107)
    assert after.rates(before) == {
        "disk_iops": 10,
        "disk_read": 1000,
        "disk_write": 25,
        "net_sent": 0,
        "net_received": 50,
    }


def no_such_file() -> None:
    raise NotImplementedError("/proc/diskstats nor /sys/block exist")


@pytest.mark.parametrize("counters", [lambda: None, no_such_file])
def test_a_node_without_disks_has_no_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counters: Callable[[], None]
) -> None:
    monkeypatch.setattr("psutil.disk_io_counters", counters)
    monkeypatch.setattr("psutil.net_io_counters", counters)
    SystemMetrics(BufferedLines(tmp_path / "system-0.jsonl"), FACTS).close()
    (line,) = read_lines(tmp_path / "system-0.jsonl")
    assert (line["disk_iops"], line["disk_write"], line["net_sent"]) == (0, 0, 0)


def test_where_there_is_no_driver_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(has_driver=False))
    gpus = Gpus()
    assert gpus.look() == {}
    gpus.close()


def test_a_gpu_that_is_lost_keeps_nobody_from_the_others(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(index: int) -> int:
        if index:
            raise nvml.NVMLError("GPU is lost")
        return index

    monkeypatch.setattr(nvml, "nvmlDeviceGetHandleByIndex", handle, raising=False)
    assert list(Gpus().look()) == ["GPU-0"]


def test_where_the_library_is_not_installed_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Gpus().look() == {}


def test_training_goes_on_where_the_file_cannot_be_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    SystemMetrics(BufferedLines(tmp_path / "missing" / "system-0.jsonl"), FACTS).close()
    assert unnamed(capfd.readouterr().out, "hpc-det", "system metrics", tmp_path / "missing") == []


def test_lines_wait_for_each_other_and_none_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, now = tmp_path / "timings-0.jsonl", 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    waiting = BufferedLines(file)
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
