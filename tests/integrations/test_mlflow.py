"""MLflow with real SQLite stores: runs over several attempts, and copies of offline runs."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hpc_det.core
from hpc_det.node.json_files import read_json
from hpc_det.store.folders import TrialFolder
from tests.integrations.conftest import Logged

pytestmark = [
    pytest.mark.integration,
    # of SQLAlchemy 2.1, about MLflow's own code
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(autouse=True)
def _private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """MLflow sends no telemetry, has no tracking URI, and writes nothing into the checkout."""
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """Return the URI of a store that stands in for the tracking server."""
    return f"sqlite:///{tmp_path / 'server.db'}"


def client(uri: str) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri)


def logger(logged: Logged, attempt: Any = 1, *, reported: Any = None, **settings: Any) -> Any:
    from hpc_det.integrations import mlflow

    return mlflow.logger(settings, logged(attempt, reported=reported))


def the_run(uri: str, experiment: str = "demo") -> Any:
    (run,) = client(uri).search_runs([client(uri).get_experiment_by_name(experiment).experiment_id])
    return run


def history(uri: str, run: Any, metric: str) -> list[tuple[int, float]]:
    return sorted((value.step, value.value) for value in client(uri).get_metric_history(run.info.run_id, metric))


def test_two_attempts_with_a_lost_stretch_are_one_run_without_double_steps(logged: Logged, uri: str) -> None:
    settings = {"tracking_uri": uri, "experiment_name": "demo"}
    first = logger(logged, **settings)
    first.begin(0)
    for steps in (100, 200, 300):
        first.report("training", steps, {"loss": steps / 1000})
    first.checkpoint(200, "/c/one")
    assert the_run(uri).info.status == "RUNNING"
    first.end("failed")
    assert the_run(uri).info.status == "FAILED"

    second = logger(logged, 2, reported={"training": 300}, **settings)
    second.begin(200)
    assert the_run(uri).info.status == "RUNNING"
    second.report("training", 300, {"loss": 9.0})
    second.report("training", 400, {"loss": 0.4})
    second.report("validation", 300, {"accuracy": 0.9})
    second.end("finished")

    run = the_run(uri)
    assert history(uri, run, "training/loss") == [(100, 0.1), (200, 0.2), (300, 0.3), (400, 0.4)]
    assert history(uri, run, "validation/accuracy") == [(300, 0.9)]
    assert history(uri, run, "hpc_det.resumed_at") == [(200, 200.0)]
    assert run.info.status == "FINISHED"
    assert run.data.params == {"lr": "0.1", "net.width": "64"}
    tags = {name: value for name, value in run.data.tags.items() if name.startswith("hpc_det.")}
    assert tags == {
        "hpc_det.experiment": "12",
        "hpc_det.trial": "3",
        "hpc_det.label.demo": "true",
        "hpc_det.attempt": "2",
        "hpc_det.resumed_at": "200",
        "hpc_det.checkpoint": "/c/one",
        "hpc_det.checkpoint_batches": "200",
    }
    assert read_json(logged().folder / "run.json") == {"tracking_uri": uri, "run_id": run.info.run_id}


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        pytest.param("finished", "FINISHED", marks=pytest.mark.long),
        pytest.param("waiting", "FINISHED", marks=pytest.mark.long),
        ("stopped", "KILLED"),
        ("failed", "FAILED"),
    ],
)
def test_the_status_is_that_of_the_attempt(logged: Logged, uri: str, kind: str, status: str) -> None:
    made = logger(logged, tracking_uri=uri, experiment_name="demo")
    made.begin(0)
    made.end(kind)
    assert the_run(uri).info.status == status


def test_the_uri_may_come_from_the_environment_and_its_password_is_not_saved(
    logged: Logged, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hpc_det.integrations import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    made = logger(logged)
    made.begin(0)
    made.end("finished")
    assert the_run(uri, "digits ä/é").info.status == "FINISHED"
    file = mlflow.RunFile(path=logged().folder / "other.json")
    file.save("https://ada:hunter2@mlflow.example.org", "7")
    assert "hunter2" not in file.path.read_text()
    assert file.run_id("https://ada:hunter2@mlflow.example.org") == "7"
    assert file.run_id("https://other.example.org") is None


@pytest.mark.parametrize("settings", [{}, {"tracking_uri": "sqlite:////proc/no/such/folder.db"}])
def test_without_a_server_the_attempt_is_logged_offline(
    logged: Logged, said: list[str], settings: dict[str, Any]
) -> None:
    from hpc_det.integrations import mlflow

    made = logger(logged, experiment_name="demo", **settings)
    made.begin(0)
    made.end("finished")
    assert the_run(mlflow.offline_uri(logged().folder)).info.status == "FINISHED"
    assert any("offline" in line for line in said)


@pytest.fixture(params=["refuses", "is silent"])
def silent_uri(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the URI of a server that refuses connections, or accepts them and does not answer."""
    monkeypatch.setattr("hpc_det.integrations.mlflow.ANSWER_S", 0.2)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if request.param == "is silent":
            server.listen()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_an_attempt_whose_server_does_not_answer_is_logged_offline_at_once(
    logged: Logged, said: list[str], silent_uri: str
) -> None:
    from hpc_det.integrations.mlflow import OfflineRun

    made = logger(logged, tracking_uri=silent_uri)
    assert not made.is_offline
    before = time.monotonic()
    made.begin(0)
    assert time.monotonic() - before < 30  # MLflow's client would retry for minutes
    assert made.is_offline
    made.report("training", 100, {"loss": 0.1})
    made.end("finished")
    assert sum(map(len, OfflineRun(logged().folder, silent_uri).missing().values())) == 1
    assert any("offline" in line for line in said)


