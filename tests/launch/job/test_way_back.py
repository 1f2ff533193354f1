"""Jobs on a Slurm of stubs: how they come back. The real one has its turn in tests/e2e/test_slurm.py."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from hpc_det.store.files import read_json, write_json
from tests.launch.gang import Gang
from tests.stub import Stub

PREEMPTED = "JobId=7 JobState=RUNNING Reason=None PreemptTime=2026-11-20T10:42:00 EndTime=2026-11-20T11:42:00"


class Slurm:
    """Jobs get the numbers 8, 9 and so on. Each call is noted."""

    def __init__(self, stub: Stub, folder: Path) -> None:
        self._calls = folder / "calls"
        self._calls.touch()
        note = f'echo "$(basename "$0") $*" >> {self._calls}'
        stub("sbatch", f'{note}; echo $((7 + $(grep -c ^sbatch {self._calls}))); echo "$PATH" >> {folder}/paths')
        stub("scontrol", f"{note}; echo '{PREEMPTED}'")
        for name in ("scancel", "squeue"):
            stub(name, note)
        self.paths = folder / "paths"

    def calls(self, command: str) -> list[str]:
        """The arguments of its calls."""
        calls = (line.partition(" ") for line in self._calls.read_text().splitlines())
        return [arguments for name, _, arguments in calls if name == command]


@pytest.fixture
def slurm(stub: Stub, tmp_path: Path) -> Slurm:
    return Slurm(stub, tmp_path)


def job(number: int) -> dict[str, str]:
    return {"SLURM_JOB_ID": str(number), "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "node1"}


def preempt(gang: Gang, number: int) -> int:
    """Run job `number` until its ranks are up, tell it to stop, and wait for its end; its exit code."""
    process = gang.start_job(**job(number))
    gang.wait_for_ranks(0)
    gang.forget_ranks()
    os.kill(process.pid, signal.SIGTERM)
    return process.wait(timeout=30)


def test_a_successor_waits_for_the_end_of_the_job_from_its_begin_on(gang: Gang, slurm: Slurm) -> None:
    gang.plan_ranks(0, scheduler="slurm", resume="successor")
    assert preempt(gang, 7) == 0
    script = gang.experiment.script()
    assert slurm.calls("sbatch") == [f"--parsable --dependency=afterany:7 {script}"]
    assert (slurm.calls("scancel"), gang.ends()) == ([], [("preempted", "requeue")])
    assert gang.search().present == {0: "8"}, "others leave the work to the successor"

    gang.plan("true --trial", scheduler="slurm", resume="successor")
    write_json(gang.trial.outcome, {"attempt": 2, "kind": "finished", "steps": 100})
    assert gang.run_job(**job(8))[0] == 0
    assert slurm.calls("sbatch")[1:] == [f"--parsable --dependency=afterany:8 {script}"]
    assert slurm.calls("scancel") == ["9"], "nothing is left to do for it"


def test_a_job_that_finds_nothing_to_do_queues_no_other(gang: Gang, slurm: Slurm) -> None:
    gang.plan("true", scheduler="slurm", resume="resubmit")
    assert gang.run_job(**job(7))[0] == 0
    gang.plan("touch started", scheduler="slurm", resume="successor")
    assert gang.run_job(**job(8))[0] == 0
    assert slurm.calls("sbatch") == []
    assert not (gang.code / "started").exists()


def test_a_requeued_job_keeps_the_successor_that_it_has(gang: Gang, slurm: Slurm) -> None:
    gang.plan_ranks(0, scheduler="slurm", resume="successor")
    assert [preempt(gang, 7), preempt(gang, 7)] == [0, 0]
    assert len(slurm.calls("sbatch")) == 1


def test_resubmit_queues_the_next_job_when_one_ends(gang: Gang, slurm: Slurm) -> None:
    gang.plan_ranks(0, scheduler="slurm", resume="resubmit")
    process = gang.start_job(**job(7))
    gang.wait_for_ranks(0)
    assert slurm.calls("sbatch") == []
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(timeout=30) == 0
    assert len(slurm.calls("sbatch")) == 1
    assert read_json(gang.experiment.next_jobs(1, 0)) == {"jobs": ["7", "8"]}


def test_requeue_keeps_the_job(gang: Gang, slurm: Slurm) -> None:
    gang.plan_ranks(0, scheduler="slurm", resume="requeue")
    assert preempt(gang, 7) == 0
    assert (slurm.calls("sbatch"), slurm.calls("scontrol")[-1]) == ([], "requeue 7")


def test_where_nodes_lack_scontrol_another_job_is_submitted(gang: Gang, slurm: Slurm, stub: Stub) -> None:
    stub("scontrol", "echo 'scontrol: no such thing' >&2; exit 127")
    gang.plan_ranks(0, scheduler="slurm", resume="requeue")
    assert preempt(gang, 7) == 0
    assert len(slurm.calls("sbatch")) == 1
    assert gang.search().present == {0: "8"}


def test_a_chain_goes_on_until_it_is_used_up(gang: Gang, slurm: Slurm) -> None:
    gang.plan_ranks(0, scheduler="slurm", resume="chain", chain_length=1)
    write_json(gang.experiment.next_jobs(1, 0), {"jobs": ["7", "8"]})
    assert preempt(gang, 7) == 0
    assert preempt(gang, 8) == 1
    assert slurm.calls("sbatch") == []
    (problem,) = (event["problem"] for event in gang.journal.events() if event["event"] == "problem")
    assert problem == "none is left of the 1 jobs that waited behind the first"


def test_a_site_that_refuses_jobs_from_nodes_is_asked_again_at_the_end(gang: Gang, slurm: Slurm, stub: Stub) -> None:
    stub("sbatch", "echo 'sbatch: error: Access denied' >&2; exit 1")
    gang.plan_ranks(0, scheduler="slurm", resume="successor")
    assert preempt(gang, 7) == 1
    (problem,) = (event["problem"] for event in gang.journal.events() if event["event"] == "problem")
    assert "Access denied" in problem


def test_the_path_of_the_jobs_does_not_grow(gang: Gang, slurm: Slurm) -> None:
    plan = gang.plan("true", scheduler="slurm", resume="successor")
    python_folder = str(Path(plan.python).parent)
    gang.run_job(**job(7), PATH=f"{python_folder}:{os.environ['PATH']}")
    assert slurm.paths.read_text().strip() == os.environ["PATH"]
