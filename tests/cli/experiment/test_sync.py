from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hpc_det.errors import HpcDetError
from hpc_det.node.json_files import read_json, write_json
from hpc_det.store.folders import TrialFolder
from tests.cli.conftest import Command
from tests.cli.life import Life

# These tests import wandb and mlflow, which takes longer than a unit test may.
pytestmark = pytest.mark.integration


def configured(life: Life, *loggers: dict[str, Any], trials: int = 1) -> list[TrialFolder]:
    """Give the experiment these loggers, and return trials that have started."""
    write_json(life.folder.effective, {**(read_json(life.folder.effective) or {}), "loggers": [*loggers]})
    found = [life.folder.trial(number + 1) for number in range(trials)]
    for trial in found:
        trial.loggers.mkdir(parents=True)
    return found


def offline_run(trial: TrialFolder, attempt: int) -> Path:
    run = trial.loggers / "wandb" / f"attempt-{attempt}" / "wandb" / f"offline-run-20260101_000000-r{attempt}"
    run.mkdir(parents=True)
    return run


@pytest.fixture
def uploaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of uploaded runs. The upload of a run whose folder has a file `refused` fails."""
    from hpc_det.integrations import wandb

    found: list[str] = []

    def upload(runs: list[Path], settings: Mapping[str, Any]) -> Iterator[str]:
        for run in runs:
            if (run / "refused").exists():
                raise HpcDetError("refused by the server")
            found.append(run.name)
            yield f"uploaded {run.name}"

    monkeypatch.setattr(wandb, "upload", upload)
    return found


def test_an_experiment_without_loggers_has_nothing_to_upload(life: Life, hpc_det: Command) -> None:
    assert hpc_det("experiment", "sync", 1).succeeds("1")


def test_a_logger_that_is_not_configured_is_refused(life: Life, hpc_det: Command) -> None:
    configured(life, {"wandb": {"project": "p"}, "mlflow": None})
    assert hpc_det("experiment", "sync", 1, "--logger", "mlflow").fails(2, "--logger mlflow", "wandb")


def test_a_logger_without_settings_has_runs_to_upload(life: Life, hpc_det: Command) -> None:
    """A run outside a job has only those settings that the script gives."""
    (trial,) = configured(life, {"wandb": {}})
    offline_run(trial, 1)
    assert hpc_det("experiment", "sync", 1, "--dry-run").succeeds("trial 1/1", "-r1")


def test_runs_are_uploaded_by_trial_and_attempt(life: Life, hpc_det: Command, uploaded: list[str]) -> None:
    first, second, third = configured(life, {"wandb": {"mode": "offline"}}, trials=3)
    for attempt in (2, 1):
        offline_run(first, attempt)
    offline_run(second, 3)
    assert hpc_det("experiment", "sync", 1).succeeds("trial 1/1", "trial 1/2", "trial 1/3", "-r1", "-r2", "-r3")
    assert [name[-2:] for name in uploaded] == ["r1", "r2", "r3"]
    assert third.loggers.exists()


def test_a_dry_run_uploads_nothing(life: Life, hpc_det: Command, uploaded: list[str]) -> None:
    (trial,) = configured(life, {"wandb": {"mode": "offline"}})
    offline_run(trial, 1)
    assert hpc_det("experiment", "sync", 1, "--dry-run").succeeds("trial 1/1", "-r1")
    assert uploaded == []


def test_the_attempt_that_is_running_is_left_for_later(life: Life, hpc_det: Command, uploaded: list[str]) -> None:
    configured(life, {"wandb": {"mode": "offline"}}, trials=0)
    life.begins()
    trial = life.folder.trial(1)
    offline_run(trial, 1)
    assert hpc_det("experiment", "sync", 1).succeeds("trial 1/1", "attempt 1")
    assert uploaded == []


def test_a_failure_of_one_trial_does_not_stop_the_others(life: Life, hpc_det: Command, uploaded: list[str]) -> None:
    first, second = configured(life, {"wandb": {"mode": "offline"}}, trials=2)
    (offline_run(first, 1) / "refused").touch()
    offline_run(second, 2)
    result = hpc_det("experiment", "sync", 1)
    assert result.code == 1
    assert "trial 1/1" in result.err
    assert "refused by the server" in result.err
    assert [name[-2:] for name in uploaded] == ["r2"]


def test_a_missing_package_is_named_with_the_remedy(
    life: Life, hpc_det: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    configured(life, {"wandb": {"mode": "offline"}})
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delitem(sys.modules, "hpc_det.integrations.wandb", raising=False)
    monkeypatch.delattr("hpc_det.integrations.wandb", raising=False)
    assert hpc_det("experiment", "sync", 1).fails(2, "trial 1/1", "hpc_det[wandb]")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_an_offline_mlflow_run_is_copied_to_the_tracking_uri(
    life: Life, hpc_det: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from mlflow.tracking import MlflowClient

    from hpc_det.core.loggers import Loggers

    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr("hpc_det.core.loggers.END_WAIT_S", 60.0)
    entry = {"mlflow": {"mode": "offline", "experiment_name": None, "tracking_uri": None}}
    (trial,) = configured(life, entry)
    spec = {"experiment_id": 1, "trial_id": 1, "hparams": {"lr": 1}, "config": {"name": "digits"}}
    found = Loggers.of([entry], trial, spec, 1)
    found.begin(0)
    found.report("training", 100, {"loss": 0.5})
    found.end("finished")

    uri = f"sqlite:///{tmp_path / 'server.db'}"
    assert hpc_det("experiment", "sync", 1).fails(2, "trial 1/1", "MLFLOW_TRACKING_URI")
    configured(life, {"mlflow": {"mode": "offline", "tracking_uri": uri, "experiment_name": None}}, trials=0)
    for arguments, fact in ((["--dry-run"], 1), ([], 1), (["--dry-run"], 0)):
        result = hpc_det("experiment", "sync", 1, *arguments)
        assert (result.code, f"{fact} value" in result.out) == (0, True)
    client = MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert run.data.metrics == {"training/loss": 0.5}
