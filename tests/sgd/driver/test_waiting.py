"""The driver while it waits for the jobs of its agents: what it logs, when it gives up, and a Ctrl-C; on a PBS."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_det.schedulers import shared_answers
from hpc_det.sgd import TorchTrainer
from hpc_det.sgd.capacity import GangJob
from hpc_det.sgd.driver import nodes
from hpc_det.sgd.driver.failures import NotEnoughRanks
from hpc_det.sgd.elastic import agents, wait_report
from hpc_det.sgd.elastic.meeting import announce
from hpc_det.submit.submitit_pbs.executor import _is_pbs
from tests.facts import refused, unnamed
from tests.labs.pbs_lab import PbsLab
from tests.sgd.trained import Linear
from tests.wait import DEADLINE_S, wait_for

REPOSITORY = Path(__file__).parents[3]
NOWHERE = "127.0.0.9", 9
"""An address and a port at which no process listens."""


@pytest.fixture(autouse=True)
def _site(pbs_lab: PbsLab, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setattr(shared_answers, "ASK_S", 0.2)
    monkeypatch.setattr(wait_report, "REPORT_S", 0.2)
    monkeypatch.setattr(nodes, "POLL_S", 0.1)
    yield
    _is_pbs.cache_clear()


def jobs(lab: PbsLab) -> list[str]:
    return [line.split()[0] for line in lab.run("qstat").splitlines()[2:]]


def test_agents_that_do_not_reach_the_driver_fail_and_it_gives_up_with_their_reason(
    pbs_lab: PbsLab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, state_folder: Path
) -> None:
    monkeypatch.setattr(nodes, "MOST_STARTS", 2)
    monkeypatch.setattr(agents, "MODULE", "tests.sgd.capacity.hurried_agent")
    monkeypatch.setattr(nodes, "announce", lambda run, host, port: announce(run, *NOWHERE))
    gang = GangJob("pbs", nodes=1, cpus_per_task=1, timeout_min=10)
    reason = "pbsn1", "127.0.0.1", "lo", "127.0.0.9:9", "Connection refused"
    with refused(NotEnoughRanks, *reason, "interface=", gang.host, "2 starts"):
        TorchTrainer(training_operator_cls=Linear, executor=gang)
    assert [line for line in caplog.messages if not unnamed(line, *reason)] != []
    assert [pbs_lab.job(f"{number}.pbshead")["Exit_status"] for number in range(2)] == [1, 1]
    assert jobs(pbs_lab) == []
    assert list((state_folder / "sgd").iterdir()) == []


def test_an_agent_that_dies_before_it_looks_for_the_driver_is_named_with_its_last_words(
    pbs_lab: PbsLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "MOST_STARTS", 1)
    monkeypatch.setattr(agents, "MODULE", "no_such_module")
    with refused(NotEnoughRanks, "job 0", "No module named no_such_module", "1 starts"):
        TorchTrainer(training_operator_cls=Linear, executor=GangJob("pbs", cpus_per_task=1, timeout_min=10))
    assert jobs(pbs_lab) == []


def test_a_job_in_the_queue_is_reported_with_its_reason_and_cancelled_by_a_ctrl_c(
    pbs_lab: PbsLab, caplog: pytest.LogCaptureFixture, state_folder: Path
) -> None:
    gang = GangJob("pbs", nodes=2, cpus_per_task=1000, slots_per_node=1, timeout_min=10)

    def interrupt() -> None:
        wait_for(lambda: [line for line in caplog.messages if "job 0 is queued (Can Never Run" in line], DEADLINE_S)
        os.kill(os.getpid(), signal.SIGINT)

    end = threading.Thread(target=interrupt)
    end.start()
    with pytest.raises(KeyboardInterrupt):
        TorchTrainer(training_operator_cls=Linear, num_workers=2, executor=gang)
    end.join()
    assert unnamed(caplog.text, "0 of 2 ranks", gang.host) == []
    assert jobs(pbs_lab) == []
    assert list((state_folder / "sgd").iterdir()) == []
