"""Programs that were written for RaySGD run unmodified."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.compat.programs import HOOKED, python
from tests.facts import unnamed

pytestmark = pytest.mark.integration

PROGRAMS = Path(__file__).with_name("raysgd")


def test_nothing_that_was_written_for_raysgd_names_hpc_det() -> None:
    assert [path for path in PROGRAMS.glob("*.py") if "hpc_det" in path.read_text()] == []


def test_two_workers_fit_a_line() -> None:
    done = python(*HOOKED, str(PROGRAMS / "line.py"), "--address", "auto", "--num-workers", "2")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "workers": 2,
        "samples": [40, 40],
        "is_better": True,
        "rates": [0.005, 0.005],
        "validated": 40,
        "outputs": 1,
    }
    assert not unnamed(done.stderr, "ray.init", "address='auto'")


def test_a_gpu_that_is_not_there_is_refused() -> None:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = python(*HOOKED, str(PROGRAMS / "line.py"), "--use-gpu", env=env)
    assert not unnamed(done.stderr.splitlines()[-1], "BadArgument", "use_gpu", "True", "'auto'")


@pytest.mark.long
def test_searches_find_the_better_rate(tmp_path: Path) -> None:
    env = {**os.environ, "HPC_DET_ROOT": str(tmp_path)}
    done = python(*HOOKED, str(PROGRAMS / "search.py"), env=env)
    assert done.returncode == 0, done.stderr
    *table, facts = done.stdout.splitlines()
    assert json.loads(facts) == {"population": 2, "columns": ["config/lr"], "best": {"lr": 0.1}, "is_loaded": True}
    names, *trials = table[-3:]  # after a line for each change of a trial
    assert (names.split()[:2], names.split()[-2:]) == (["trial", "status"], ["iter", "loss"])
    assert [line.split()[:2] for line in trials] == [["1", "TERMINATED"], ["2", "TERMINATED"]]
    assert not unnamed(done.stderr, "ray.init", "address='auto'", "keep_checkpoints_num", "callbacks", "queue_trials")
