"""hpc-det task list: the running gangs."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

from hpc_det.requeue import Action, Cause
from tests.cli.conftest import Command
from tests.cli.life import FakeScheduler, Life, random_search


def running(hpc_det: Command) -> list[tuple[str, int, str]]:
    records = json.loads(hpc_det("task", "list", "--json").out)
    return [(record["trial"], record["attempt"], record["job_id"]) for record in records]


def test_without_experiments_nothing_runs(hpc_det: Command) -> None:
    assert hpc_det("task", "list").out == "TRIAL  NAME  ATTEMPT  SLOTS  JOB  HOST  SINCE\n"


def test_a_trial_runs_from_its_attempts_begin_to_its_end(
    hpc_det: Command, life: Life, scheduler: FakeScheduler
) -> None:
    assert running(hpc_det) == []
    headings = hpc_det("task", "list", "--csv").out
    life.begins()
    assert running(hpc_det) == [("1/1", 1, "4711")]
    assert hpc_det("task", "list", "--csv").out.splitlines(keepends=True)[0] == headings
    life.ends(Cause.PREEMPTED, Action.REQUEUE, steps=120)
    assert running(hpc_det) == []
    life.begins()
    assert running(hpc_det) == [("1/1", 2, "4711")]
    life.finishes()
    assert running(hpc_det) == []


def test_each_worker_of_a_search_runs_a_trial(hpc_det: Command, root: Path, scheduler: FakeScheduler) -> None:
    life = Life.submitted(root, workers=2, **random_search(3))
    for worker in range(2):
        life.begins(worker)
    life.finishes(1)
    rows = list(csv.DictReader(io.StringIO(hpc_det("task", "list", "--csv").out)))
    assert [(row["trial"], row["job_id"], row["slots"]) for row in rows] == [
        ("1/1", "4711_0", "4"),
        ("1/3", "4711_1", "4"),
    ]


def test_a_damaged_experiment_hides_no_other(hpc_det: Command, root: Path, scheduler: FakeScheduler) -> None:
    for job in (11, 12):
        Life.submitted(root, job_id=str(job)).begins()
    (root / "experiments" / "1" / "effective.json").write_text("{")
    assert running(hpc_det) == [("2/1", 1, "12")]
