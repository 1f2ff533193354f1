"""A run outside a job, in this process: an experiment that is listed, stopped, and resumed by a start of its script."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import hpc_det.core
from hpc_det.client.continuation import activate_one, continue_one, forked
from hpc_det.client.stopping import cancel_one, pause_one
from hpc_det.core.core import Core
from hpc_det.errors import UsageError
from hpc_det.node.json_files import read_json, write_json
from hpc_det.store.attempt import HOOK
from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.folders import ExperimentFolder
from hpc_det.store.journal import Journal
from hpc_det.store.local_run import is_alive
from hpc_det.store.metrics import read_reports
from hpc_det.view.state import ExperimentState, ExperimentView
from hpc_det.view.watch import state
from tests.facts import refused, unnamed
from tests.wait import wait_for


@pytest.fixture(autouse=True)
def _root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPC_DET_ROOT", str(tmp_path / "root"))
    monkeypatch.setattr("hpc_det.core.local_stops.POLL_S", 0.01)


def experiments() -> list[ExperimentFolder]:
    return [*ExperimentStore(Path(os.environ["HPC_DET_ROOT"])).all()]


def listed() -> list[ExperimentState]:
    return [state(ExperimentView(experiment)) for experiment in experiments()]


def causes(experiment: ExperimentFolder) -> list[tuple[int, str]]:
    """Return the cause of each recorded end, with the number of its attempt."""
    events = Journal(experiment.trial().journal).events()
    return [(event["attempt"], event["cause"]) for event in events if event["event"] == "ended"]


def run(**arguments: Any) -> Core:
    """Run a script to its end, and return its core."""
    with hpc_det.core.init(**{"name": "digits", **arguments}) as core:
        pass
    return core


def train_until_stopped(core: Core) -> None:
    """Call `should_stop` until it is true, as a loop does."""
    core.track(weights={"w": 1})
    wait_for(core.should_stop, every_s=0.001)


def interrupted_by(error: BaseException, **arguments: Any) -> Core:
    """Run a script that raises `error` after batch 7, which is saved."""
    with suppress(type(error)), hpc_det.core.init(**{"name": "digits", **arguments}) as core:
        core.track(weights={"w": 1})
        core.report(7, {"loss": 0.5})
        core.save()
        raise error
    return core


def test_a_run_is_an_experiment_with_one_trial() -> None:
    with hpc_det.core.init(name="digits", hparams={"lr": 0.1}) as core:
        assert listed() == [ExperimentState.RUNNING]
        assert (core.info.experiment_id, core.info.trial_id, core.info.attempt) == (1, 1, 1)
        assert core.info.folder == experiments()[0].trial().path
    assert listed() == [ExperimentState.COMPLETED]
    assert ExperimentView(experiments()[0]).about().name == "digits"


@pytest.mark.parametrize("has_hook", [True, False])
def test_a_startup_hook_beside_the_script_is_noted_since_only_jobs_run_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], has_hook: bool
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "train.py"), raising=False)
    if has_hook:
        (tmp_path / HOOK).touch()
    run()
    assert (HOOK in capsys.readouterr().out) == has_hook


def test_after_the_end_the_same_script_begins_a_new_experiment() -> None:
    assert [run().info.experiment_id, run().info.experiment_id] == [1, 2]


def test_a_failed_run_is_resumed_with_its_seed_and_the_next_attempt() -> None:
    failed = interrupted_by(ValueError("no such file"))
    assert listed() == [ExperimentState.ERROR]
    assert "ValueError: no such file" in ExperimentView(experiments()[0]).why_not_completed(ExperimentState.ERROR)
    resumed = run()
    assert (resumed.info.experiment_id, resumed.info.attempt) == (1, 2)
    assert (resumed.info.trial_seed, resumed.step) == (failed.info.trial_seed, 7)
    assert listed() == [ExperimentState.COMPLETED]
    assert causes(experiments()[0]) == [(1, "failed"), (2, "finished")]


def test_a_signal_pauses_the_run_until_the_next_start() -> None:
    with hpc_det.core.init(name="digits") as core:
        os.kill(os.getpid(), signal.SIGTERM)
        train_until_stopped(core)
    assert listed() == [ExperimentState.PAUSED]
    assert run().info.attempt == 2
    assert causes(experiments()[0]) == [(1, "paused"), (2, "finished")]


@pytest.mark.integration
def test_workers_of_loaders_that_the_script_iterates_itself_outlive_a_signal_to_all_processes() -> None:
    """Slurm signals every process of a step."""
    with hpc_det.core.init(name="digits") as core:
        batches = iter(DataLoader(range(100), num_workers=2))  # type: ignore[arg-type]
        next(batches)
        for worker in multiprocessing.active_children():
            assert worker.pid
            os.kill(worker.pid, signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        train_until_stopped(core)
        assert len([*batches]) == 99
    assert listed() == [ExperimentState.PAUSED]


def test_ctrl_c_cancels_the_run_until_the_next_start() -> None:
    interrupted_by(KeyboardInterrupt())
    assert listed() == [ExperimentState.CANCELED]
    assert run().info.attempt == 2
    assert listed() == [ExperimentState.COMPLETED]


@pytest.mark.parametrize(
    ("command", "after"), [(pause_one, ExperimentState.PAUSED), (cancel_one, ExperimentState.CANCELED)]
)
def test_commands_stop_the_run(command: Any, after: ExperimentState) -> None:
    with hpc_det.core.init(name="digits") as core:
        command(experiments()[0])
        assert listed() == [ExperimentState.RUNNING]
        train_until_stopped(core)
    assert listed() == [after]
    assert run().info.attempt == 2  # the request was for the first attempt


def test_a_second_run_at_the_same_time_is_another_experiment() -> None:
    with hpc_det.core.init(name="digits") as first:
        second = run()
        assert (first.info.experiment_id, second.info.experiment_id) == (1, 2)
        assert listed() == [ExperimentState.RUNNING, ExperimentState.COMPLETED]
    assert listed() == [ExperimentState.COMPLETED] * 2


def test_a_run_with_another_name_is_another_experiment() -> None:
    interrupted_by(ValueError())
    assert run(name="letters").info.experiment_id == 2
    assert run().info.experiment_id == 1


def test_a_process_on_another_host_runs_as_long_as_its_file_is_recent() -> None:
    interrupted_by(ValueError())
    (experiment,) = experiments()
    experiment.processes.mkdir(exist_ok=True)
    path = experiment.processes / "17-4@elsewhere"
    write_json(path, {"place": "elsewhere"})
    assert is_alive(experiment, path.name)
    before = time.time() - 3600
    os.utime(path, (before, before))
    assert not is_alive(experiment, path.name)


@pytest.mark.parametrize(
    "command",
    [activate_one, lambda experiment: continue_one(experiment, []), lambda experiment: forked(experiment, [])],
)
def test_commands_that_start_jobs_refuse_a_run_outside_a_job(command: Any) -> None:
    interrupted_by(ValueError())
    with refused(UsageError, "outside a job"):
        command(experiments()[0])


def test_runs_without_a_name_in_one_process_are_different_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "train.py", raising=False)

    def folds() -> list[int]:
        monkeypatch.setattr("hpc_det.core.local_run._unnamed", itertools.count(1))
        return [run(name=None).info.experiment_id, interrupted_by(ValueError(), name=None).info.experiment_id]

    assert [folds(), folds()] == [[1, 2], [3, 2]]


def test_hyperparameters_that_changed_since_the_last_start_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    interrupted_by(ValueError(), hparams={"lr": 0.1, "width": 3})
    run(hparams={"lr": 0.2, "width": 3})
    (note,) = [line for line in capsys.readouterr().out.splitlines() if "note" in line]
    assert unnamed(note, "lr", "0.1", "0.2") == []


def test_a_signal_that_is_ignored_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As SIGHUP is below nohup."""
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with hpc_det.core.init(name="digits") as core:
            os.kill(os.getpid(), signal.SIGHUP)
            assert core._run.stop.noticed is False
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, former)


