"""Jobs of this machine, as its processes tell of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpc_det.node.files import write_atomic
from hpc_det.schedulers import local
from hpc_det.schedulers.local import JobId
from hpc_det.schedulers.queue import this_user
from tests.plan.plans import job_plan
from tests.wait import wait_for

Start = Callable[..., int]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A process that looks like a job of an experiment in `tmp_path`; its pid."""
    started: list[subprocess.Popen[bytes]] = []

    def run(module: str = local.JOB_MODULE, *, leads: bool = True) -> int:
        waits = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]
        process = subprocess.Popen([*waits, module, str(tmp_path), "1"], stdin=subprocess.PIPE, start_new_session=leads)
        started.append(process)
        # Popen returns a moment before the new program's words can be read.
        wait_for(lambda: str(tmp_path) in Path(f"/proc/{process.pid}/cmdline").read_text())
        return process.pid

    yield run
    for process in started:
        process.communicate()


def found(folder: Path) -> list[str]:
    return [job.job_id for job in local.jobs() if job.path == str(folder)]


def test_a_job_is_a_process_that_leads_its_session(start: Start, tmp_path: Path) -> None:
    plan = job_plan(scheduler="local", nodes=1, job_nodes=1, folder=str(tmp_path))
    write_atomic(tmp_path / "plan.json", plan.to_json())
    pid = start()
    start(leads=False)
    start("some.other.module")
    (job,) = (job for job in local.jobs() if job.path == str(tmp_path))
    assert job.job_id == str(JobId.of(pid))
    assert (job.name, job.user, job.pool, job.slots, job.running) == ("digits", this_user(), "local", 4, 1)
    assert job.submitted == pytest.approx(time.time(), abs=60)


def test_a_job_of_a_scheduler_on_this_node_is_not_one_of_this_machine(start: Start, tmp_path: Path) -> None:
    write_atomic(tmp_path / "plan.json", job_plan(folder=str(tmp_path)).to_json())
    start()
    assert found(tmp_path) == []


def test_an_experiment_that_was_deleted_or_damaged_hides_no_other(start: Start, tmp_path: Path) -> None:
    start()
    assert found(tmp_path) == []
    write_atomic(tmp_path / "plan.json", "{")
    assert found(tmp_path) == []


def test_a_plan_that_nobody_ever_writes_is_not_waited_for(start: Start, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "plan.json")
    start()
    assert found(tmp_path) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")
def test_a_plan_of_another_user_is_not_read(start: Start, tmp_path: Path) -> None:
    plan = job_plan(scheduler="local", nodes=1, job_nodes=1, folder=str(tmp_path))
    write_atomic(tmp_path / "plan.json", plan.to_json())
    os.chown(tmp_path / "plan.json", 12345, 12345)
    start()
    assert found(tmp_path) == []


def test_a_name_is_no_command_to_a_terminal(start: Start, tmp_path: Path) -> None:
    plan = job_plan(scheduler="local", nodes=1, job_nodes=1, folder=str(tmp_path), name="a\x1b[2J")
    write_atomic(tmp_path / "plan.json", plan.to_json())
    start()
    assert [job.name for job in local.jobs() if job.path == str(tmp_path)] == ["a\\x1b[2J"]
