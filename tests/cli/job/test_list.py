"""hpc-det job list: the queue as a table."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_det.schedulers.queue import this_user
from hpc_det.schedulers.scheduler import CommandError
from hpc_det.schedulers.slurm.queue import SlurmQueue
from tests.cli.conftest import Command
from tests.cli.job.conftest import records
from tests.cli.life import Life
from tests.cli.slurm_on_paper import SlurmOnPaper
from tests.facts import unnamed
from tests.stub import stub as stub

HEADINGS = ["#", "ID", "Type", "Job Name", "Priority", "Submitted", "Slots (acquired/needed)", "Status", "User"]


def test_the_queue_has_the_columns_of_determineds_and_why_and_when_beside_them(
    hpc_det: Command, queue: SlurmOnPaper
) -> None:
    code, out, _ = hpc_det("job", "list")
    headings, *rows = ([cell.strip() for cell in line.split("  ") if cell] for line in out.splitlines())
    assert (code, headings) == (0, [*HEADINGS, "Scheduler Priority", "Reason", "Start"])
    me = this_user()
    when, noon = "2026-11-20 10:02:05", "2026-11-20 12:00:00"
    assert rows == [
        ["0", "4711", "EXPERIMENT 1", "digits", "42", when, "8/8", "SCHEDULED", me, "100000", "-", "-"],
        ["1", "4712", "EXPERIMENT 1", "digits", "42", when, "0/8", "QUEUED", me, "99999", "Resources", noon],
        ["2", "4713", "JOB", "bobs", "42", when, "0/2", "QUEUED", "bob", "99998", "Priority", "-"],
        ["3", "4714", "EXPERIMENT 1", "digits", "42", when, "0/8", "QUEUED", me, "99997", "Priority", "-"],
        ["4", "4715", "JOB", "notebook", "42", when, "0/2", "QUEUED", me, "99996", "Priority", "-"],
    ]


def test_a_job_that_the_scheduler_has_stopped_is_suspended(hpc_det: Command, slurm: SlurmOnPaper) -> None:
    slurm.queue("4711", state="SUSPENDED", reason="None")
    slurm.queue("4712", state="RUNNING", reason="None")
    found = {record["id"]: record["state"] for record in records(hpc_det)}
    assert found == {"4711": "SUSPENDED", "4712": "SCHEDULED"}


def test_a_successor_shows_what_it_waits_for_and_the_legend_explains_it(
    hpc_det: Command, slurm: SlurmOnPaper, life: Life
) -> None:
    slurm.queue("4711", state="RUNNING", reason="None", folder=str(life.folder.path))
    assert "successor" not in hpc_det("job", "list").out
    dependency = "afterany:4711(unfulfilled)"
    slurm.queue("4712", reason="Dependency", dependency=dependency, folder=str(life.folder.path))
    shown = hpc_det("job", "list").out
    assert "  after 4711  " in shown.splitlines()[2]
    assert not unnamed(shown.splitlines()[-1], "after JOB", "successor", "ended")
    assert records(hpc_det)[1]["waits_for"] == ["4711"]
    assert "successor" not in hpc_det("job", "list", "--csv").out


def test_a_priority_that_the_scheduler_does_not_report_is_a_dash(
    hpc_det: Command, slurm: SlurmOnPaper, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.queue("4711")
    (job,) = SlurmQueue().jobs(slurm.run)
    monkeypatch.setattr("hpc_det.cli.job.list.local.jobs", lambda: [replace(job, scheduler_priority=None)])
    assert records(hpc_det, "-p", "local")[0]["scheduler_priority"] is None
    assert re.search(r" ada +- |\w+ +- +Priority", hpc_det("job", "list", "-p", "local").out)


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
        "waits_for": [],
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
    assert hpc_det("job", "list", "-p", "hihg").fails(2, "--resource-pool", "'hihg'", "high, low, local")


def test_a_machine_without_a_scheduler_has_its_own_jobs_alone(
    hpc_det: Command, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpc_det.cli.job.list.schedulers_here", lambda which: [])
    assert hpc_det("job", "list").code == 0
    assert hpc_det("job", "list", "-p", "low").fails(2, "--resource-pool", "'low'", "no scheduler", "local")
    assert hpc_det("job", "update", "17-4@here", "--priority", "60").fails(2, "no scheduler")


def test_of_two_schedulers_the_one_that_answers_is_asked(
    hpc_det: Command, slurm: SlurmOnPaper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine with Slurm may have commands named like those of PBS, and vice versa."""

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
    assert hpc_det("job", "list").fails(1, "scontrol", "60 s")
