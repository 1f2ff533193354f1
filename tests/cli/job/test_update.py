"""hpc-det job update, update-batch and experiment set priority: moving jobs in the queue."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_det.node.json_files import write_json
from tests.cli.conftest import Command
from tests.cli.job.conftest import records
from tests.cli.life import Life
from tests.cli.slurm_on_paper import SlurmOnPaper
from tests.facts import each_names, unnamed
from tests.labs.pbs_lab import PbsLab
from tests.labs.slurm import SlurmLab
from tests.stub import Stub
from tests.stub import stub as stub
from tests.wait import wait_for

# --- update


def test_a_job_goes_ahead_of_another_and_behind_it_again(hpc_det: Command, queue: SlurmOnPaper) -> None:
    assert hpc_det("job", "update", "4714", "--ahead-of", "4712").succeeds("job 4712", "now")
    assert queue.order() == ["4713", "4714", "4712", "4715"]
    assert hpc_det("job", "update", "4714", "--behind-of", "4715").succeeds("job 4715", "now")
    assert queue.order() == ["4713", "4712", "4715", "4714"]


def test_an_experiments_job_changes_pools(hpc_det: Command, queue: SlurmOnPaper) -> None:
    assert hpc_det("job", "update", "4714", "--resource-pool", "high").succeeds("Job 4714", "high", "now")
    assert [record["id"] for record in records(hpc_det, "-p", "high")] == ["4714"]


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (["--priority", "0"], ["job 4712", "'0'", "1", "99"]),
        (["--priority", "high"], ["job 4712", "'high'", "1", "99"]),
        (["--weight", "2"], ["job 4712", "weights", "Slurm", "PBS"]),
        (["--resource-pool", "hihg"], ["job 4712", "'hihg'", "high, low"]),
        (["--ahead-of", "4712"], ["job 4712", "ahead"]),
        (["--behind-of", "4711"], ["job 4711", "running"]),
        (["--ahead-of", "9"], ["job 9", "hpc-det job list --all-pools"]),
        (["--behind-of", "4716"], ["job 4716", "4716_3, 4716_5"]),
        ([], ["--priority", "--weight"]),
        (["--priority", "3", "--weight", "3"], ["--priority", "--weight"]),
    ],
)
def test_what_cannot_be_asked_for_is_refused_with_a_reason(
    hpc_det: Command, queue: SlurmOnPaper, arguments: list[str], facts: list[str]
) -> None:
    for job_id in ("4716_3", "4716_5"):
        queue.queue(job_id)
    code, _, err = hpc_det("job", "update", "4712", *arguments)
    assert (code, unnamed(err, *facts)) == (2, [])
    assert queue.changes == []


def test_no_job_is_named(hpc_det: Command, queue: SlurmOnPaper) -> None:
    assert not unnamed(hpc_det("job", "hold", "4712,").err, "'4712,'", "4711,4712")
    assert queue.changes == []


def test_jobs_that_nobody_here_may_change_are_all_named_before_any_is_changed(
    hpc_det: Command, queue: SlurmOnPaper
) -> None:
    code, out, err = hpc_det("job", "update", "4712,4711,4713,99", "--priority", "60")
    assert (code, out) == (2, "")
    each_names(err.splitlines(), ["job 4711", "running"], ["job 4713", "bob", "operators"], ["job 99", "--all-pools"])
    assert hpc_det("job", "update", "4715", "--resource-pool", "high").fails(2, "job 4715", "experiment", "pools")
    assert queue.changes == []


def test_jobs_of_two_pools_have_no_order(hpc_det: Command, queue: SlurmOnPaper) -> None:
    queue.jobs["4714"].partition = "high"
    shown = hpc_det("job", "update", "4714", "--ahead-of", "4712").err
    assert not unnamed(shown, "job 4714", "pool high", "job 4712", "pool low")


@pytest.mark.parametrize("arguments", [("4714", "--priority", "10"), ("4714", "--ahead-of", "4713")])
def test_what_only_operators_may_is_told_as_theirs(
    hpc_det: Command, queue: SlurmOnPaper, arguments: tuple[str, ...]
) -> None:
    code, _, err = hpc_det("job", "update", *arguments)
    first, last = err.splitlines()
    assert code == 1
    assert not unnamed(first, "Access/permission denied for job 4714", "operators", "administrators")
    assert not unnamed(last, "changed")


# --- update-batch


def test_a_batch_is_done_in_its_order(hpc_det: Command, queue: SlurmOnPaper) -> None:
    result = hpc_det("job", "update-batch", "4712.priority=60", "4714.ahead-of=4712", "4714.resource-pool=high")
    facts = [["Job 4712", "priority 60"], ["Job 4714", "job 4712", "already"], ["Job 4714", "pool high"]]
    each_names(result.out.splitlines(), *facts)


def test_a_batch_that_is_refused_in_the_middle_is_put_back(hpc_det: Command, queue: SlurmOnPaper) -> None:
    before = queue.order()
    code, out, err = hpc_det("job", "update-batch", "4712.priority=60", "4714.resource-pool=high", "4715.priority=1")
    assert (code, out) == (1, "")
    each_names(err.splitlines(), ["Access/permission denied for job 4715"], ["undone"])
    assert queue.order() == before
    assert {job.partition for job in queue.jobs.values()} == {"low"}


def test_what_was_done_for_a_part_of_an_array_is_put_back(hpc_det: Command, queue: SlurmOnPaper) -> None:
    array = queue.queue("4716_[0-3]")
    queue.ended = "4716_0"
    code, _, err = hpc_det("job", "update", "4716", "--priority", "60")
    assert (code, array.nice) == (1, 0)
    assert not unnamed(err, "4716_0: Job has already finished", "operators")


def test_what_cannot_be_put_back_is_said_with_its_command(hpc_det: Command, queue: SlurmOnPaper) -> None:
    queue.jobs["4712"].nice = -5  # only operators may set it
    err = hpc_det("job", "update-batch", "4712.priority=60", "4715.priority=1").err
    assert not unnamed(err, "scontrol update JobId=4712 Nice=-5: scontrol: refused")


def test_an_order_that_does_not_come_is_put_back(hpc_det: Command, queue: SlurmOnPaper) -> None:
    queue.deaf_to = lambda command: command == "scontrol update JobId=4712 Nice=3"
    code, _, err = hpc_det("job", "update", "4714", "--ahead-of", "4712")
    assert code == 1
    taken = "`scontrol update JobId=4712 Nice=3`"
    each_names(err.splitlines(), ["Job 4714", "job 4712", taken], ["undone"])


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("4712", ["'4712'", "JOB.OPERATION=VALUE", "4711.priority=60"]),
        ("4712.priority=", ["'4712.priority='", "JOB.OPERATION=VALUE"]),
        ("4712.pirority=3", ["job 4712", "'pirority'", "'priority'"]),
        ("12.pbs.zzz=3", ["job 12.pbs", "'zzz'", "priority, weight, resource-pool, ahead-of, behind-of"]),
    ],
)
def test_what_is_no_update_is_told_with_what_is(
    hpc_det: Command, queue: SlurmOnPaper, text: str, facts: list[str]
) -> None:
    code, _, err = hpc_det("job", "update-batch", "4714.priority=60", text)
    assert (code, unnamed(err, *facts)) == (2, [])
    assert queue.changes == []


# --- the stand-in PBS and the real Slurm


def test_on_pbs(hpc_det: Command, pbs_lab: PbsLab, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """On PBS, users may change the priorities and positions of their jobs."""
    monkeypatch.setattr("hpc_det.cli.job.list.schedulers_here", lambda which: ["pbs"])
    pbs_lab.submit("-q", "low", "-l", "select=3:ncpus=4", "--", "/bin/sleep", "600")
    folder = Life.submitted(root).folder
    waits = ("-q", "low", "-l", "select=3:ncpus=4", "-o", folder.jobs / "1.log", "--", "/bin/true")
    first, second, third = (pbs_lab.submit(*map(str, waits)) for _ in range(3))

    def order(pool: str = "low") -> list[object]:
        return [job["id"] for job in records(hpc_det, "-p", pool) if job["type"] == "EXPERIMENT"]

    assert hpc_det("job", "update", third, "--ahead-of", first).succeeds(f"Job {third}", f"job {first}")
    assert order() == [third, first, second]
    result = hpc_det("job", "update-batch", f"{first}.priority=10", f"{second}.resource-pool=workq")
    assert result.succeeds(f"Job {first}", "priority 10", f"Job {second}", "pool workq")
    assert "job_sort_formula" in result.out, "a stock scheduler's order does not depend on priorities"
    pbs_lab.run("qmgr", "-c", "set server job_sort_formula = job_priority*1000", manager=True)
    again = hpc_det("job", "update-batch", f"{first}.priority=10", f"{third}.ahead-of={first}")
    assert "job_sort_formula" not in again.out
    assert (pbs_lab.job(first)["Priority"], order("workq")) == (320, [second])
    without_server = first.partition(".")[0]
    assert hpc_det("job", "hold", without_server).code == 0
    assert pbs_lab.job(first)["Hold_Types"] == "u"
    assert hpc_det("job", "release", without_server).succeeds(f"job {without_server}")
    assert pbs_lab.job(first)["job_state"] == "Q"
    pbs_lab.run("qhold", "-h", "o", first, manager=True)
    assert [job["state"] for job in records(hpc_det, "-p", "low") if job["id"] == first] == ["HELD"]
    refused = hpc_det("job", "release", first)
    assert (refused.code, unnamed(refused.err, first, "operator")) == (1, [])
    assert pbs_lab.job(first)["job_state"] == "H"


@pytest.mark.slurm
def test_on_the_real_slurm(
    hpc_det: Command, slurm_lab: SlurmLab, stub: Stub, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs as an ordinary user first, then as an operator."""
    if os.geteuid() != 0:
        pytest.skip("becomes two users, which only root can")
    slurm_lab.use(monkeypatch)
    slurm_lab.preempt(seconds=600)
    folder = Life.submitted(root).folder.path
    monkeypatch.setattr("hpc_det.cli.job.list.this_user", lambda: "nobody")
    as_nobody = "setpriv --reuid=nobody --regid=nogroup --clear-groups"
    for command in ("sbatch", "squeue", "scontrol"):
        stubbed = stub(command, f'exec {as_nobody} {slurm_lab.bin / command} "$@"')
    monkeypatch.setenv("PATH", f"{stubbed.parent}{os.pathsep}{os.environ['PATH']}")

    def submit(*flags: str) -> str:
        asked = ["--chdir", str(folder), "--output=/dev/null", *flags, "--wrap=true"]
        return slurm_lab.run("sbatch", "--parsable", *asked).strip()

    def order(pool: str = "low") -> list[object]:
        return [job["id"] for job in records(hpc_det, "-p", pool) if job["user"] == "nobody"]

    first, second, third = submit(), submit(), submit()
    array = submit("--array=0-8:2%2")
    wait_for(lambda: order() == [first, second, third, array])
    assert hpc_det("job", "update", third, "--ahead-of", first).code == 0
    assert order()[:2] == [third, first]
    assert hpc_det("job", "update", third, "--behind-of", array).code == 0
    assert order()[-1] == third
    assert hpc_det("job", "update", f"{first},{array}", "--priority", "60").code == 0
    assert order() == [second, third, first, array]
    assert hpc_det("job", "update", second, "--resource-pool", "high").code == 0
    assert (order("high"), order()) == ([second], [third, first, array])

    refused = hpc_det("job", "update-batch", f"{first}.resource-pool=high", f"{array}.priority=1")
    assert (refused.code, unnamed(refused.err, "Access/permission denied", "operators")) == (1, [])
    assert order() == [third, first, array]
    assert hpc_det("job", "hold", array).code == 0
    assert records(hpc_det)[-1]["state"] == "HELD"
    assert hpc_det("job", "release", array).code == 0
    assert records(hpc_det)[-1]["state"] == "QUEUED"
    assert "Invalid --nice value" in slurm_lab._ended("sbatch", "--nice=-1", "--wrap=true").stderr

    for command in ("squeue", "scontrol"):  # as an operator
        stub(command, f'exec {slurm_lab.bin / command} "$@"')
    assert hpc_det("job", "update", array, "--priority", "1").code == 0
    assert order()[0] == array


