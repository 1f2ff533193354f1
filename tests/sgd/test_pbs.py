"""TorchTrainer on a PBS: in the job of the driver, and in a separate job that is preempted."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_det.node.process import is_stopped
from hpc_det.schedulers import shared_answers
from hpc_det.sgd import TorchTrainer
from hpc_det.sgd.capacity import GangJob
from hpc_det.submit.submitit_pbs.executor import _is_pbs
from tests.labs.pbs_lab import PbsLab, can_have_hosts
from tests.sgd.local_nodes import LocalNodes
from tests.sgd.trained import Linear
from tests.wait import DEADLINE_S, wait_for

REPOSITORY = Path(__file__).parents[2]
DRIVER = """
import sys
from pathlib import Path
from hpc_det.sgd import TorchTrainer
from tests.sgd.trained import Linear

once = str(Path(sys.argv[1]) / "once")
with TorchTrainer(training_operator_cls=Linear, num_workers=2, config={"fatal": (1, 11, once)}) as trainer:
    hosts = trainer.apply_all_workers(lambda: __import__("socket").gethostname())
    losses = [float(trainer.train()["train_loss"]) for _ in range(2)]
    print(sorted(hosts), losses, file=open(Path(sys.argv[1]) / "told", "w"))
"""


@pytest.mark.skipif(not can_have_hosts(), reason="simulated hosts with different names need root")
def test_a_driver_in_a_job_finds_its_hosts_and_survives_a_rank(pbs_lab: PbsLab, tmp_path: Path) -> None:
    (tmp_path / "driver.py").write_text(DRIVER)
    run = f'exec {sys.executable} "{tmp_path}/driver.py" "{tmp_path}"'
    script = f"#!/bin/bash\ncd {REPOSITORY}\nexport PYTHONPATH={REPOSITORY}\n{run}\n"
    select = ["-l", "select=2:ncpus=1:mpiprocs=1,place=scatter", "-v", "CUDA_VISIBLE_DEVICES="]
    job = pbs_lab.submit(*select, script=script)
    assert pbs_lab.wait_for(job, "F", DEADLINE_S)["Exit_status"] == 0
    assert (tmp_path / "once").exists()
    hosts, losses = (tmp_path / "told").read_text().strip().split("] [")
    assert hosts == "['pbsn1', 'pbsn2'"
    first, second = map(float, losses.rstrip("]").split(","))
    assert second < first


@pytest.fixture
def _submits(pbs_lab: PbsLab, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(shared_answers, "ASK_S", 0.2)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    yield
    _is_pbs.cache_clear()


@pytest.mark.long
@pytest.mark.usefixtures("_submits", "_fork_server")
def test_a_job_that_is_preempted_is_followed_by_another_and_no_bit_is_lost(pbs_lab: PbsLab) -> None:
    gang = GangJob("pbs", nodes=2, cpus_per_task=1, timeout_min=10, pbs_queue="low")
    with TorchTrainer(training_operator_cls=Linear, num_workers=2, executor=gang) as its:
        found = [its.train()]
        first = [job.job_id for job in gang._jobs]
        pbs_lab.set_preempt_order("D")
        other = pbs_lab.preempt(seconds=0)
        while [job.job_id for job in gang._jobs] == first:  # PBS preempts it in a separate scheduling cycle
            found.append(its.train())
    with TorchTrainer(training_operator_cls=Linear, num_workers=2, executor=LocalNodes(1, 2)) as undisturbed:
        assert [undisturbed.train() for _ in found] == found
    pbs_lab.wait_for(other, "F", DEADLINE_S)
    assert pbs_lab.run("qstat") == ""


@pytest.mark.long
@pytest.mark.usefixtures("_submits", "_fork_server")
def test_a_job_that_is_suspended_for_long_goes_on_with_the_same_ranks(pbs_lab: PbsLab) -> None:
    gang = GangJob("pbs", nodes=2, cpus_per_task=1, timeout_min=10, pbs_queue="low")
    with TorchTrainer(training_operator_cls=Linear, num_workers=2, executor=gang) as its:
        its.train()
        (job,) = gang._jobs
        ranks = its.apply_all_workers(os.getpid)
        pbs_lab.run("qsig", "-s", "suspend", job.job_id, manager=True)
        wait_for(lambda: all(map(is_stopped, ranks)))
        nodes = its._open_gang._nodes
        patience = nodes._patience
        nodes._patience = replace(patience, heartbeat_timeout_s=0.5)  # half a second of silence then counts as long

        def resume() -> None:
            wait_for(lambda: nodes.are_suspended)
            nodes._patience = patience
            pbs_lab.run("qsig", "-s", "resume", job.job_id, manager=True)

        end = threading.Thread(target=resume)
        end.start()
        assert its.train()["epoch"] == 2
        end.join()
        assert its.apply_all_workers(os.getpid) == ranks