def test_a_script_loses_no_metric_if_its_server_does_not_answer(
    silent_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hpc_det.integrations.mlflow import OfflineRun, has_offline_run

    monkeypatch.setenv("HPC_DET_ROOT", str(tmp_path / "root"))
    with hpc_det.core.init(name="digits", loggers=[{"mlflow": {"tracking_uri": silent_uri}}]) as core:
        for step in (1, 2, 3):
            core.report(step, {"loss": 1 / step})
    folder = TrialFolder(core.info.folder).loggers / "mlflow"
    assert has_offline_run(folder)
    assert [value.step for values in OfflineRun(folder, silent_uri).missing().values() for value in values] == [1, 2, 3]


def test_names_and_values_are_what_mlflow_accepts(logged: Logged, uri: str) -> None:
    from hpc_det.integrations.mlflow import params_of

    assert params_of({"a": {"b=": [1, 2]}, "long": "x" * 7000}) == {"a.b-": "[1, 2]", "long": "x" * 6000}
    made = logger(logged, tracking_uri=uri, experiment_name="demo")
    made.begin(0)
    made.report("training", 1, {"top-1 acc. @5%": float("nan"), **{f"m{i}": 1.0 for i in range(1500)}})
    assert "training/top-1 acc. -5-" in the_run(uri).data.metrics
    assert len(the_run(uri).data.metrics) == 1501


def test_an_offline_run_is_copied_once_and_continued_by_the_next_copy(logged: Logged, uri: str) -> None:
    from hpc_det.integrations.mlflow import OfflineRun

    folder = logged().folder
    first = logger(logged, mode="offline")
    first.begin(0)
    first.report("training", 100, {"loss": 0.1})
    first.end("stopped")
    assert sum(map(len, OfflineRun(folder, uri).missing().values())) == 1
    assert OfflineRun(folder, uri).copy("demo") == 1
    assert OfflineRun(folder, uri).copy("demo") == 0
    assert the_run(uri).info.status == "KILLED"

    second = logger(logged, 2, mode="offline", reported={"training": 100})
    second.begin(100)
    second.report("training", 200, {"loss": 0.2})
    second.end("finished")
    assert OfflineRun(folder, uri).copy("demo") == 2
    run = the_run(uri)
    assert history(uri, run, "training/loss") == [(100, 0.1), (200, 0.2)]
    assert history(uri, run, "hpc_det.resumed_at") == [(100, 100.0)]
    assert (run.info.status, run.data.params["lr"], run.data.tags["hpc_det.attempt"]) == ("FINISHED", "0.1", "2")


def test_an_offline_attempt_is_copied_into_the_run_of_the_online_ones(logged: Logged, uri: str) -> None:
    from hpc_det.integrations.mlflow import OfflineRun

    online = {"tracking_uri": uri, "experiment_name": "demo"}
    for attempt, settings, steps in ((1, online, 100), (2, {"mode": "offline"}, 200), (3, online, 300)):
        made = logger(logged, attempt, **settings)
        made.begin(steps - 100)
        made.report("training", steps, {"loss": steps / 1000})
        made.end("finished" if attempt == 3 else "stopped")
    OfflineRun(logged().folder, uri).copy("demo")
    run = the_run(uri)
    assert history(uri, run, "training/loss") == [(100, 0.1), (200, 0.2), (300, 0.3)]
    assert (run.info.status, run.data.tags["hpc_det.attempt"]) == ("FINISHED", "3")
