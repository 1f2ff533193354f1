"""experiment cleanup: logs past their retention period."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from hpc_det.errors import HpcDetError
from hpc_det.node.json_files import read_json, write_json
from hpc_det.store.experiments import ExperimentStore
from tests.cli.conftest import Command
from tests.cli.life import FakeScheduler, Life
from tests.facts import unnamed

DAY_S = 24 * 3600


def old(life: Life, days: float, **policy: Any) -> Life:
    """Set the experiment's retention policy, and its last change to `days` days ago; return it."""
    write_json(life.folder.effective, {**(read_json(life.folder.effective) or {}), "retention_policy": policy})
    os.utime(life.folder.search, times=(then := time.time() - days * DAY_S, then))
    return life


def ended(root: Path) -> Life:
    life = Life.submitted(root)
    life.begins()
    life.rank_prints(0, "loss 0.5\n")
    life.finishes()
    return life


def logs(life: Life) -> list[str]:
    files = [*life.folder.jobs.glob("*.log"), *life.trial.logs.rglob("*.log")]
    return sorted(file.name for file in files)


def test_logs_go_so_many_days_after_the_end(hpc_det: Command, root: Path) -> None:
    due, young = old(ended(root), 31, log_retention_days=30), old(ended(root), 29, log_retention_days=30)
    assert hpc_det("e", "cleanup").succeeds("experiment 1", "3 files")
    assert (logs(due), logs(young)) == ([], ["1.log", "job.log", "rank-0.log"])
    assert hpc_det("e", "logs", "1").code == hpc_det("e", "describe", "1").code == 0
    assert hpc_det("e", "cleanup").out == ""


@pytest.mark.parametrize("policy", [{}, {"log_retention_days": None}, {"log_retention_days": -1}])
def test_without_a_number_of_days_logs_stay(hpc_det: Command, root: Path, policy: dict[str, Any]) -> None:
    life = old(ended(root), 9999, **policy)
    assert hpc_det("e", "cleanup") == (0, "", "")
    assert len(logs(life)) == 3


def test_an_experiment_that_has_not_ended_keeps_its_logs(
    hpc_det: Command, root: Path, scheduler: FakeScheduler
) -> None:
    life = Life.submitted(root)
    life.begins()
    old(life, 99, log_retention_days=1)
    assert hpc_det("e", "cleanup") == (0, "", "")
    assert logs(life) == ["1.log", "job.log"]


def test_a_dry_run_only_says_it(hpc_det: Command, root: Path) -> None:
    life = old(ended(root), 2, log_retention_days=1)
    assert hpc_det("e", "cleanup", "--dry-run").succeeds("Would", "experiment 1", "3 files")
    assert len(logs(life)) == 3


def test_new_logs_of_an_experiment_that_went_on_go_too(hpc_det: Command, root: Path) -> None:
    life = old(ended(root), 31, log_retention_days=30)
    hpc_det("e", "cleanup")
    os.utime(life.folder.logs_deleted, times=(then := time.time() - 90 * DAY_S, then))
    life.job_prints("once more\n")
    assert hpc_det("e", "cleanup").succeeds("experiment 1", "1 file")


def test_damaged_files_keep_nobody_from_the_others(hpc_det: Command, root: Path) -> None:
    torn, list_, whole = (old(ended(root), 2, log_retention_days=1) for _ in range(3))
    for entry in torn.folder.search.iterdir():
        entry.write_text("")
    list_.folder.effective.write_text("[1]")
    assert hpc_det("e", "cleanup").succeeds("experiment 3", "3 files")
    assert (len(logs(torn)), len(logs(list_)), logs(whole)) == (3, 3, [])


def test_what_fails_on_the_way_is_no_failure_of_a_new_experiment(
    hpc_det: Command, root: Path, config: Path, code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(store: object) -> None:
        raise HpcDetError("checkpoint_storage: s3://mine/1: no")

    monkeypatch.setattr("hpc_det.client.creation.submit", lambda found, experiments, **_: experiments.create())
    monkeypatch.setattr("hpc_det.cli.experiment.cleanup.finish_deletions", refuse)
    done = hpc_det("e", "create", config, code)
    assert (done.code, done.out) == (0, "Created experiment 1\n")
    assert not unnamed(done.err, "note", "hpc-det experiment cleanup", "checkpoint_storage", "s3://mine/1: no")


def test_a_new_experiment_is_the_occasion_once_a_day(
    hpc_det: Command, root: Path, config: Path, code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpc_det.client.creation.submit", lambda found, experiments, **_: experiments.create())
    first = old(ended(root), 2, log_retention_days=1)
    assert hpc_det("e", "create", config, code).code == 0
    assert logs(first) == []
    second = old(ended(root), 2, log_retention_days=1)
    assert hpc_det("e", "create", config, code).code == 0
    assert len(logs(second)) == 3, "not so soon again"
    os.utime(ExperimentStore(root).cleaned, times=(0, 0))
    assert hpc_det("e", "create", config, code).code == 0
    assert logs(second) == []
