"""hpc-det experiment list-trials."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

from tests.cli.conftest import Command
from tests.cli.life import FakeScheduler, Life, random_search


def test_a_row_for_each_trial_with_what_differs(hpc_det: Command, root: Path, scheduler: FakeScheduler) -> None:
    life = Life.submitted(root, workers=2, **random_search(3))
    for worker in range(2):
        life.begins(worker)
    life.reports("validation", 200, {"accuracy": 0.7}, trial=2)
    life.reports("validation", 400, {"accuracy": 0.6}, trial=2)
    life.reaches(0.6, worker=1)
    heading, first, second, third = hpc_det("experiment", "list-trials", 1).out.splitlines()
    assert heading.split() == ["ID", "STATE", "BATCHES", "LAST", "BEST", "lr", "WORKER", "JOB"]
    assert first.split()[:5] == ["1", "RUNNING", "0/?", "-", "-"]
    assert second.split()[:5] == ["2", "COMPLETED", "400/400", "0.6", "0.7"]
    assert third.split()[-2:] == ["1", "4711_1"]
    records = json.loads(hpc_det("experiment", "list-trials", 1, "--json").out)
    assert [record["hyperparameters"]["width"] for record in records] == [64] * 3
    rows = list(csv.DictReader(io.StringIO(hpc_det("experiment", "list-trials", 1, "--csv").out)))
    assert [row["best.value"] for row in rows] == ["", "0.7", ""]
    assert [float(row["hyperparameters.lr"]) for row in rows] == [r["hyperparameters"]["lr"] for r in records]


def test_before_the_first_trial_the_table_is_empty(hpc_det: Command, life: Life, scheduler: FakeScheduler) -> None:
    assert hpc_det("experiment", "list-trials", 1).out == "ID  STATE  BATCHES  LAST  BEST  WORKER  JOB\n"
    keys = "id,state,worker,job_id,hyperparameters,seed,batches,total_batches,training,validation,best"
    assert hpc_det("experiment", "list-trials", 1, "--csv").out == f"{keys}\n"
