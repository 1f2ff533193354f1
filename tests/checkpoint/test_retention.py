from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_det.checkpoint.committed import Committed, committed
from hpc_det.checkpoint.object_store import Remote
from hpc_det.checkpoint.retention import Policy, TrialCheckpoints, superfluous, superfluous_of_all
from hpc_det.checkpoint.storage import collect, wanted_by_later
from hpc_det.errors import HpcDetError
from hpc_det.node.json_files import append_line, write_json
from hpc_det.store.folders import ExperimentFolder
from tests.checkpoint.saved import saved
from tests.cli.life import Life
from tests.facts import refused

NAN, INF = math.nan, math.inf


def newest_first(steps: list[int]) -> list[Committed]:
    return [
        Committed(path=Path(str(number)), steps=number, time=float(number), files={})
        for number in sorted(steps, reverse=True)
    ]


def kept(
    steps: list[int], validations: dict[int, float], *, best: int, latest: int, smaller_is_better: bool = True
) -> list[int]:
    every = newest_first(steps)
    gone = superfluous(every, validations, smaller_is_better=smaller_is_better, best=best, latest=latest)
    assert all(checkpoint in every for checkpoint in gone)
    return sorted(checkpoint.steps for checkpoint in every if checkpoint not in gone)


# The table of two trials in Determined's own test; each checkpoint's number is its steps.
TRIAL_1 = ([1, 2, 3, 4, 5], {3: 0.6, 4: 0.5, 5: 0.4})
TRIAL_2 = ([6, 7, 8, 9, 10], {7: 0.2, 8: 0.3})


def kept_of_all(*trials: tuple[list[int], dict[int, float], Policy], smaller_is_better: bool = True) -> list[int]:
    every = [
        TrialCheckpoints(checkpoints=newest_first(steps), validations=validations, policy=policy)
        for steps, validations, policy in trials
    ]
    gone = superfluous_of_all(every, smaller_is_better=smaller_is_better)
    return sorted({step for steps, _, _ in trials for step in steps} - {item.steps for item in gone})


@pytest.mark.parametrize(
    ("experiment_best", "trial_best", "trial_latest", "stay"),
    [
        (0, 0, 0, []),
        (2, 0, 0, [7, 8]),
        (5, 0, 0, [3, 4, 5, 7, 8]),
        (0, 1, 0, [5, 7]),
        (0, 3, 0, [3, 4, 5, 7, 8]),
        (0, 0, 1, [5, 10]),
        (0, 0, 3, [3, 4, 5, 8, 9, 10]),
        (2, 1, 0, [5, 7, 8]),
        (2, 0, 1, [5, 7, 8, 10]),
        (0, 1, 1, [5, 7, 10]),
        (2, 1, 1, [5, 7, 8, 10]),
    ],
)
@pytest.mark.parametrize("smaller_is_better", [True, False])
def test_upstreams_table(
    experiment_best: int, trial_best: int, trial_latest: int, stay: list[int], smaller_is_better: bool
) -> None:
    policy = Policy(experiment_best=experiment_best, trial_best=trial_best, trial_latest=trial_latest)
    sign = 1 if smaller_is_better else -1
    trials = [(steps, {step: sign * value for step, value in found.items()}) for steps, found in (TRIAL_1, TRIAL_2)]
    assert kept_of_all(*((*trial, policy) for trial in trials), smaller_is_better=smaller_is_better) == stay


def test_of_equals_of_two_trials_the_one_that_came_first_is_the_best() -> None:
    policy = Policy(experiment_best=1, trial_best=0, trial_latest=0)
    assert kept_of_all(([3, 4], {3: 0.5, 4: 0.5}, policy), ([1, 2], {2: 0.5}, policy)) == [2]


def test_a_point_that_keeps_more_of_the_best_counts_them_among_those_of_all() -> None:
    two, none = (Policy(experiment_best=number, trial_best=0, trial_latest=0) for number in (2, 0))
    assert kept_of_all(([1, 2], {1: 0.1, 2: 0.3}, two), ([3], {3: 0.2}, none)) == [1]


def test_while_a_trial_runs_the_best_of_the_experiment_may_all_be_its_own() -> None:
    assert Policy(experiment_best=3, trial_best=2).best_while_it_runs == 3
    assert Policy(experiment_best=0, trial_best=2).best_while_it_runs == 2


@pytest.mark.parametrize(
    ("values", "smaller_is_better", "the_best"),
    [
        ({1: 0.5, 2: 0.5, 3: 0.5}, True, [1, 2]),
        ({1: 0.7, 2: 0.5, 3: 0.5}, True, [2, 3]),
        ({1: 0.5, 2: 0.7, 3: 0.7}, False, [2, 3]),
        ({1: 0.5, 2: 0.5, 3: 0.7}, False, [1, 3]),
        ({1: NAN, 2: 0.5, 3: NAN}, True, [1, 2]),
        ({1: NAN, 2: 0.5, 3: 0.6}, False, [2, 3]),
        ({1: NAN, 2: 0.5, 3: 0.6}, True, [2, 3]),
        ({1: -INF, 2: 0.5, 3: INF}, True, [1, 2]),
        ({1: -INF, 2: 0.5, 3: INF}, False, [2, 3]),
        ({1: NAN, 2: INF, 3: INF}, True, [2, 3]),
    ],
)
def test_the_two_best_are_kept_of_equals_the_earliest(
    values: dict[int, float], smaller_is_better: bool, the_best: list[int]
) -> None:
    assert kept([1, 2, 3], values, best=2, latest=0, smaller_is_better=smaller_is_better) == the_best


def test_validations_without_a_checkpoint_take_no_place() -> None:
    assert kept([2, 4], {1: 0.1, 2: 0.5, 3: 0.1, 4: 0.6}, best=1, latest=0) == [2]


def test_nothing_to_keep_and_nothing_there() -> None:
    assert kept([], {}, best=1, latest=1) == []


def test_what_no_trial_resumes_from_pushes_nothing_out() -> None:
    """The owner removed files of the newest checkpoint; the trial then trains the lost batches again."""
    partial, *whole = newest_first([10, 20, 30])
    every = [replace(partial, removed=("state_dict.pth",)), *whole]
    gone = superfluous(every, {}, smaller_is_better=True, best=0, latest=1)
    assert [item.steps for item in gone] == [10]


Prepare = Callable[..., ExperimentFolder]


@pytest.fixture
def prepare(tmp_path: Path) -> Prepare:
    """Return a function that creates Determined's two trials; each checkpoint has as many batches as its number."""

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

    monkeypatch.setattr("hpc_det.checkpoint.storage.clear_leftovers", clear_first)
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
    """Return another experiment with one trial that starts from this checkpoint."""
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
    with refused(HpcDetError, "checkpoint_storage: ", f"file://{bucket}/1", "PermissionError: no"):
        collect(experiment)
    assert here(experiment) == [*range(1, 11)]
