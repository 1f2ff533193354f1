"""The queue as a table, and what moves jobs in it."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpc_det.node.json_files import write_json
from hpc_det.schedulers.queue import this_user
from hpc_det.schedulers.scheduler import CommandError
from tests.cli.conftest import Command
from tests.cli.life import Life
from tests.cli.slurm_on_paper import SlurmOnPaper
from tests.labs.pbs_lab import PbsLab
from tests.labs.slurm import SlurmLab
from tests.stub import Stub
from tests.stub import stub as stub
from tests.wait import wait_for

HEADINGS = ["#", "ID", "Type", "Job Name", "Priority", "Submitted", "Slots (acquired/needed)", "Status", "User"]


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> SlurmOnPaper:
    """This machine's scheduler, with nothing in its queue."""
    paper = SlurmOnPaper(this_user())
    paper.take_over(monkeypatch)
    return paper


@pytest.fixture
def queue(slurm: SlurmOnPaper, life: Life) -> SlurmOnPaper:
    """4711 of experiment 1 runs; 4712 and 4714 of experiment 1, 4713 of bob's and 4715, of no experiment, wait."""
    folder = str(life.folder.path)
    slurm.queue("4711", state="RUNNING", reason="None", folder=folder)
    slurm.queue("4712", folder=folder, reason="Resources")
    slurm.queue("4713", user="bob", name="bobs", folder="/home/bob/hpc_det/experiments/1")
    slurm.queue("4714", folder=folder)
    slurm.queue("4715", name="notebook")
    return slurm


