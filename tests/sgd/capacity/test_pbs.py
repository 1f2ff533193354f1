"""Node agents on a PBS: in the job of the driver, and in separate jobs."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_det.schedulers import shared_answers
from hpc_det.sgd.capacity import GangJob, Pool
from hpc_det.submit.submitit_pbs.executor import PbsExecutor, _is_pbs
from tests.labs.pbs_lab import PbsLab, can_have_hosts
from tests.sgd.capacity.driver import Run, job_counts, renew_until
from tests.wait import DEADLINE_S, wait_for

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def _submits(pbs_lab: PbsLab, stand_in: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(shared_answers, "ASK_S", 0.2)
    yield
    _is_pbs.cache_clear()


@pytest.mark.skipif(not can_have_hosts(), reason="simulated hosts with different names need root")
def test_agents_of_an_allocation_start_again_where_they_were_killed(pbs_lab: PbsLab, run: Run) -> None:
    script = f'#!/bin/bash\ncd {REPOSITORY}\nexec {sys.executable} -m tests.sgd.capacity.driver "{run.path}"\n'
    job = pbs_lab.submit(
        "-l", "select=3:ncpus=2:mpiprocs=2,place=scatter", "-v", "CUDA_VISIBLE_DEVICES=", script=script
    )
    agents = run.wait_for_agents(3)
    assert [(note["host"], note["slots"]) for note in agents] == [("pbsn1", 2), ("pbsn2", 2), ("pbsn3", 2)]
    os.kill(agents[1]["pid"], signal.SIGKILL)
    run.tell("renew pbsn2")
    assert [note["host"] for note in run.wait_for_agents(4)] == ["pbsn1", "pbsn2", "pbsn2", "pbsn3"]
    run.hang_up()
    run.tell("stop")
    wait_for((run.path / "stopped").exists, DEADLINE_S)
    assert pbs_lab.wait_for(job, "F", DEADLINE_S)["Exit_status"] == 0
    assert not list(run.path.glob(".nodes-*"))


@pytest.mark.long
@pytest.mark.usefixtures("_submits")
def test_a_gang_hears_of_its_preemption_and_the_driver_submits_the_next_one(pbs_lab: PbsLab, run: Run) -> None:
    pbs_lab.set_kill_delay("low", 5)  # the stand-in agents ignore the stop signals
    gang = GangJob("pbs", nodes=2, cpus_per_task=3, timeout_min=10, pbs_queue="low")
    assert (gang.slots, gang.has_gpus) == (6, False)
    gang.start(run.path, gang.slots)
    run.wait_for_agents(2)
    (job,) = gang._jobs
    pbs_lab.set_preempt_order("D")
    other = pbs_lab.preempt(seconds=0)
    wait_for(lambda: "SIGUSR2" in {name for _, name in run.warnings()}, DEADLINE_S)  # in_job forwards it to agent 1
    renew_until(lambda: len(run.agents()) == 4, gang, run)
    assert [its.job_id for its in gang._jobs] != [job.job_id]
    assert not list(run.path.glob("jobs/*_next"))  # submitit has requeued nothing
    pbs_lab.wait_for(other, "F", DEADLINE_S)
    run.hang_up()
    gang.stop()
    assert pbs_lab.run("qstat") == ""


@pytest.mark.usefixtures("_submits")
def test_a_pool_has_as_many_jobs_as_it_may_and_none_once_it_is_stopped(
    pbs_lab: PbsLab, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpc_det.sgd.capacity.job.LEAVE_S", 0.1)
    executor = PbsExecutor(run.path / "of-the-user")
    executor.update_parameters(timeout_min=10, gpus_per_node=4, queue="low")
    pool = Pool(executor, nodes=(2, 4))
    assert (pool.min_slots, pool.slots, pool.has_gpus) == (8, 16, True)
    pool.start(run.path, pool.slots)
    run.wait_for_agents(3)
    wait_for(lambda: job_counts(pool) == [(3, 4, "running"), (1, 4, "queued")], DEADLINE_S, pool.state)
    pool.stop()  # the driver has not asked the agents to exit
    assert pbs_lab.run("qstat") == ""
    assert not (run.path / "of-the-user").exists()
    assert executor.parameters == {"timeout_min": 10, "gpus_per_node": 4, "queue": "low"}
