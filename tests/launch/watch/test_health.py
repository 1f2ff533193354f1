"""The health checks of a node, each in its process."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import select
import time
from pathlib import Path
from timeit import timeit
from typing import Any

import pytest

from hpc_det.launch.node_folders import NodeFolders
from hpc_det.launch.watch import health
from hpc_det.launch.watch.health import NodeProblem, answers, device_problem, problems_of_node, wrong_clocks
from hpc_det.store.folders import ExperimentFolder
from tests.facts import each_names, unnamed
from tests.machine import smallest
from tests.nvml import Nvml
from tests.plan.plans import job_plan

pytestmark = pytest.mark.integration


def found(tmp_path: Path, **plan: Any) -> list[NodeProblem]:
    trial = ExperimentFolder(tmp_path / "run").trial()
    trial.path.mkdir(parents=True, exist_ok=True)
    private = tmp_path / "private"
    private.mkdir(exist_ok=True)
    return problems_of_node(trial, job_plan(**{"slot_type": "cpu"} | plan), NodeFolders(str(private), None), {})


def test_a_healthy_node_has_no_problem_and_says_so_at_once(tmp_path: Path) -> None:
    assert found(tmp_path) == []
    assert smallest(lambda: timeit(lambda: found(tmp_path), number=1), limit=1) < 1  # it usually takes milliseconds
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_folder_that_is_gone_is_the_nodes_problem(tmp_path: Path) -> None:
    found(tmp_path)
    os.rmdir(tmp_path / "private")
    trial = ExperimentFolder(tmp_path / "run").trial()
    gone = str(tmp_path / "private")
    problems = problems_of_node(trial, job_plan(slot_type="cpu"), NodeFolders(gone, None), {})
    each_names((problem.text for problem in problems), [gone, os.strerror(errno.ENOENT)])


@pytest.mark.parametrize(("error", "is_shared"), [("ENOSPC", True), ("EROFS", False)])
def test_a_full_run_folder_is_everybodys_problem_and_a_read_only_one_the_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str, is_shared: bool
) -> None:
    number = getattr(__import__("errno"), error)

    def refuse(*arguments: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    folders = [tmp_path / "run" / "trials" / "1", tmp_path / "private"]
    assert found(tmp_path) == [
        NodeProblem(f"{folder}: {os.strerror(number)}", is_shared and folder == folders[0]) for folder in folders
    ]


def test_a_clock_that_differs_from_the_file_servers_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 3600)
    text = found(tmp_path)[0].text
    assert unnamed(text, "clock", "behind", tmp_path / "run" / "trials" / "1") == []
    (late_s,) = re.findall(r"(\d+) s\b", text)
    assert 3300 < int(late_s) <= 3600  # time passes while the file is written and read


def test_a_node_without_memory_is_ill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "LEAST_MEMORY_MB", 10**9)
    assert unnamed(found(tmp_path)[0].text, "memory", "1000000000 MB") == []


def test_gpus_are_asked_for_where_slots_are_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "device_problem", lambda needed, env: f"0 of {needed} GPUs")
    assert found(tmp_path, slot_type="gpu") == [NodeProblem("0 of 4 GPUs")]
    assert found(tmp_path, slot_type="cpu") == []


def test_a_check_that_hangs_is_named_and_keeps_nobody_else_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    wait, within_s = select.select, iter([0.2, None])  # on a busy machine the healthy check may take longer than 0.2 s
    monkeypatch.setattr(select, "select", lambda read, write, urgent, left_s: wait(read, write, urgent, next(within_s)))
    began = time.monotonic()
    checks = {"/scratch": lambda: time.sleep(60), "memory": lambda: NodeProblem("none left")}
    hangs, answered = answers(checks, within_s=0.2)
    assert unnamed(hangs.text, "/scratch", "0.2 s") == []
    assert answered == NodeProblem("none left")
    assert time.monotonic() - began < 50
    os.waitpid(-1, 0)  # reap the killed check, which an agent does at its end


def test_a_check_that_breaks_is_a_problem() -> None:
    def breaks() -> None:
        raise KeyError("MemAvailable")

    assert answers({"memory": breaks}, within_s=20) == [NodeProblem("KeyError: 'MemAvailable'")]


def test_a_problem_may_be_longer_than_a_pipe_holds() -> None:
    long = NodeProblem("a path of a mount, and " * 10_000)
    assert answers({"/scratch": lambda: long}, within_s=20) == [long]


def test_the_wrong_clock_is_the_one_that_most_others_contradict() -> None:
    assert wrong_clocks({"a": 0, "b": 59, "c": -59}) == {}
    wrong = wrong_clocks({"a": 0, "b": 90})
    assert list(wrong) == ["b"]
    assert unnamed(wrong["b"].text, "clock", "90 s", "ahead", "a") == []
    assert list(wrong_clocks({"a": 0, "b": 90, "c": 91})) == ["a"]


FOUR = Nvml("GPU-a", "GPU-b", "GPU-c", "GPU-d")
PARTS = Nvml("GPU-a", mig=("MIG-x", "MIG-y"))


@pytest.mark.parametrize(
    ("nvml", "visible"),
    [
        (FOUR, None),
        (FOUR, "2,3"),
        (FOUR, "GPU-d,GPU-a"),
        (PARTS, "MIG-x,MIG-y"),
        (Nvml("GPU-a1b2", "GPU-c3"), "GPU-a1,GPU-c"),
        (Nvml("GPU-a", "GPU-b", "GPU-c", used={"GPU-a": 0.9}), "1,2"),
    ],
    ids=["all", "numbers", "UUIDs", "parts of a GPU", "beginnings of UUIDs", "another one is in use"],
)
def test_two_ranks_have_a_gpu_each(nvml: Nvml, visible: str | None) -> None:
    assert device_problem(2, {"CUDA_VISIBLE_DEVICES": visible} if visible else {}, nvml) is None


@pytest.mark.parametrize(
    ("nvml", "visible", "facts"),
    [
        (Nvml("GPU-a", None), None, ["1 of 2 GPUs"]),
        (FOUR, "", ["0 of 2 GPUs", "CUDA_VISIBLE_DEVICES", "''"]),
        (FOUR, "0,7", ["GPU", 7, "CUDA_VISIBLE_DEVICES", "'0,7'"]),
        (FOUR, "GPU-a,GPU-z", ["GPU-z", "CUDA_VISIBLE_DEVICES", "'GPU-a,GPU-z'"]),
        (Nvml("GPU-a", "GPU-b", used={"GPU-b": 0.9}), None, ["memory", "GPU-b", "90%"]),
    ],
    ids=["one is another job's", "none is shown", "a number too high", "an unknown UUID", "one is in use"],
)
def test_a_gpu_that_is_missing_or_taken_is_named(nvml: Nvml, visible: str | None, facts: list[object]) -> None:
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert unnamed(str(device_problem(2, env, nvml)), *facts) == []


def test_a_driver_that_does_not_answer_is_a_problem() -> None:
    problem = device_problem(1, {}, Nvml())
    assert unnamed(str(problem), "NVIDIA driver", "nvmlInit_v2 returned 9", "nvidia-smi") == []


def test_a_node_without_the_drivers_library_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert device_problem(8, {}) is None