def records(hpc_det: Command, *arguments: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(hpc_det("job", "list", "--json", *arguments).out)
    return found


# --- list


def test_the_queue_has_the_columns_of_determineds_and_why_and_when_beside_them(
    hpc_det: Command, queue: SlurmOnPaper
) -> None:
    code, out, _ = hpc_det("job", "list")
    headings, *rows = ([cell.strip() for cell in line.split("  ") if cell] for line in out.splitlines())
    assert (code, headings) == (0, [*HEADINGS, "Reason", "Start"])
    me = this_user()
    when = "2026-11-20 10:02:05"
    assert rows == [
        ["0", "4711", "EXPERIMENT 1", "digits", "42", when, "8/8", "SCHEDULED", me, "-", "-"],
        ["1", "4712", "EXPERIMENT 1", "digits", "42", when, "0/8", "QUEUED", me, "Resources", "2026-11-20 12:00:00"],
        ["2", "4713", "JOB", "bobs", "42", when, "0/2", "QUEUED", "bob", "Priority", "-"],
        ["3", "4714", "EXPERIMENT 1", "digits", "42", when, "0/8", "QUEUED", me, "Priority", "-"],
        ["4", "4715", "JOB", "notebook", "42", when, "0/2", "QUEUED", me, "Priority", "-"],
    ]


def test_a_job_that_the_scheduler_has_stopped_is_suspended(hpc_det: Command, slurm: SlurmOnPaper) -> None:
    slurm.queue("4711", state="SUSPENDED", reason="None")
    slurm.queue("4712", state="RUNNING", reason="None")
    found = {record["id"]: record["state"] for record in records(hpc_det)}
    assert found == {"4711": "SUSPENDED", "4712": "SCHEDULED"}


def test_ls_is_list(hpc_det: Command, queue: SlurmOnPaper) -> None:
    assert hpc_det("j", "ls") == hpc_det("job", "list")


def test_csv_of_an_empty_queue_is_the_line_of_headings(hpc_det: Command, slurm: SlurmOnPaper) -> None:
    empty = hpc_det("job", "list", "--csv").out
    slurm.queue("4715")
    (record,) = records(hpc_det)
    assert empty == f"{','.join(record)}\n"


def test_json_and_csv_say_all(hpc_det: Command, queue: SlurmOnPaper) -> None:
    record = records(hpc_det)[1]
    assert record == {
        "position": 1,
        "id": "4712",
        "type": "EXPERIMENT",
        "experiment": 1,
        "name": "digits",
        "priority": 42,
        "scheduler_priority": 99_999,
        "submitted": record["submitted"],
        "slots": {"acquired": 0, "needed": 8},
        "state": "QUEUED",
        "user": this_user(),
        "pool": "low",
        "reason": "Resources",
        "start": record["start"],
    }
    rows = list(csv.DictReader(hpc_det("job", "list", "--csv").out.splitlines()))
    assert [row["slots.needed"] for row in rows] == ["8", "8", "2", "8", "2"]


def test_the_queue_is_the_default_pools_another_ones_or_all(hpc_det: Command, queue: SlurmOnPaper) -> None:
    queue.queue("4716", partition="high")
    assert [record["id"] for record in records(hpc_det, "-p", "high")] == ["4716"]
    assert "4716" not in [record["id"] for record in records(hpc_det)]
    assert {"4712", "4716"} < {record["id"] for record in records(hpc_det, "--all-pools")}
    assert hpc_det("job", "list", "--all-pools").out.splitlines()[0].endswith("Pool")


def test_an_unknown_pool_is_told_with_the_known_ones(hpc_det: Command, queue: SlurmOnPaper) -> None:
    assert hpc_det("job", "list", "-p", "hihg") == (
        2,
        "",
        "hpc-det: --resource-pool: no pool 'hihg'; known: high, low, local\n",
    )


def test_a_machine_without_a_scheduler_has_its_own_jobs_alone(
    hpc_det: Command, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpc_det.cli.job.list.schedulers_here", lambda which: [])
    assert hpc_det("job", "list").code == 0
    told = "--resource-pool: no pool 'low'; this machine has no scheduler, so known: local"
    assert told in hpc_det("job", "list", "-p", "low").err
    result = hpc_det("job", "update", "17-4@here", "--priority", "60")
    assert (result.code, "jobs run at once and none waits" in result.err) == (2, True)


def test_of_two_schedulers_the_one_that_answers_is_asked(
    hpc_det: Command, slurm: SlurmOnPaper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Slurm runs there may be commands of PBS' names, and the other way round."""

    def slurm_alone(command: Sequence[str]) -> str:
        if command[0] == "qstat":
            raise CommandError("qstat: cannot connect to server")
        return slurm.run(command)

    slurm.queue("4711")
    monkeypatch.setattr("hpc_det.cli.job.list.schedulers_here", lambda which: ["pbs", "slurm"])
    monkeypatch.setattr("hpc_det.cli.job.list.run_command", slurm_alone)
    assert [record["id"] for record in records(hpc_det)] == ["4711"]
    monkeypatch.setattr("hpc_det.cli.job.list.schedulers_here", lambda which: ["slurm", "pbs"])
    assert [record["id"] for record in records(hpc_det)] == ["4711"]


def test_a_silent_scheduler_is_an_error(hpc_det: Command, slurm: SlurmOnPaper, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(command: Sequence[str]) -> str:
        raise CommandError("scontrol: no answer in 60 s; try again later")

    monkeypatch.setattr("hpc_det.cli.job.list.run_command", silent)
    assert hpc_det("job", "list") == (1, "", "hpc-det: scontrol: no answer in 60 s; try again later\n")


# --- update


def test_a_priority_is_asked_for_and_shown(hpc_det: Command, queue: SlurmOnPaper) -> None:
    assert hpc_det("job", "update", "4712,4714", "--priority", "60") == (
        0,
        "Job 4712 has priority 60 now\nJob 4714 has priority 60 now\n",
        "",
    )
    assert [(record["id"], record["priority"]) for record in records(hpc_det)][1:] == [
        ("4713", 42),
        ("4715", 42),
        ("4712", 60),
        ("4714", 60),
    ]
    assert hpc_det("job", "update", "4712", "--priority", "60").out == "Job 4712 has priority 60 already\n"


def test_a_job_goes_ahead_of_another_and_behind_it_again(hpc_det: Command, queue: SlurmOnPaper) -> None:
    assert hpc_det("job", "update", "4714", "--ahead-of", "4712").out == "Job 4714 is ahead of job 4712 now\n"
    assert queue.order() == ["4713", "4714", "4712", "4715"]
    assert hpc_det("job", "update", "4714", "--behind-of", "4715").out == "Job 4714 is behind job 4715 now\n"
    assert queue.order() == ["4713", "4712", "4715", "4714"]


def test_an_experiments_job_changes_pools(hpc_det: Command, queue: SlurmOnPaper) -> None:
    assert hpc_det("job", "update", "4714", "--resource-pool", "high").out == "Job 4714 waits in pool high now\n"
    assert [record["id"] for record in records(hpc_det, "-p", "high")] == ["4714"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--priority", "0"], "job 4712: '0' is no priority; expected a whole number from 1 to 99, lower is earlier"),
        (["--priority", "high"], "job 4712: 'high' is no priority"),
        (["--weight", "2"], "job 4712: neither Slurm nor PBS has weights of jobs"),
        (["--resource-pool", "hihg"], "job 4712: no pool 'hihg'; known: high, low"),
        (["--ahead-of", "4712"], "job 4712: has no place ahead of itself"),
        (["--behind-of", "4711"], "job 4711: runs already, and has no place in the queue any more"),
        (["--ahead-of", "9"], "job 9: not in the queue; `hpc-det job list --all-pools` shows what is"),
        (["--behind-of", "4716"], "job 4716: its jobs wait in several places; name one of them: 4716_3, 4716_5"),
        ([], "none was given; give one of --priority, --weight"),
        (["--priority", "3", "--weight", "3"], "--priority and --weight exclude each other; give one of --priority"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_with_a_reason(
    hpc_det: Command, queue: SlurmOnPaper, arguments: list[str], told: str
) -> None:
    for job_id in ("4716_3", "4716_5"):
        queue.queue(job_id)
    code, _, err = hpc_det("job", "update", "4712", *arguments)
    assert (code, told in err) == (2, True)
    assert queue.changes == []


def test_no_job_is_named(hpc_det: Command, queue: SlurmOnPaper) -> None:
    assert "'4712,' names no job; expected ids such as 4711,4712" in hpc_det("job", "hold", "4712,").err
    assert queue.changes == []


def test_jobs_that_nobody_here_may_change_are_all_named_before_any_is_changed(
    hpc_det: Command, queue: SlurmOnPaper
) -> None:
    assert hpc_det("job", "update", "4712,4711,4713,99", "--priority", "60") == (
        2,
        "",
        "hpc-det: job 4711: runs already, and has no place in the queue any more\n"
        "hpc-det: job 4713: is bob's; only bob and the site's operators may change it\n"
        "hpc-det: job 99: not in the queue; `hpc-det job list --all-pools` shows what is\n",
    )
    told = "hpc-det: job 4715: is no experiment's, and only theirs change pools; cancel it, and submit it again\n"
    assert hpc_det("job", "update", "4715", "--resource-pool", "high") == (2, "", told)
    assert queue.changes == []


def test_jobs_of_two_pools_have_no_order(hpc_det: Command, queue: SlurmOnPaper) -> None:
    queue.jobs["4714"].partition = "high"
    told = "job 4714: waits in pool high, and job 4712 in pool low; jobs have an order within a pool only"
    assert told in hpc_det("job", "update", "4714", "--ahead-of", "4712").err


@pytest.mark.parametrize("arguments", [("4714", "--priority", "10"), ("4714", "--ahead-of", "4713")])
def test_what_only_operators_may_is_told_as_theirs(
    hpc_det: Command, queue: SlurmOnPaper, arguments: tuple[str, ...]
) -> None:
    code, _, err = hpc_det("job", "update", *arguments)
    first, last = err.splitlines()
    assert code == 1
    assert "Access/permission denied for job 4714; only the site's operators and administrators may" in first
    assert last == "hpc-det: nothing was changed"


# --- update-batch


def test_a_batch_is_done_in_its_order(hpc_det: Command, queue: SlurmOnPaper) -> None:
    result = hpc_det("job", "update-batch", "4712.priority=60", "4714.ahead-of=4712", "4714.resource-pool=high")
    assert result.out.splitlines() == [
        "Job 4712 has priority 60 now",
        "Job 4714 is ahead of job 4712 already",
        "Job 4714 waits in pool high now",
    ]


def test_a_batch_that_is_refused_in_the_middle_is_put_back(hpc_det: Command, queue: SlurmOnPaper) -> None:
    before = queue.order()
    code, out, err = hpc_det("job", "update-batch", "4712.priority=60", "4714.resource-pool=high", "4715.priority=1")
    assert (code, out) == (1, "")
    assert "Access/permission denied for job 4715" in err
    assert err.endswith("hpc-det: what was changed before is put back\n")
    assert queue.order() == before
    assert {job.partition for job in queue.jobs.values()} == {"low"}


def test_what_was_done_for_a_part_of_an_array_is_put_back(hpc_det: Command, queue: SlurmOnPaper) -> None:
    array = queue.queue("4716_[0-3]")
    queue.ended = "4716_0"
    code, _, err = hpc_det("job", "update", "4716", "--priority", "60")
    assert (code, array.nice) == (1, 0)
    assert "4716_0: Job has already finished; only its user and the site's operators" in err


def test_what_cannot_be_put_back_is_said_with_its_command(hpc_det: Command, queue: SlurmOnPaper) -> None:
    queue.jobs["4712"].nice = -5  # an operator's gift
    err = hpc_det("job", "update-batch", "4712.priority=60", "4715.priority=1").err
    assert "hpc-det: what was changed before could not be put back:\n" in err
    assert "scontrol update JobId=4712 Nice=-5: scontrol: refused" in err


def test_an_order_that_does_not_come_is_put_back(hpc_det: Command, queue: SlurmOnPaper) -> None:
    queue.deaf_to = lambda command: command == "scontrol update JobId=4712 Nice=3"
    code, _, err = hpc_det("job", "update", "4714", "--ahead-of", "4712")
    assert code == 1
    taken = "the scheduler took `scontrol update JobId=4712 Nice=3`"
    assert err.splitlines() == [
        f"hpc-det: Job 4714 is ahead of job 4712: not so, although {taken}",
        "hpc-det: what was changed before is put back",
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("4712", "'4712': expected JOB.OPERATION=VALUE such as 4711.priority=60"),
        ("4712.priority=", "'4712.priority=': expected JOB.OPERATION=VALUE"),
        ("4712.pirority=3", "job 4712: no operation 'pirority'; did you mean 'priority'?"),
        ("12.pbs.zzz=3", "job 12.pbs: no operation 'zzz'; known: priority, weight, resource-pool, ahead-of, behind-of"),
    ],
)
def test_what_is_no_update_is_told_with_what_is(hpc_det: Command, queue: SlurmOnPaper, text: str, told: str) -> None:
    code, _, err = hpc_det("job", "update-batch", "4714.priority=60", text)
    assert (code, told in err) == (2, True)
    assert queue.changes == []


# --- hold and release


def test_a_job_is_held_and_let_go(hpc_det: Command, queue: SlurmOnPaper) -> None:
    assert hpc_det("job", "hold", "4712") == (0, "Holding job 4712; let it go with `hpc-det job release 4712`\n", "")
    assert [record["state"] for record in records(hpc_det)][-1] == "HELD"
    told = "job 4712: is held (JobHeldUser), and has no place in the queue; let it go first"
    assert told in hpc_det("job", "update", "4714", "--behind-of", "4712").err
    assert hpc_det("job", "release", "4712") == (0, "Released job 4712: it may start now\n", "")
    assert queue.order()[-1] == "4712"


def test_release_lifts_the_wait_after_a_requeue(hpc_det: Command, queue: SlurmOnPaper) -> None:
    queue.jobs["4712"].reason = "BeginTime"
    assert hpc_det("job", "release", "4712").out == "Released job 4712: it may start now\n"
    assert queue.changes == ["scontrol update JobId=4712 StartTime=now"]


def test_an_arrays_id_is_all_of_its_jobs_that_wait(hpc_det: Command, queue: SlurmOnPaper) -> None:
    for job_id in ("4716_3", "4716_5"):
        queue.queue(job_id, reason="BeginTime")
    queue.queue("4716_4", state="RUNNING")
    assert hpc_det("job", "update", "4716", "--priority", "60").code == 0
    assert [queue.jobs[f"4716_{index}"].nice for index in (3, 4, 5)] == [1800, 0, 1800]
    assert hpc_det("job", "release", "4716").out == "Released job 4716: it may start now\n"
    assert [queue.jobs[f"4716_{index}"].reason for index in (3, 5)] == ["Priority", "Priority"]
    assert hpc_det("job", "update", "4716_5", "--ahead-of", "4716_3").code == 0


def test_release_says_when_nothing_is_held(hpc_det: Command, queue: SlurmOnPaper) -> None:
    assert hpc_det("job", "release", "4711,4712").out == (
        "Job 4711 is not held: it is running\nJob 4712 is not held: it is queued (Resources)\n"
    )


def test_a_hold_of_the_site_is_its_operators_to_lift(hpc_det: Command, queue: SlurmOnPaper) -> None:
    queue.jobs["4712"].reason = "JobHeldAdmin"
    code, _, err = hpc_det("job", "release", "4712")
    assert (code, err.endswith("; a hold that the site has set is its operators' to lift\n")) == (1, True)


def test_a_running_job_is_not_held(hpc_det: Command, queue: SlurmOnPaper) -> None:
    assert hpc_det("job", "hold", "4711").code == 2
    assert queue.changes == []


# --- the stand-in PBS and the real Slurm


def test_on_pbs(hpc_det: Command, pbs_lab: PbsLab, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """Its priorities and places are its users' to change."""
    monkeypatch.setattr("hpc_det.cli.job.list.schedulers_here", lambda which: ["pbs"])
    pbs_lab.submit("-q", "low", "-l", "select=3:ncpus=4", "--", "/bin/sleep", "600")
    folder = Life.submitted(root).folder
    waits = ("-q", "low", "-l", "select=3:ncpus=4", "-o", folder.jobs / "1.log", "--", "/bin/true")
    first, second, third = (pbs_lab.submit(*map(str, waits)) for _ in range(3))

    def order(pool: str = "low") -> list[object]:
        return [job["id"] for job in records(hpc_det, "-p", pool) if job["type"] == "EXPERIMENT"]

    assert hpc_det("job", "update", third, "--ahead-of", first).out == f"Job {third} is ahead of job {first} now\n"
    assert order() == [third, first, second]
    result = hpc_det("job", "update-batch", f"{first}.priority=10", f"{second}.resource-pool=workq")
    done = [f"Job {first} has priority 10 now", f"Job {second} waits in pool workq now"]
    assert (result.code, result.out.splitlines()[:2], result.err) == (0, done, "")
    assert "job_sort_formula" in result.out, "a stock scheduler's order does not depend on priorities"
    pbs_lab.run("qmgr", "-c", "set server job_sort_formula = job_priority*1000", manager=True)
    again = hpc_det("job", "update-batch", f"{first}.priority=10", f"{third}.ahead-of={first}")
    assert "job_sort_formula" not in again.out
    assert (pbs_lab.job(first)["Priority"], order("workq")) == (320, [second])
    without_server = first.partition(".")[0]
    assert hpc_det("job", "hold", without_server).code == 0
    assert pbs_lab.job(first)["Hold_Types"] == "u"
    assert hpc_det("job", "release", without_server).out == f"Released job {without_server}: it may start now\n"
    assert pbs_lab.job(first)["job_state"] == "Q"
    pbs_lab.run("qhold", "-h", "o", first, manager=True)
    assert [job["state"] for job in records(hpc_det, "-p", "low") if job["id"] == first] == ["HELD"]
    refused = hpc_det("job", "release", first)
    assert (refused.code, "an operator of the site" in refused.err) == (1, True)
    assert pbs_lab.job(first)["job_state"] == "H"


@pytest.mark.slurm
def test_on_the_real_slurm(
    hpc_det: Command, slurm_lab: SlurmLab, stub: Stub, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a user who is no operator, and as one who is."""
    if os.geteuid() != 0:
        pytest.skip("becomes two users, which only root can")
    slurm_lab.use(monkeypatch)
    slurm_lab.preempt(seconds=600)
    folder = Life.submitted(root).folder.path
    monkeypatch.setattr("hpc_det.cli.job.list.this_user", lambda: "nobody")
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
    assert (refused.code, "Access/permission denied; only the site's operators" in refused.err) == (1, True)
    assert order() == [third, first, array]
    assert hpc_det("job", "hold", array).code == 0
    assert records(hpc_det)[-1]["state"] == "HELD"
    assert hpc_det("job", "release", array).code == 0
    assert records(hpc_det)[-1]["state"] == "QUEUED"
    assert "Invalid --nice value" in slurm_lab._ended("sbatch", "--nice=-1", "--wrap=true").stderr

    for command in ("squeue", "scontrol"):  # an operator
        stub(command, f'exec {slurm_lab.bin / command} "$@"')
    assert hpc_det("job", "update", array, "--priority", "1").code == 0
    assert order()[0] == array


# --- of an experiment


def test_all_jobs_of_an_experiment_get_a_priority(hpc_det: Command, slurm: SlurmOnPaper, root: Path) -> None:
    life = Life.submitted(root, job_id="4712")
    slurm.queue("4712", folder=str(life.folder.path))
    assert hpc_det("e", "set", "priority", "1", "60") == (0, "Job 4712 has priority 60 now\n", "")
    assert slurm.jobs["4712"].nice == 1800
    assert "expected" in hpc_det("e", "set", "priority", "1", "x").err


def test_jobs_that_have_ended_or_run_are_left_out(hpc_det: Command, slurm: SlurmOnPaper, root: Path) -> None:
    life = Life.submitted(root, job_id="4711")
    write_json(life.folder.next_jobs(1, 0), {"jobs": ["4711", "4712", "4713"]})
    slurm.queue("4712", folder=str(life.folder.path), state="RUNNING")
    slurm.queue("4713", folder=str(life.folder.path))
    assert hpc_det("e", "set", "priority", "1", "60").out == "Job 4713 has priority 60 now\n"


def test_an_experiment_without_a_job_that_waits_has_none_to_change(
    hpc_det: Command, slurm: SlurmOnPaper, life: Life
) -> None:
    told = hpc_det("e", "set", "priority", "1", "60")
    assert told == (2, "", "hpc-det: experiment 1: has no job that waits in the queue\n")
