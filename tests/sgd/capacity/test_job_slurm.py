"""Jobs of node agents on a real Slurm: a gang is preempted and returns, a pool shrinks and grows again."""

from __future__ import annotations

import re

import pytest

from hpc_det.sgd import TorchTrainer
from hpc_det.sgd.capacity import GangJob, Pool
from hpc_det.sgd.driver import nodes
from hpc_det.sgd.driver.failures import NotEnoughRanks
from hpc_det.sgd.elastic import agents
from tests.facts import refused
from tests.labs.slurm import SlurmLab
from tests.sgd.capacity.driver import Run, job_counts, renew_until
from tests.sgd.trained import Linear
from tests.wait import wait_for

pytestmark = pytest.mark.slurm


@pytest.fixture(autouse=True)
def _on_the_lab(slurm_lab: SlurmLab, stand_in: None, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm_lab.use(monkeypatch)


@pytest.fixture
def run(slurm_lab: SlurmLab) -> Run:
    return Run.make(slurm_lab.folder() / "run")


def queue(lab: SlurmLab) -> list[str]:
    return lab.run("squeue", "--noheader", "--array", "--format=%T").split()


@pytest.mark.long
def test_a_gang_hears_of_its_preemption_and_the_driver_submits_the_next_one(slurm_lab: SlurmLab, run: Run) -> None:
    gang = GangJob("slurm", nodes=2, gpus_per_node=2, slurm_partition="low")
    assert (gang.host, gang.slots, gang.has_gpus) == (slurm_lab.login_address, 4, True)
    gang.start(run.path, gang.slots)
    agents = run.wait_for_agents(2)
    assert [note["slots"] for note in agents] == [2, 2]
    (job,) = gang._jobs
    for name in ("USR1", "USR2", "TERM"):
        slurm_lab.run("scancel", f"--signal={name}", job.job_id)
    everybody = {(note["host"], f"SIG{name}") for note in agents for name in ("USR1", "USR2", "TERM")}
    wait_for(lambda: run.warnings() == everybody)
    assert slurm_lab.job(job.job_id)["Restarts"] == "0"
    slurm_lab.run("scancel", "--signal=KILL", f"{job.job_id}.0")
    renew_until(lambda: len(run.agents()) == 4, gang, run)
    assert [old.job_id for old in gang._jobs] != [job.job_id]
    run.hang_up()
    gang.stop()
    assert queue(slurm_lab) == []


def test_a_pool_keeps_its_size_with_other_nodes(slurm_lab: SlurmLab, run: Run) -> None:
    pool = Pool("slurm", nodes=(1, 4), cpus_per_task=8, slurm_partition="low")
    assert (pool.min_slots, pool.slots, pool.has_gpus) == (8, 32, False)
    pool.start(run.path, pool.slots)
    assert run.wait_for_agents(3) != []
    assert run.hosts() == ["node1", "node2", "node3"]
    full = [(3, 4, "running"), (1, 4, "queued")]
    wait_for(lambda: job_counts(pool) == full)
    slurm_lab.run("scontrol", "update", "NodeName=node3", "State=DOWN", "Reason=taken away")
    renew_until(lambda: job_counts(pool) != full, pool, run)
    renew_until(lambda: job_counts(pool) == full and len(run.agents()) == 4, pool, run)  # the node is available again
    run.hang_up()
    pool.stop()
    assert queue(slurm_lab) == []


def test_agents_that_do_not_reach_the_driver_fail_and_leave_no_job(
    slurm_lab: SlurmLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "MODULE", "tests.sgd.capacity.hurried_agent")
    monkeypatch.setattr(nodes, "MOST_STARTS", 1)
    gang = GangJob("slurm", nodes=2, interface="lo", slurm_partition="low")  # each node has its own
    reason = "127.0.0.1 (lo)", "Connection refused", "interface=", slurm_lab.login_address
    with refused(NotEnoughRanks, *reason) as caught:
        TorchTrainer(training_operator_cls=Linear, num_workers=2, executor=gang)
    assert queue(slurm_lab) == []
    # The first agent that fails may end the job before the other one has written why it cannot connect.
    assert {*re.findall(r"(\S+) cannot connect", str(caught.value))} & {"node1", "node2"}
    (job,) = re.findall(r"job (\d+) has ended", str(caught.value))
    assert slurm_lab.job(job)["JobState"] == "FAILED"
