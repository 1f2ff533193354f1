"""Runs of TorchTrainer and `fit` are experiments to the commands."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hpc_det.cli.experiment.delete import delete_one
from hpc_det.cli.main import main
from hpc_det.client.stopping import kill_one, pause_one
from hpc_det.errors import UsageError
from hpc_det.node.json_files import write_json
from hpc_det.search.journal import SearchJournal
from hpc_det.sgd import TorchTrainer, fit
from hpc_det.sgd.driver.experiment import insist_on_no_other_driver, part_of_an_experiment
from hpc_det.sgd.driver.failures import JobLeaves
from hpc_det.sgd.driver.recorded import RunRecord
from hpc_det.sgd.driver.trainer import _shut_down_all
from hpc_det.store.attempt import first_failure
from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.folders import ExperimentFolder
from hpc_det.store.metrics import read_reports
from hpc_det.view.state import ExperimentState, ExperimentView
from hpc_det.view.trial_history import AttemptHistory, read_attempts
from hpc_det.view.watch import state
from tests.facts import refused, unnamed
from tests.sgd.local_nodes import LocalNodes
from tests.sgd.trained import Linear
from tests.wait import DEADLINE_S, wait_for


class FailsToValidate(Linear):
    def validate_batch(self, batch: Any, batch_info: Any) -> dict[str, Any]:
        print("the batch is bad", flush=True)
        raise KeyError("val_acuracy")


def trainer(**arguments: Any) -> TorchTrainer:
    defaults = {"training_operator_cls": Linear, "num_workers": 2, "executor": LocalNodes(1, 2)}
    return TorchTrainer(**{**defaults, **arguments})


def experiments(root: Path) -> list[ExperimentFolder]:
    return list(ExperimentStore(root).all())


def command(*arguments: object) -> None:
    before = os.umask(0o077)  # the command sets it so
    try:
        assert main([*map(str, arguments)]) == 0
    finally:
        os.umask(before)


def found(experiment: ExperimentFolder) -> ExperimentState:
    return state(ExperimentView(experiment))


def attempts(experiment: ExperimentFolder) -> list[AttemptHistory]:
    return read_attempts(experiment.trial())


def batches(experiment: ExperimentFolder) -> list[tuple[str, int]]:
    return [(report["kind"], report["steps"]) for report in read_reports(experiment.trial().metrics)]


def test_a_run_is_listed_with_its_metrics_while_it_runs_and_after(state_folder: Path) -> None:
    with trainer(config={"lr": 0.02, "model": object}) as its:
        (experiment,) = experiments(state_folder)
        assert found(experiment) is ExperimentState.RUNNING
        its.train()
        result = its.validate()
        its.train()
    assert found(experiment) is ExperimentState.COMPLETED
    assert batches(experiment) == [("training", 8), ("validation", 8), ("training", 16)]
    assert read_reports(experiment.trial().metrics)[1]["metrics"]["val_loss"] == float(result["val_loss"])
    command("experiment", "describe", experiment.id, "--json")
    assert [(each.cause, each.batches) for each in attempts(experiment)] == [("finished", 16)]
    assert its.logs == experiment.trial().logs
    assert not list((state_folder / "sgd").iterdir())


def test_without_a_run_the_log_that_an_error_names_exists_after_it(
    state_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyError) as raised, trainer(training_operator_cls=FailsToValidate) as its:
        its.validate()
    (experiment,) = experiments(state_folder)
    (named,) = re.findall(r"log (\S+):\n", str(raised.value.__cause__))
    # Both ranks fail, and the one that fails first may have ended the other.
    (rank,) = [rank for rank in (0, 1) if Path(named) == experiment.trial().rank_log(1, rank)]
    assert "the batch is bad" in Path(named).read_text()
    assert found(experiment) is ExperimentState.ERROR
    failure = first_failure(experiment.trial(), 1)
    assert failure
    assert failure.message == "KeyError: 'val_acuracy'"
    capsys.readouterr()
    command("experiment", "logs", experiment.id)
    assert f"[rank={rank}] the batch is bad" in capsys.readouterr().out


def test_each_gang_is_an_attempt_and_what_is_repeated_counts_once(state_folder: Path, tmp_path: Path) -> None:
    with trainer(run="mine", config={"fatal": (1, 11, str(tmp_path / "once"))}) as its:
        its.train()
        its.train()
        assert its.logs.name == "logs"
    (experiment,) = experiments(state_folder)
    with trainer(run="mine") as its:
        its.train()
        assert found(experiment) is ExperimentState.RUNNING
    assert experiments(state_folder) == [experiment]
    assert [each.cause for each in attempts(experiment)] == ["failed", "finished", "finished"]
    assert "SIGKILL" in str(attempts(experiment)[0].failure)
    assert batches(experiment) == [("training", 8), ("training", 16), ("training", 24)]
    assert experiment.trial().rank_log(3, 1).exists()


def report_twice(config: dict[str, Any]) -> None:
    from hpc_det.sgd import report

    for loss in (2.0, 1.0):
        report({"loss": loss, "name": "of the run"})


def test_reports_of_fit_are_the_metrics_of_an_experiment(state_folder: Path, tmp_path: Path) -> None:
    fit(report_twice, num_workers=2, executor=LocalNodes(1, 2), run=tmp_path / "run", metric="loss")
    (experiment,) = experiments(state_folder)
    assert found(experiment) is ExperimentState.COMPLETED
    assert [report["metrics"] for report in read_reports(experiment.trial().metrics)] == [{"loss": 2.0}, {"loss": 1.0}]
    (tmp_path / "run" / "mine.txt").write_text("not of the run")
    delete_one(experiment)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["mine.txt"]


def test_a_trainer_that_is_part_of_an_experiment_has_none(state_folder: Path, tmp_path: Path) -> None:
    with part_of_an_experiment(), trainer(run=tmp_path / "run") as its:
        its.train()
    assert experiments(state_folder) == []
    assert (tmp_path / "run" / "logs" / "attempt-1" / "rank-0.log").exists()


def test_a_run_of_an_earlier_version_keeps_its_logs_and_is_deleted_with_its_experiment(state_folder: Path) -> None:
    run = state_folder / "sgd" / "old"
    old_log = run / "logs" / "generation-1" / "rank-0.log"
    old_log.parent.mkdir(parents=True, mode=0o700)
    run.chmod(0o700)
    old_log.write_text("written before\n")
    with trainer(run="old"):
        pass
    (experiment,) = experiments(state_folder)
    assert old_log.exists()
    assert experiment.trial().rank_log(1, 0).exists()
    delete_one(experiment)
    assert not run.exists()


def test_what_a_run_has_not_written_is_not_deleted_with_it(state_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    names = ["checkpoints", "finished.json", "jobs", "search", "trials"]
    for name in names:
        (run / name).mkdir(parents=True, mode=0o700)
        (run / name / "mine").touch()
    run.chmod(0o700)
    with trainer(num_workers=1, executor=LocalNodes(1), run=run) as its:
        its.train()
    (experiment,) = experiments(state_folder)
    delete_one(experiment)
    assert sorted(path.name for path in run.iterdir()) == names
    assert all((run / name / "mine").exists() for name in names)


def test_a_driver_on_another_host_is_lost_when_it_has_been_silent(state_folder: Path) -> None:
    run, elsewhere = state_folder / "sgd" / "mine", "17-4711@elsewhere"
    with trainer(run="mine"):
        (experiment,) = experiments(state_folder)
        SearchJournal(experiment).move(0, elsewhere)
        heartbeat = experiment.processes / elsewhere
        write_json(heartbeat, {"place": "elsewhere"})
        assert found(experiment) is ExperimentState.RUNNING
        with refused(UsageError, run, elsewhere, f"kill {experiment.id}"):
            insist_on_no_other_driver(run, within_s=0.0)
        os.utime(heartbeat, (0.0, 0.0))
        assert found(experiment) is ExperimentState.ERROR
        insist_on_no_other_driver(run, within_s=0.0)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (KeyboardInterrupt(), ExperimentState.CANCELED),
        (SystemExit(0), ExperimentState.COMPLETED),
        (SystemExit(1), ExperimentState.ERROR),
        (JobLeaves(), ExperimentState.PAUSED),
    ],
)
def test_an_exception_of_the_program_ends_the_run_by_its_kind(
    error: BaseException, expected: ExperimentState, state_folder: Path
) -> None:
    with suppress(BaseException), trainer(num_workers=1, executor=LocalNodes(1), run="mine"):
        raise error
    assert [found(experiment) for experiment in experiments(state_folder)] == [expected]


def raised_in_a_session(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "last_value", error, raising=False)


def exited(code: int) -> None:
    with suppress(SystemExit):
        sys.exit(code)


@pytest.mark.parametrize(("code", "expected"), [(0, ExperimentState.COMPLETED), (3, ExperimentState.ERROR)])
def test_sys_exit_without_shutdown_ends_the_run_by_its_code(
    code: int, expected: ExperimentState, state_folder: Path
) -> None:
    its = trainer(num_workers=1, executor=LocalNodes(1), run="mine")
    its.train()
    exited(code)
    _shut_down_all()
    (experiment,) = experiments(state_folder)
    assert found(experiment) is expected
    failure = first_failure(experiment.trial(), 1)
    assert (failure.message if failure else None) == ("SystemExit: 3" if code else None)


def test_what_a_program_survived_before_it_trained_on_is_no_failure(
    state_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised_in_a_session(ZeroDivisionError(), monkeypatch)
    exited(2)
    its = trainer(num_workers=1, executor=LocalNodes(1), run="mine")
    its.train()
    raised_in_a_session(NameError("trian"), monkeypatch)
    exited(2)
    its.train()
    _shut_down_all()
    assert [found(experiment) for experiment in experiments(state_folder)] == [ExperimentState.COMPLETED]


def test_an_exception_after_the_training_is_a_failure(state_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raised_in_a_session(ZeroDivisionError(), monkeypatch)
    its = trainer(num_workers=1, executor=LocalNodes(1), run="mine")
    its.train()
    raised_in_a_session(KeyError("accuracy"), monkeypatch)
    _shut_down_all()
    (experiment,) = experiments(state_folder)
    assert found(experiment) is ExperimentState.ERROR
    failure = first_failure(experiment.trial(), 1)
    assert failure
    assert failure.message == "KeyError: 'accuracy'"


def test_a_lost_driver_has_trained_what_it_had_reported(state_folder: Path) -> None:
    its = trainer(num_workers=1, executor=LocalNodes(1), run="mine")
    its.train()
    (experiment,) = experiments(state_folder)
    assert its._gang
    lost, its._gang.record = its._gang.record, RunRecord()  # its end is not recorded, as if it were killed
    its.shutdown()
    assert lost._experiment
    lost._experiment.end()
    with trainer(num_workers=1, executor=LocalNodes(1), run="mine"):
        pass
    assert [(each.cause, each.batches) for each in attempts(experiment)] == [("failed", 16), ("finished", 16)]


PROGRAM = """
import sys
from hpc_det.sgd import TorchTrainer
from tests.sgd.trained import Linear

