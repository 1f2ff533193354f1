"""The end of an experiment: what its policy does not keep goes, over all trials, here and in a store."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_det.checkpoint.collect import collect
from hpc_det.checkpoint.committed import Committed, committed
from hpc_det.checkpoint.remote import Remote
from hpc_det.checkpoint.sources import wanted_by_later
from hpc_det.errors import HpcDetError
from hpc_det.node.json_files import append_line, write_json
from hpc_det.store.folders import ExperimentFolder
from tests.checkpoint.saved import saved
from tests.cli.life import Life

Prepare = Callable[..., ExperimentFolder]


@pytest.fixture
def prepare(tmp_path: Path) -> Prepare:
    """Upstream's two trials, each checkpoint with its number as its batches."""

    def prepare(best: int = 0, trial_best: int = 0, trial_latest: int = 0, **more: Any) -> ExperimentFolder:
        experiment = ExperimentFolder(tmp_path / "experiments" / "12")
        experiment.path.mkdir(parents=True)
        storage = {"save_experiment_best": best, "save_trial_best": trial_best, "save_trial_latest": trial_latest}
        searcher = {"metric": "loss", "smaller_is_better": True}
        write_json(experiment.effective, {"searcher": searcher, "checkpoint_storage": {**storage, **more}})
        trained(experiment, 1, range(1, 6), {3: 0.6, 4: 0.5, 5: 0.4})
        trained(experiment, 2, range(6, 11), {7: 0.2, 8: 0.3})
        return experiment

    return prepare


def trained(experiment: ExperimentFolder, number: int, steps: range, losses: dict[int, float]) -> None:
    trial = experiment.trial(number)
    trial.create()
    for step in steps:
        saved(trial.checkpoints, step)
    for step, loss in losses.items():
        append_line(trial.metrics, {"kind": "validation", "steps": step, "metrics": {"loss": loss}})


def here(experiment: ExperimentFolder) -> list[int]:
    return sorted(item.steps for trial in experiment.trials() for item in committed(trial.checkpoints))


def of(experiment: ExperimentFolder, steps: int) -> Committed:
    every = (item for trial in experiment.trials() for item in committed(trial.checkpoints))
    return next(item for item in every if item.steps == steps)


def test_the_best_of_the_experiment_stay_whichever_trial_has_them(prepare: Prepare) -> None:
    experiment = prepare(best=2, trial_latest=1)
    gone = [found.checkpoint.steps for found in collect(experiment)]
    assert (sorted(gone), here(experiment)) == ([1, 2, 3, 4, 6, 9], [5, 7, 8, 10])
    assert [path for trial in experiment.trials() for path in trial.checkpoints.glob(".*")] == []


def test_a_policy_that_keeps_nothing_leaves_nothing(prepare: Prepare) -> None:
    experiment = prepare()
    collect(experiment)
    assert here(experiment) == []


def test_a_second_process_finds_nothing_to_do(prepare: Prepare) -> None:
    experiment = prepare(trial_best=1)
    collect(experiment)
    assert (collect(experiment), here(experiment)) == ([], [5, 7])