# --- of an experiment


def test_all_jobs_of_an_experiment_get_a_priority(hpc_det: Command, slurm: SlurmOnPaper, root: Path) -> None:
    life = Life.submitted(root, job_id="4712")
    slurm.queue("4712", folder=str(life.folder.path))
    assert hpc_det("e", "set", "priority", "1", "60").succeeds("Job 4712", 60, "now")
    assert slurm.jobs["4712"].nice == 1800
    assert "expected" in hpc_det("e", "set", "priority", "1", "x").err


def test_jobs_that_have_ended_or_run_are_left_out(hpc_det: Command, slurm: SlurmOnPaper, root: Path) -> None:
    life = Life.submitted(root, job_id="4711")
    write_json(life.folder.next_jobs(1, 0), {"jobs": ["4711", "4712", "4713"]})
    slurm.queue("4712", folder=str(life.folder.path), state="RUNNING")
    slurm.queue("4713", folder=str(life.folder.path))
    assert hpc_det("e", "set", "priority", "1", "60").succeeds("Job 4713", 60, "now")


def test_an_experiment_without_a_job_that_waits_has_none_to_change(
    hpc_det: Command, slurm: SlurmOnPaper, life: Life
) -> None:
    shown = hpc_det("e", "set", "priority", "1", "60")
    assert shown.fails(2, "experiment 1")


def test_a_priority_is_asked_for_and_shown(hpc_det: Command, queue: SlurmOnPaper) -> None:
    assert hpc_det("job", "update", "4712,4714", "--priority", "60").succeeds("Job 4712", "Job 4714", "priority 60")
    assert [(record["id"], record["priority"]) for record in records(hpc_det)][1:] == [
        ("4713", 42),
        ("4715", 42),
        ("4712", 60),
        ("4714", 60),
    ]
    assert hpc_det("job", "update", "4712", "--priority", "60").succeeds("Job 4712", 60, "already")