def test_reports_before_an_error_are_written() -> None:
    with suppress(ZeroDivisionError), hpc_det.core.init(name="digits") as core:
        for step in range(1, 100):
            core.report(step, {"loss": 1.0 / (99 - step)})
    assert [*read_reports(core.info.folder / "metrics.jsonl")][-1]["steps"] == 98


def test_hyperparameters_of_the_last_start_count() -> None:
    interrupted_by(ValueError(), hparams={"lr": 0.1})
    assert run(hparams={"lr": 0.2}).hparams == {"lr": 0.2}
    assert read_json(experiments()[0].trial().trial)["hparams"] == {"lr": 0.2}  # type: ignore[index]


def test_values_that_cannot_be_stored_create_no_experiment() -> None:
    with refused(UsageError, "hparams"):
        run(hparams={"path": Path("data")})
    with refused(UsageError, "searcher"):
        run(config={"searcher": {"metric": 3}})
    with refused(UsageError, "loggers[0].wandb.projet", "project"):
        run(loggers=[{"wandb": {"projet": "digits"}}])
    assert experiments() == []


def test_no_file_contains_a_password_in_the_address_of_a_logger(tmp_path: Path) -> None:
    with refused(UsageError, "loggers[0].mlflow.tracking_uri", "MLFLOW_TRACKING_PASSWORD"):
        run(loggers=[{"mlflow": {"tracking_uri": "http://me:hunter2@127.0.0.1:9", "mode": "offline"}}])
    assert [path for path in tmp_path.rglob("*") if path.is_file() and "hunter2" in path.read_text()] == []
    assert experiments() == []


def test_a_run_that_was_killed_right_after_its_end_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("hpc_det.core.local_run._Chief.end", lambda chief, error: chief._stops.close())
        run()
    (experiment,) = experiments()
    (process,) = experiment.processes.iterdir()
    process.unlink()  # as if that process, which is this one, had ended
    assert run().info.experiment_id == 2
    assert listed() == [ExperimentState.COMPLETED] * 2
    assert causes(experiment) == [(1, "finished")]


def test_an_error_while_the_experiment_is_created_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr("hpc_det.core.local_run.record_job", full)
    with pytest.raises(OSError, match="no space"):
        run()
    assert [*ExperimentStore(Path(os.environ["HPC_DET_ROOT"])).folders()] == []
