"""hpc-det experiment tune-throughput, on a cluster whose trainings take no time."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hpc_det.plan.effective import Effective
from hpc_det.requeue import Action, Cause
from hpc_det.schedulers.scheduler import CommandError, JobState
from hpc_det.search.method import Exit
from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.folders import ExperimentFolder
from tests.cli.conftest import Command
from tests.cli.life import FakeScheduler, Life
from tests.facts import unnamed

CONFIG = """
name: tiny
entrypoint: model_def:MyTrial
hyperparameters: {global_batch_size: 64}
resources: {slots_per_trial: 2}
searcher: {metric: accuracy, max_length: 100000}
"""
OUT_OF_MEMORY = "rank 0 on node1: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


@dataclass
class Cluster:
    """Each training ends as it begins: at the throughput of its configuration, or with a failure of that text."""

    trained: Callable[[dict[str, Any]], float | str | None]
    """None: it goes on."""
    reports: int = 3
    """Of each; the first is a slow one."""
    begun: list[dict[str, Any]] = field(default_factory=list)

    def submit(self, found: Effective, store: ExperimentStore) -> ExperimentFolder:
        self.begun.append(found.tree)
        life = Life.submitted(store.root, title=found.tree["name"])
        life.begins()
        outcome = self.trained(found.tree)
        if isinstance(outcome, str):
            life.ends(Cause.FAILED, Action.GIVE_UP, why="max_restarts is 0", failure=outcome, how=Exit.FAILED)
        elif outcome is not None:
            for number in range(self.reports):
                life.reports("training", 20 * number, {"loss": 0.5}, samples_per_second=outcome if number else 1.0)
            life.finishes()
        return life.folder


@pytest.fixture
def config(tmp_path: Path, code: Path) -> Path:
    file = tmp_path / "tiny.yaml"
    file.write_text(f"{CONFIG}context_dir: {code}\n")
    return file


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    found = Cluster(loading)
    monkeypatch.setattr("hpc_det.cli.experiment.tune_throughput.submit", found.submit)
    monkeypatch.setattr("hpc_det.cli.experiment.short_runs.POLL_S", 0)
    return found


def loading(tree: dict[str, Any]) -> float:
    """Nearly all time goes into loading, whatever else is tried."""
    if "HPC_DET_THROUGHPUT=first batch" in tree["environment"]["environment_variables"]:
        return 1000.0
    return 50.0 * int(tree["resources"]["slots_per_trial"])


def interrupted() -> JobState:
    """The scheduler is asked, and somebody presses Ctrl-C."""
    raise KeyboardInterrupt


def left(root: Path) -> list[int]:
    return [experiment.id for experiment in ExperimentStore(root).all()]


def test_a_trial_that_waits_for_data_is_told_so(hpc_det: Command, config: Path, cluster: Cluster, root: Path) -> None:
    done = hpc_det("experiment", "tune-throughput", config)
    assert done.code == 0, done.err
    assert [line.split()[-4:] for line in done.out.splitlines()[:6]] == [
        ["SIZE", "SAMPLES/S", "RATIO", "FAILURE"],
        ["2", "64", "100", "1.00"],
        ["2", "64", "1000", "10.00"],
        ["2", "64", "100", "1.00"],
        ["1", "32", "50", "0.50"],
        ["2", "128", "100", "1.00"],
    ]
    assert not unnamed(done.out, "data loader bound", "90%")
    assert "\n2      100%        ████" in done.out
    assert not unnamed(done.out, "Batch size: 64", 128)
    assert "hpc-det: experiment 2: the first batch over and over\nhpc-det: experiment 2: 1000 samples/s\n" in done.err
    assert left(root) == []


def test_programs_get_every_number(hpc_det: Command, config: Path, cluster: Cluster, root: Path) -> None:
    done = hpc_det("experiment", "tune-throughput", config, "--batches", 50, "--keep", "--json")
    found = json.loads(done.out)
    assert found["tests"][3] == {
        "test": "on 1 slot",
        "about": "slots",
        "slots": 1,
        "global_batch_size": 32,
        "aggregation_frequency": 1,
        "trains_on": "data",
        "samples_per_second": 50.0,
        "ratio": 0.5,
        "efficiency": 1.0,
        "out_of_memory": False,
        "failure": None,
        "experiment": 4,
    }
    assert found["findings"][0] == {
        "about": "verdict",
        "text": "data loader bound: 90% of the time",
        "advice": [],
        "settings": [],
    }
    workers = found["findings"][1]["advice"][0]
    assert found["findings"][1]["settings"][0] == f"{workers['text']}: {workers['setting']}"
    assert left(root) == [1, 2, 3, 4, 5]
    assert {tree["searcher"]["max_length"]["batches"] for tree in cluster.begun} == {50}


def test_batches_grow_until_they_are_out_of_memory(
    hpc_det: Command, config: Path, cluster: Cluster, root: Path
) -> None:
    def trained(tree: dict[str, Any]) -> float | str:
        size: int = tree["hyperparameters"]["global_batch_size"]
        return size / 2 if size <= 256 else OUT_OF_MEMORY

    cluster.trained = trained
    done = hpc_det("experiment", "tune-throughput", config)
    assert done.code == 0
    assert not unnamed(done.out, 256, "4.00 times 64", 512)
    assert "hpc-det: experiment 7: out of memory\n" in done.err
    assert left(root) == [], "it is a result"


def test_a_test_that_fails_is_told_in_the_trials_words_and_keeps_nobody_from_the_others(
    hpc_det: Command, config: Path, cluster: Cluster, root: Path
) -> None:
    def trained(tree: dict[str, Any]) -> float | str:
        frequency = tree["optimizations"]["aggregation_frequency"]
        return loading(tree) if frequency == 1 else "rank 0 on node1: ValueError: not with 1000"

    cluster.trained = trained
    done = hpc_det("experiment", "tune-throughput", config)
    assert done.code == 0
    told = "ERROR: rank 0 on node1: ValueError: not with 1000 (max_restarts is 0)"
    assert not unnamed(done.err, "experiment 3", told, "`hpc-det experiment logs 3`")
    assert told in done.out
    assert "Verdict: data loader bound: 90%" in done.out
    assert "Communication:" not in done.out
    assert left(root) == [3], "for its logs"


def test_where_the_experiment_itself_fails_nothing_else_is_tried(
    hpc_det: Command, config: Path, cluster: Cluster, root: Path
) -> None:
    cluster.trained = lambda tree: "rank 0 on node1: ValueError: no"
    done = hpc_det("experiment", "tune-throughput", config)
    assert (done.code, done.out) == (1, "")
    assert not unnamed(done.err, "as configured", "ERROR", "rank 0 on node1: ValueError: no")
    assert len(cluster.begun) == 1


def test_what_reports_no_throughput_cannot_be_measured(
    hpc_det: Command, config: Path, cluster: Cluster, root: Path
) -> None:
    cluster.reports = 1
    done = hpc_det("experiment", "tune-throughput", config)
    assert done.code == 1
    assert not unnamed(done.err, "throughput", "Trainer", "hpc_det.pytorch")
    assert left(root) == [1]


def test_control_c_leaves_nothing_behind(
    hpc_det: Command, config: Path, cluster: Cluster, root: Path, scheduler: FakeScheduler
) -> None:
    cluster.trained = lambda tree: 100.0 if len(cluster.begun) < 2 else None
    scheduler.states = [interrupted, JobState.RUNNING]
    done = hpc_det("experiment", "tune-throughput", config)
    assert done.code == 130
    assert scheduler.cancelled == ["4711"]
    assert "hpc-det: Killed experiment 2\n" in done.err
    assert left(root) == []


def test_what_cannot_be_killed_is_said_and_stays(
    hpc_det: Command, config: Path, cluster: Cluster, root: Path, scheduler: FakeScheduler
) -> None:
    def refuse(job_id: str, run: object) -> None:
        raise CommandError("scancel: no answer")

    cluster.trained = lambda tree: None
    scheduler.states = [interrupted, JobState.RUNNING]
    scheduler.cancel = refuse  # type: ignore[method-assign]
    done = hpc_det("experiment", "tune-throughput", config)
    assert done.code == 130
    assert not unnamed(done.err, "scancel: no answer", "`hpc-det experiment kill 1`")
    assert left(root) == [1]


def test_where_jobs_wait_in_a_queue_they_wait_together(
    hpc_det: Command, config: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, scheduler: FakeScheduler
) -> None:
    cluster.trained = lambda tree: 100.0 if len(cluster.begun) < 2 else None
    scheduler.states = [interrupted, JobState.RUNNING]
    done = hpc_det("experiment", "tune-throughput", config, "--cluster", "slurm", "--max-slots", 8)
    assert done.code == 130
    names = [tree["name"].removeprefix("tiny: ") for tree in cluster.begun]
    assert names == [
        "as configured",
        "the first batch over and over",
        "gradients exchanged every 1000 batches",
        "on 1 slot",
        "on 4 slots",
        "on 8 slots",
        "batches of 128",
    ]


def test_a_dry_run_says_what_would_be_measured(hpc_det: Command, config: Path, cluster: Cluster, root: Path) -> None:
    done = hpc_det("experiment", "tune-throughput", config, "--config", "resources.slots_per_trial=1", "--dry-run")
    assert done.code == 0
    assert done.out.splitlines() == [
        "TEST                           SLOTS  BATCH SIZE",
        "as configured                  1      64",
        "the first batch over and over  1      64",
        "Then doubled batches, until memory or data are exhausted or throughput stops growing",
        "Left out: communication: one slot exchanges nothing; set resources.slots_per_trial to 2 or more",
        "Left out: scaling: the experiment has one slot; give more with --max-slots",
    ]
    assert cluster.begun == []
    assert not root.exists()


def test_all_that_is_wrong_is_said_before_anything_is_submitted(
    hpc_det: Command, config: Path, cluster: Cluster
) -> None:
    done = hpc_det(
        "experiment", "tune-throughput", config, "--config", "hyperparameters.lr={type: log, minval: -3, maxval: -1}"
    )
    assert done.code == 2
    assert not unnamed(done.err, "--config hyperparameters.lr=VALUE")
    done = hpc_det("experiment", "tune-throughput", config, "--max-slots", 3)
    assert done.code == 2
    assert not unnamed(done.err, "--max-slots", 3, "'local'")
    assert cluster.begun == []


def test_a_short_training_is_what_the_layers_say_once(hpc_det: Command, config: Path, cluster: Cluster) -> None:
    config.write_text(
        f"{config.read_text()}environment: {{environment_variables: [A=1]}}\nnotify: [{{command: [/bin/true]}}]\n"
    )
    hpc_det("experiment", "tune-throughput", config)
    baseline = cluster.begun[0]
    variables = baseline["environment"]["environment_variables"]
    assert variables[-2:] == ["A=1", "HPC_DET_THROUGHPUT=data"]
    assert len({*variables}) == len(variables)
    assert baseline["notify"] == []
    assert baseline["labels"] == ["throughput"]