def test_what_somebody_else_has_deleted_meanwhile_is_no_error(
    prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = prepare(trial_best=1)
    found = [here(experiment)]

    def clear_first(trial: object) -> None:
        monkeypatch.undo()
        collect(experiment)
        found.append(here(experiment))

    monkeypatch.setattr("hpc_det.checkpoint.collect.clear_leftovers", clear_first)
    assert len(collect(experiment)) == 8
    assert [*found, here(experiment)] == [[*range(1, 11)], [5, 7], [5, 7]]


def test_what_a_killed_removal_has_left_goes(prepare: Prepare) -> None:
    experiment = prepare(trial_best=9, trial_latest=9)
    old = of(experiment, 1)
    old.path.rename(old.path.with_name(f".deleted-{old.uuid}"))
    (experiment.trial(2).checkpoints / ".partial-x").mkdir()
    collect(experiment)
    assert [path.name for trial in experiment.trials() for path in trial.checkpoints.glob(".*")] == [".partial-x"]


def test_trials_without_checkpoints_are_no_error(prepare: Prepare) -> None:
    experiment = prepare(trial_latest=1)
    experiment.trial(3).path.mkdir()
    collect(experiment)
    assert here(experiment) == [5, 10]


def test_a_point_of_a_multirun_has_a_policy_of_its_own(prepare: Prepare) -> None:
    experiment = prepare(trial_latest=1)
    more = {"save_experiment_best": 0, "save_trial_best": 0, "save_trial_latest": 3}
    write_json(experiment.points, [{}, {"checkpoint_storage": more}])
    collect(experiment)
    assert here(experiment) == [5, 8, 9, 10]


# --- for other experiments


def begins_with(checkpoint: Committed, root: Path) -> Life:
    """Another experiment, of one trial."""
    life = Life.submitted(root)
    write_json(life.folder.warm_start, {"checkpoint": str(checkpoint.path)})
    return life


def test_what_an_experiment_begins_with_that_has_not_ended_stays(prepare: Prepare, tmp_path: Path) -> None:
    experiment = prepare(trial_latest=1)
    wanted, other = begins_with(of(experiment, 3), tmp_path), begins_with(of(experiment, 4), tmp_path)
    other.search.cancel("ada")
    assert len(collect(experiment)) == 7
    assert here(experiment) == [3, 5, 10]
    wanted.begins()
    wanted.finishes()
    collect(experiment)
    assert here(experiment) == [5, 10]


def test_an_experiment_that_nobody_can_read_has_not_ended(prepare: Prepare, tmp_path: Path) -> None:
    experiment = prepare()
    damaged = begins_with(of(experiment, 3), tmp_path)
    damaged.folder.effective.write_text("{")
    begins_with(of(experiment, 4), tmp_path).folder.warm_start.write_text("{")
    collect(experiment)
    assert here(experiment) == [3]


def test_a_thousand_experiments_are_looked_through_at_once(prepare: Prepare, tmp_path: Path) -> None:
    experiment = prepare()
    other = of(experiment, 3).path.with_name("of-another-experiment")
    for number in range(13, 1013):
        folder = ExperimentFolder(experiment.path.with_name(str(number)))
        folder.path.mkdir()
        folder.config.touch()
        if number % 2:
            write_json(folder.warm_start, {"checkpoint": str(other)})
    began = time.process_time()
    assert list(wanted_by_later(experiment, {of(experiment, 3).uuid})) == []
    assert time.process_time() - began < 0.5


# --- in an object store


def in_a_bucket(experiment: ExperimentFolder, bucket: Path) -> None:
    write_json(experiment.storage, {"url": f"file://{bucket}"})
    for trial in experiment.trials():
        remote = Remote(f"file://{bucket}/{trial.id}", {"auto_mkdir": True})
        for item in committed(trial.checkpoints):
            remote.upload(item)


def stored(bucket: Path) -> list[int]:
    return sorted(json.loads(path.read_text())["steps_completed"] for path in bucket.glob("*/*/manifest.json"))


def test_a_store_is_brought_to_the_same(prepare: Prepare, tmp_path: Path) -> None:
    experiment, bucket = prepare(best=2), tmp_path / "bucket"
    in_a_bucket(experiment, bucket)
    collect(experiment)
    assert stored(bucket) == here(experiment) == [7, 8]


def test_what_is_in_the_store_alone_counts_too(prepare: Prepare, tmp_path: Path) -> None:
    experiment, bucket = prepare(best=1, trial_latest=1), tmp_path / "bucket"
    in_a_bucket(experiment, bucket)
    (best := of(experiment, 7)).path.rename(tmp_path / best.uuid)
    collect(experiment)
    assert (stored(bucket), here(experiment)) == ([5, 7, 10], [5, 10])


def test_a_store_that_does_not_answer_is_told_and_nothing_goes(
    prepare: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment, bucket = prepare(), tmp_path / "bucket"
    in_a_bucket(experiment, bucket)

    def refuse(*_: object) -> None:
        raise PermissionError("no")

    monkeypatch.setattr(Remote, "stored", refuse)
    with pytest.raises(HpcDetError, match=f"^checkpoint_storage: file://{bucket}/1: PermissionError: no$"):
        collect(experiment)
    assert here(experiment) == [*range(1, 11)]
