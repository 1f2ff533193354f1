"""hpc-det experiment verify-resume, on a cluster whose trainings take no time."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hpc_det.config.rank_variables import RESUME_CHECK, stops_of
from hpc_det.plan.effective import Effective
from hpc_det.requeue import Action, Cause
from hpc_det.schedulers.scheduler import JobState
from hpc_det.search.method import Exit
from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.folders import ExperimentFolder
from tests.cli.conftest import Command
from tests.cli.life import FakeScheduler, Life
from tests.facts import unnamed
from tests.view.resume_traces import Change, trace

CONFIG = """
name: tiny
entrypoint: model_def:MyTrial
hyperparameters: {global_batch_size: 64}
searcher: {name: random, max_trials: 4, metric: accuracy, max_length: 100000}
notify: [{command: [/bin/true]}]
"""
VERIFY = ("experiment", "verify-resume")


@dataclass
class Cluster:
    """Each training ends as it begins."""

    fails: Callable[[frozenset[int]], bool] = lambda stops: False
    """Whether the training with these stops does."""
    goes_on: bool = False
    """None of them ends."""
    interrupts: bool = False
    """Ctrl-C comes as soon as the second is submitted."""
    leaves_a_trace: bool = True
    loses: Change = field(default_factory=dict)
    """What is otherwise in the training with stops."""
    begun: list[dict[str, Any]] = field(default_factory=list)

    @property
    def stops(self) -> list[frozenset[int]]:
        return [stops_in(tree) for tree in self.begun]

    def submit(self, found: Effective, store: ExperimentStore) -> ExperimentFolder:
        self.begun.append(found.tree)
        stops = stops_in(found.tree)
        life = Life.submitted(store.root, job_id=str(4710 + len(self.begun)), title=found.tree["name"])
        life.begins()
        if self.interrupts and len(self.begun) == 2:
            signal.raise_signal(signal.SIGINT)
        if self.goes_on:
            return life.folder
        if self.fails(stops):
            life.ends(Cause.FAILED, Action.GIVE_UP, failure="rank 0: ValueError: no data", how=Exit.FAILED)
            return life.folder
        if self.leaves_a_trace:
            batches = found.tree["searcher"]["max_length"]["batches"]
            ranks = found.tree["resources"]["slots_per_trial"]
            trace(life.trial, batches, tuple(sorted(stops)), self.loses if stops else {}, ranks)
        life.finishes()
        return life.folder


def stops_in(tree: dict[str, Any]) -> frozenset[int]:
    (value,) = [
        value
        for name, _, value in (each.partition("=") for each in tree["environment"]["environment_variables"])
        if name == RESUME_CHECK
    ]
    stops = stops_of(value)
    assert stops is not None
    return stops


@pytest.fixture
def config(tmp_path: Path, code: Path) -> Path:
    file = tmp_path / "tiny.yaml"
    file.write_text(f"{CONFIG}context_dir: {code}\n")
    return file


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    found = Cluster()
    monkeypatch.setattr("hpc_det.cli.experiment.verify_resume.submit", found.submit)
    monkeypatch.setattr("hpc_det.cli.experiment.short_runs.POLL_S", 0)
    return found


def left(root: Path) -> list[int]:
    return [experiment.id for experiment in ExperimentStore(root).all()]


def test_a_sound_trial_is_trained_twice_and_nothing_is_left(
    hpc_det: Command, config: Path, cluster: Cluster, root: Path
) -> None:
    done = hpc_det(*VERIFY, config, "--batches", 20, "--stops", 4, "--ranks", 2, "--json")
    assert done.code == 0
    found = json.loads(done.out)
    assert found["identical"]
    assert found["batches"] == 20
    assert found["first_differences"] == found["not_in_checkpoints"] == found["causes"] == []
    assert [len(stops) for stops in cluster.stops] == [0, 4]
    assert found["resumes"] == sorted(cluster.stops[1])
    assert cluster.stops[1] <= {*range(2, 20)}
    assert left(root) == []


def test_trainings_are_short_and_alike_and_notify_nobody(hpc_det: Command, config: Path, cluster: Cluster) -> None:
    hpc_det(*VERIFY, config, "--batches", 20, "--ranks", 2, "--seed", 7)
    undisturbed, stopped = cluster.begun
    assert undisturbed["searcher"] | {"name": "single", "max_length": {"batches": 20}} == undisturbed["searcher"]
    assert undisturbed["notify"] == []
    assert undisturbed["max_restarts"] == 0
    assert undisturbed["reproducibility"]["experiment_seed"] == 7
    assert undisturbed["resources"]["slots_per_trial"] == 2
    assert undisturbed["min_validation_period"] == {"batches": 5}
    different = {key for key in undisturbed if undisturbed[key] != stopped[key]}
    assert different == {"name", "environment"}


def test_the_experiments_own_seed_is_kept(hpc_det: Command, config: Path, cluster: Cluster) -> None:
    hpc_det(*VERIFY, config, "--config", "reproducibility.experiment_seed=3", "--seed", 7)
    assert [tree["reproducibility"]["experiment_seed"] for tree in cluster.begun] == [3, 3]


def test_the_seed_chooses_the_stops(hpc_det: Command, config: Path, cluster: Cluster) -> None:
    for seed in (1, 1, 2):
        hpc_det(*VERIFY, config, "--seed", seed)
    first, again, other = cluster.stops[1::2]
    assert first == again != other


LOSES = {(5, "state"): {"attribute trial.count": "0"}, (5, "metrics"): {"['loss']": "2.0"}}


def test_a_leak_is_exit_code_1_and_named(hpc_det: Command, config: Path, cluster: Cluster, root: Path) -> None:
    cluster.loses = LOSES
    arguments = (*VERIFY, config, "--batches", 7, "--stops", 5)  # after each batch from the second on
    done = hpc_det(*arguments, "--json")
    assert done.code == 1
    found = json.loads(done.out)
    assert not found["identical"]
    (first,) = found["first_differences"]
    assert first == {
        "batch": 5,
        "part": "metrics",
        "name": "['loss']",
        "undisturbed": "1.0",
        "stopped": "2.0",
        "rank": 0,
    }
    assert [(cause["kind"], cause["name"]) for cause in found["causes"]] == [("state", "attribute trial.count")]
    assert left(root) == []
    shown = hpc_det(*arguments)
    assert shown.code == 1
    assert {"['loss']", "1.0", "2.0", "trial.count"} <= {
        each for each in ("['loss']", "1.0", "2.0", "trial.count") if each in shown.out
    }


def test_with_keep_both_experiments_stay(hpc_det: Command, config: Path, cluster: Cluster, root: Path) -> None:
    assert hpc_det(*VERIFY, config, "--keep").code == 0
    assert left(root) == [1, 2]


def test_no_stop_at_all_compares_two_undisturbed_trainings(hpc_det: Command, config: Path, cluster: Cluster) -> None:
    done = hpc_det(*VERIFY, config, "--stops", 0, "--json")
    assert done.code == 0
    assert cluster.stops == [frozenset(), frozenset()]
    assert json.loads(done.out)["resumes"] == []


def test_a_training_that_fails_is_no_result_and_stays_for_its_logs(
    hpc_det: Command, config: Path, cluster: Cluster, root: Path
) -> None:
    cluster.fails = lambda stops: True
    done = hpc_det(*VERIFY, config)
    assert done.code == 1
    assert "ValueError: no data" in done.err
    assert "experiment logs 1" in done.err
    assert done.out == ""
    assert left(root) == [1], "nothing follows a failure"


def test_a_training_that_fails_once_it_is_stopped_is_no_result(
    hpc_det: Command, config: Path, cluster: Cluster, root: Path
) -> None:
    cluster.fails = bool
    done = hpc_det(*VERIFY, config)
    assert done.code == 1
    assert "ValueError: no data" in done.err
    assert left(root) == [2]


def test_what_left_no_trace_cannot_be_compared(hpc_det: Command, config: Path, cluster: Cluster) -> None:
    cluster.leaves_a_trace = False
    done = hpc_det(*VERIFY, config)
    assert done.code == 1
    assert done.out == ""
    assert not unnamed(done.err, "hpc_det.core", "hpc_det.pytorch"), "what is supported is named"


def test_all_that_is_wrong_is_said_before_anything_is_submitted(
    hpc_det: Command, config: Path, code: Path, cluster: Cluster
) -> None:
    (code / "train.py").write_text("from hpc_det.sgd import TorchTrainer")
    wrong = (
        "--config",
        "hyperparameters.lr={type: log, minval: -3, maxval: -1}",
        "--config",
        "entrypoint=python3 train.py",
        "--stops",
        19,
        "--batches",
        20,
    )
    done = hpc_det(*VERIFY, config, *wrong)
    assert done.code == 2
    assert len(done.err.splitlines()) == 3
    for named in ("hyperparameters.lr", "train.py", "--stops 19"):
        assert named in done.err
    done = hpc_det(*VERIFY, config, "--stops", 99, "--config", "no_such_key=1")
    assert done.code == 2
    for named in ("no_such_key", "--stops 99"):
        assert named in done.err
    assert cluster.begun == []


@pytest.mark.parametrize(
    "wrong",
    [
        ("--batches", 2),
        ("--batches", "many"),
        ("--ranks", 0),
        ("--ranks", 1000),
        ("--stops", -1),
        ("--seed", -1),
        ("--cluster", "nowhere"),
        ("--template", "none"),
    ],
)
def test_a_wrong_value_is_exit_code_2(hpc_det: Command, config: Path, cluster: Cluster, wrong: tuple[str, Any]) -> None:
    done = hpc_det(*VERIFY, config, *wrong)
    assert done.code == 2
    assert str(wrong[1]) in done.err
    assert f"--{wrong[0]}" not in done.err  # the option as it is typed
    assert cluster.begun == []


def test_ctrl_c_within_a_submission_ends_that_experiment_too(
    hpc_det: Command, config: Path, cluster: Cluster, root: Path, scheduler: FakeScheduler
) -> None:
    cluster.goes_on = cluster.interrupts = True
    scheduler.states = [JobState.QUEUED]
    assert hpc_det(*VERIFY, config, "--cluster", "slurm").code == 130
    assert sorted(scheduler.cancelled) == ["4711", "4712"]
    assert left(root) == []


def test_ctrl_c_kills_both_and_leaves_nothing(
    hpc_det: Command, config: Path, cluster: Cluster, root: Path, scheduler: FakeScheduler
) -> None:
    """A queue holds their jobs."""

    def interrupted() -> JobState:
        raise KeyboardInterrupt

    cluster.goes_on = True
    scheduler.states = [JobState.QUEUED, interrupted, JobState.QUEUED]
    done = hpc_det(*VERIFY, config, "--cluster", "slurm")
    assert done.code == 130
    assert len(cluster.begun) == 2, "side by side"
    assert sorted(scheduler.cancelled) == ["4711", "4712"]
    assert left(root) == []