runs = sys.argv[1].split(",")
trainer, *others = [TorchTrainer(training_operator_cls=Linear, executor="local", run=run or None) for run in runs]
trainer.train()
print("trained", flush=True)
while True:
    trainer.train()
"""


def program(run: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, run], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "trained\n"
    return process


@pytest.mark.integration
def test_a_paused_run_resumes_with_the_next_start_of_its_program(state_folder: Path) -> None:
    with program("mine") as driver:
        (experiment,) = experiments(state_folder)
        pause_one(experiment)
        assert driver.wait(DEADLINE_S) == -signal.SIGTERM
    assert found(experiment) is ExperimentState.PAUSED
    with trainer(run="mine") as its:
        assert found(experiment) is ExperimentState.RUNNING
        assert its.epochs_done >= 1
    assert [each.cause for each in attempts(experiment)] == ["paused", "finished"]


@pytest.mark.integration
@pytest.mark.parametrize("stop", [pause_one, pytest.param(kill_one, marks=pytest.mark.long)])
def test_the_other_run_of_a_process_names_the_command_that_has_ended_it(
    stop: Callable[[ExperimentFolder], str], state_folder: Path
) -> None:
    with program("one,other") as driver:
        one, other = experiments(state_folder)
        stop(one)
        assert driver.wait(DEADLINE_S) in (-signal.SIGTERM, -signal.SIGKILL)
    assert found(other) is ExperimentState.PAUSED
    source = ExperimentView(other).search.paused
    assert source
    assert not unnamed(source, f"experiment {one.id}")
    assert [each.cause for each in attempts(other)] == ["paused"]


@pytest.mark.integration
def test_a_temporary_run_that_a_signal_ends_is_canceled(state_folder: Path) -> None:
    with program("") as driver:
        (experiment,) = experiments(state_folder)
        driver.terminate()
        assert driver.wait(DEADLINE_S) == 128 + signal.SIGTERM
    assert found(experiment) is ExperimentState.CANCELED
    assert ExperimentView(experiment).search.cancelled == "SIGTERM"


@pytest.mark.long
@pytest.mark.parametrize("run", ["mine", ""])
def test_a_driver_that_is_killed_is_not_running(run: str, state_folder: Path) -> None:
    with program(run) as driver:
        (experiment,) = experiments(state_folder)
        assert found(experiment) is ExperimentState.RUNNING
        os.kill(driver.pid, signal.SIGKILL)
    wait_for(lambda: found(experiment) is ExperimentState.ERROR, DEADLINE_S)
    wait_for(lambda: [path.name for path in (state_folder / "sgd").iterdir()] == ([run] if run else []), DEADLINE_S)


@pytest.mark.long
def test_a_temporary_run_can_be_killed_but_not_paused(state_folder: Path) -> None:
    with program("") as driver:
        (experiment,) = experiments(state_folder)
        with refused(UsageError, f"experiment {experiment.id}", "run=NAME", f"kill {experiment.id}"):
            pause_one(experiment)
        kill_one(experiment)
        assert driver.wait(DEADLINE_S) == -signal.SIGKILL
    assert found(experiment) is ExperimentState.CANCELED
