"""experiment set gc-policy: how many checkpoints stay, from now on."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hpc_det.checkpoint.committed import committed
from hpc_det.checkpoint.retention import Policy, policy_of
from hpc_det.node.json_files import read_json, write_json
from hpc_det.schedulers.scheduler import JobState
from tests.cli.conftest import Command
from tests.cli.life import FakeScheduler, Life, random_search

SET = ("experiment", "set", "gc-policy")


@pytest.fixture
def life(root: Path) -> Life:
    """Experiment 1 has ended: two trials, each with checkpoints at 100 and 400 batches; the best is trial 2's last."""
    life = Life.submitted(root, **random_search(2))
    life.begins()
    for trial, values in ((1, (0.9, 0.8)), (2, (0.7, 0.95))):
        for steps, accuracy in zip((100, 400), values, strict=True):
            life.reports("validation", steps, {"accuracy": accuracy}, trial=trial)
            life.saves(steps, trial=trial)
        life.finishes()
    return life


def kept(life: Life) -> list[tuple[int, int]]:
    return [(trial.id, item.steps) for trial in life.folder.trials() for item in committed(trial.checkpoints)]


def test_what_the_new_policy_does_not_keep_is_shown_and_goes(hpc_det: Command, life: Life) -> None:
    options = ("--save-experiment-best", "1", "--save-trial-best", "0", "--save-trial-latest", "0", "--yes")
    code, out, _ = hpc_det(*SET, "1", *options)
    assert (code, kept(life)) == (0, [(2, 400)])
    *shown, said = out.splitlines()
    assert sorted(line.partition(" of ")[2] for line in shown) == [
        "trial 1/1 at batch 100, 7 B, is not kept",
        "trial 1/1 at batch 400, 7 B, is not kept",
        "trial 1/2 at batch 100, 7 B, is not kept",
    ]
    assert said == "Experiment 1: 3 checkpoints deleted"


def test_the_policy_is_written_where_others_read_it(hpc_det: Command, life: Life) -> None:
    assert hpc_det(*SET, "1", "--save-trial-latest", "2", "--yes").code == 0
    assert policy_of(life.trial) == Policy(experiment_best=0, trial_best=1, trial_latest=2)
    assert yaml.safe_load(life.folder.config.read_text())["checkpoint_storage"]["save_trial_latest"] == 2
    assert (read_json(life.folder.origin) or {})["checkpoint_storage.save_trial_latest"] == "config"


def test_without_a_yes_nothing_changes(hpc_det: Command, life: Life) -> None:
    code, _, err = hpc_det(*SET, "1", "--save-trial-best", "0", "--save-trial-latest", "0")
    assert (code, len(kept(life)), policy_of(life.trial)) == (2, 4, Policy())
    assert err == "hpc-det: Delete 4 checkpoints (28 B) for good? Nobody is there to answer; add --yes\n"


def test_those_who_begin_with_what_goes_are_named_before(
    hpc_det: Command, life: Life, root: Path, scheduler: FakeScheduler
) -> None:
    going, staying = (item.path for item in sorted(committed(life.trial.checkpoints), key=lambda item: item.steps))
    for checkpoint in (going, staying):
        write_json(Life.submitted(root).folder.warm_start, {"checkpoint": str(checkpoint)})
    scheduler.states = [JobState.QUEUED]
    code, _, err = hpc_det(*SET, "1", "--save-trial-best", "0")
    assert (code, going.exists()) == (2, True)
    assert err.splitlines()[0] == (
        f"hpc-det: warning: experiment 2 is QUEUED, and its trials begin with the weights in {going}: those that have "
        f"not begun would fail"
    )
    assert str(staying) not in err


def test_nothing_is_asked_where_nothing_goes(hpc_det: Command, life: Life) -> None:
    assert hpc_det(*SET, "1", "--save-trial-latest", "9").out == "Experiment 1: 0 checkpoints deleted\n"


def test_a_running_experiment_keeps_to_it_from_its_next_checkpoint_on(
    hpc_det: Command, root: Path, scheduler: FakeScheduler
) -> None:
    life = Life.submitted(root)
    life.begins()
    for steps in (100, 200, 300):
        life.saves(steps)
    assert hpc_det(*SET, "1", "--save-trial-latest", "1") == (
        0,
        "Experiment 1: has not ended; its trials keep to the policy from their next checkpoints on\n",
        "",
    )
    assert len(kept(life)) == 3


def test_the_points_of_a_multirun_get_it_too(hpc_det: Command, life: Life) -> None:
    own = {"save_experiment_best": 0, "save_trial_best": 5, "save_trial_latest": 1}
    write_json(life.folder.points, [{"hyperparameters": {}}, {"hyperparameters": {}, "checkpoint_storage": own}])
    hpc_det(*SET, "1", "--save-trial-latest", "3")
    assert policy_of(life.folder.trial(2)) == Policy(experiment_best=0, trial_best=5, trial_latest=3)


def test_a_policy_without_a_number_is_refused(hpc_det: Command, life: Life) -> None:
    assert hpc_det(*SET, "1") == (
        2,
        "",
        "hpc-det: set gc-policy: give at least one of --save-experiment-best, --save-trial-best and "
        "--save-trial-latest\n",
    )
    assert hpc_det(*SET, "1", "--save-trial-latest", "-1").code == 2
