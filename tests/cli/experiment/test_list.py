"""hpc-det experiment list."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

from hpc_det.store.experiments import ExperimentStore
from tests.cli.conftest import Command
from tests.cli.life import FakeScheduler, Life, tear


def test_without_experiments_the_list_is_empty(hpc_det: Command) -> None:
    assert hpc_det("e", "list") == (0, "ID  NAME  STATE  PROGRESS  BEST  SUBMITTED\n", "")
    assert hpc_det("e", "list", "--json") == (0, "[]\n", "")


def test_the_list_shows_state_progress_and_best_validation(
    hpc_det: Command, life: Life, scheduler: FakeScheduler
) -> None:
    life.begins()
    life.reports("validation", 180, {"accuracy": 0.97123456})
    life.reports("validation", 200, {"accuracy": "NaN"})
    heading, row = hpc_det("e", "list").out.splitlines()
    assert heading.split() == ["ID", "NAME", "STATE", "PROGRESS", "BEST", "SUBMITTED"]
    assert row.split()[:7] == ["1", "digits", "RUNNING", "200/400", "batches", "accuracy", "0.97123"]
    (record,) = json.loads(hpc_det("e", "list", "--json").out)
    assert datetime.fromisoformat(record.pop("submitted")).tzinfo
    assert record == {
        "id": 1,
        "name": "digits",
        "description": "",
        "labels": [],
        "archived": False,
        "state": "RUNNING",
        "batches": 200,
        "total_batches": 400,
        "best": {"metric": "accuracy", "value": 0.97123456, "batches": 180, "trial": 1},
        "trials": {"expected": 1, "created": 1, "running": 1, "completed": 0, "failed": 0, "invalid": 0},
        "progress": 0.5,
        "phase": None,
    }


def test_the_scheduler_is_asked_once_and_only_about_experiments_without_a_verdict(
    hpc_det: Command, root: Path, scheduler: FakeScheduler
) -> None:
    lives = [Life.submitted(root, job_id=str(job_id)) for job_id in (11, 12, 13)]
    lives[1].begins()
    lives[1].finishes()
    states = [record["state"] for record in json.loads(hpc_det("e", "list", "--json").out)]
    assert states == ["RUNNING", "COMPLETED", "RUNNING"]
    assert scheduler.asked == [["11", "13"]]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"[1]", b"\xff\x00", None])
@pytest.mark.parametrize("name", ["plan.json", "effective.json", "search/000000001.json", "trials/1/metrics.jsonl"])
def test_an_experiment_with_a_torn_file_hides_no_other(
    hpc_det: Command, root: Path, scheduler: FakeScheduler, content: bytes | None, name: str
) -> None:
    torn, whole = (Life.submitted(root, job_id=str(job_id)) for job_id in (11, 12))
    torn.begins()
    torn.reports("validation", 100, {"accuracy": 0.5})
    tear(torn.folder.path / name, content)
    first, second = json.loads(hpc_det("e", "list", "--json").out)
    assert (second["id"], second["name"], second["state"]) == (whole.id, "digits", "RUNNING")
    assert first["name"] in ("digits", "(files damaged)")
    assert len(hpc_det("e", "list").out.splitlines()) == 3


def test_what_was_not_created_to_the_end_is_not_listed(hpc_det: Command, life: Life, scheduler: FakeScheduler) -> None:
    ExperimentStore(life.folder.path.parent.parent).create()
    assert len(json.loads(hpc_det("e", "list", "--json").out)) == 1
