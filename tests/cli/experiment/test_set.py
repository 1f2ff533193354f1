"""Labels, names and the archive, and listings that filter by them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from hpc_det.checkpoint.committed import committed
from hpc_det.checkpoint.retention import Policy, policy_of
from hpc_det.node.json_files import read_json, write_json
from hpc_det.schedulers.scheduler import JobState
from tests.cli.conftest import Command
from tests.cli.life import FakeScheduler, Life, random_search
from tests.facts import each_names, unnamed


@pytest.fixture
def three(root: Path, scheduler: FakeScheduler) -> list[Life]:
    """Return three experiments, of which the first has finished."""
    lives = [Life.submitted(root, job_id=str(job), title=f"run-{job}") for job in (11, 12, 13)]
    lives[0].begins()
    lives[0].finishes()
    return lives


def listed(hpc_det: Command, *options: str) -> list[int]:
    return [record["id"] for record in json.loads(hpc_det("e", "list", "--json", *options).out)]


def test_what_is_archived_is_listed_on_demand_only(hpc_det: Command, three: list[Life]) -> None:
    assert hpc_det("e", "archive", "1").succeeds("experiment 1", "--all")
    assert listed(hpc_det) == [2, 3]
    assert listed(hpc_det, "--all") == [1, 2, 3]
    assert hpc_det("e", "archive", "1").succeeds("Experiment 1", "already")
    assert hpc_det("e", "unarchive", "1").succeeds("experiment 1")
    assert hpc_det("e", "unarchive", "1").succeeds("Experiment 1", "not")
    assert listed(hpc_det) == [1, 2, 3]


def test_what_is_under_way_is_not_archived_and_keeps_no_other_from_it(hpc_det: Command, three: list[Life]) -> None:
    code, out, err = hpc_det("e", "archive", "2,1,3")
    assert (code, unnamed(out, "experiment 1")) == (2, [])
    each_names(err.splitlines(), *([f"experiment {n}", "RUNNING", f"hpc-det experiment kill {n}"] for n in (2, 3)))


def test_labels_are_added_once_and_removed(hpc_det: Command, three: list[Life]) -> None:
    said = hpc_det("e", "label", "add", "1,3", "paper", "paper", "a b").out
    assert not unnamed(said, "Experiment 1", "Experiment 3", "paper, a b")
    assert listed(hpc_det, "--label", "paper", "--label", "a b") == [1, 3]
    assert hpc_det("e", "label", "remove", "1", "paper").succeeds("Experiment 1", "a b")
    assert listed(hpc_det, "--label", "paper") == [3]
    assert hpc_det("e", "label", "remove", "3", "paper", "a b").succeeds("Experiment 3", "none")


def test_labels_of_the_configuration_count(hpc_det: Command, root: Path, scheduler: FakeScheduler) -> None:
    life = Life.submitted(root)
    config = json.loads(life.folder.effective.read_text())
    life.folder.effective.write_text(json.dumps({**config, "labels": ["mnist"]}))
    assert listed(hpc_det, "--label", "mnist") == [1]
    assert hpc_det("e", "label", "remove", "1", "mnist").succeeds("Experiment 1", "none")


def test_a_label_that_is_not_there_is_told_with_the_nearest(hpc_det: Command, three: list[Life]) -> None:
    assert hpc_det("e", "label", "remove", "1", "x").fails(2, "experiment 1", "'x'", "none")
    hpc_det("e", "label", "add", "1", "paper")
    assert hpc_det("e", "label", "remove", "1", "papr").fails(2, "experiment 1", "'papr'", "'paper'")


@pytest.mark.parametrize("label", ["", " ", "a\nb", "\x1b[31m"])
def test_a_label_that_a_terminal_cannot_show_is_refused(hpc_det: Command, three: list[Life], label: str) -> None:
    code, _, err = hpc_det("e", "label", "add", "1", label)
    assert code == 2
    assert not unnamed(err, "label")
    assert "\x1b" not in err


def test_a_list_of_some_states(hpc_det: Command, three: list[Life]) -> None:
    assert listed(hpc_det, "--state", "COMPLETED") == [1]
    assert listed(hpc_det, "--state", "COMPLETED", "--state", "RUNNING") == [1, 2, 3]
    assert "'DONE' is not one of 'SUBMITTING', 'QUEUED', 'RUNNING'" in hpc_det("e", "list", "--state", "DONE").err


def test_an_experiment_gets_another_name(hpc_det: Command, three: list[Life]) -> None:
    assert hpc_det("e", "set", "name", "1", "better").succeeds("experiment 1", "run-11", "better")
    assert hpc_det("e", "set", "description", "1", "with dropout").succeeds("experiment 1", "with dropout")
    first = json.loads(hpc_det("e", "list", "--json").out)[0]
    assert (first["name"], first["description"]) == ("better", "with dropout")


def test_the_configuration_is_shown_with_what_is_said_of_it_now(hpc_det: Command, three: list[Life]) -> None:
    life = three[0]
    config = read_json(life.folder.effective) or {}
    write_json(life.folder.effective, {**config, "description": "", "labels": ["mnist"]})
    write_json(life.folder.origin, {"name": "template", "labels[0]": "template"})
    hpc_det("e", "set", "name", "1", "better")
    hpc_det("e", "label", "add", "1", "paper")
    found = json.loads(hpc_det("e", "config", "1", "--json").out)
    assert found == {**config, "name": "better", "description": "", "labels": ["mnist", "paper"]}
    assert "name: better\n" in hpc_det("e", "config", "1").out
    said = [line.split() for line in hpc_det("e", "config", "1", "--origins").out.splitlines()]
    rows = {words[0]: words[-1] for words in said}
    assert (rows["name:"], rows["description:"]) == ("(config)", "(default)")
    assert (rows["labels[0]:"], rows["labels[1]:"]) == ("(template)", "(config)")


def test_the_owner_alone_may_read_what_is_said(hpc_det: Command, three: list[Life]) -> None:
    hpc_det("e", "label", "add", "1", "paper")
    assert three[0].folder.about.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "command", [["archive"], ["unarchive"], ["label", "add"], ["label", "remove"], ["set", "name"]]
)
def test_an_unknown_experiment_is_told_with_all_others(hpc_det: Command, three: list[Life], command: list[str]) -> None:
    assert hpc_det("e", *command, "7,1,8", "word").fails(2, "experiment 7", "experiment 8")


SET = ("experiment", "set", "gc-policy")


@pytest.fixture
def life(root: Path) -> Life:
    """Return experiment 1, which has finished: two trials with checkpoints at 100 and 400 batches.

    The best checkpoint is the last one of trial 2.
    """
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
    assert not unnamed(err, "Delete 4 checkpoints", "28 B", "--yes")


def test_those_who_begin_with_what_goes_are_named_before(
    hpc_det: Command, life: Life, root: Path, scheduler: FakeScheduler
) -> None:
    going, staying = (item.path for item in sorted(committed(life.trial.checkpoints), key=lambda item: item.steps))
    for checkpoint in (going, staying):
        write_json(Life.submitted(root).folder.warm_start, {"checkpoint": str(checkpoint)})
    scheduler.states = [JobState.QUEUED]
    code, _, err = hpc_det(*SET, "1", "--save-trial-best", "0")
    assert (code, going.exists()) == (2, True)
    assert not unnamed(err.splitlines()[0], "warning", "experiment 2", "QUEUED", going)
    assert str(staying) not in err


def test_nothing_is_asked_where_nothing_goes(hpc_det: Command, life: Life) -> None:
    assert hpc_det(*SET, "1", "--save-trial-latest", "9").succeeds("Experiment 1", "0 checkpoints")


def test_a_running_experiment_keeps_to_it_from_its_next_checkpoint_on(
    hpc_det: Command, root: Path, scheduler: FakeScheduler
) -> None:
    life = Life.submitted(root)
    life.begins()
    for steps in (100, 200, 300):
        life.saves(steps)
    assert hpc_det(*SET, "1", "--save-trial-latest", "1").succeeds("Experiment 1", "next checkpoints")
    assert len(kept(life)) == 3


def test_the_points_of_a_multirun_get_it_too(hpc_det: Command, life: Life) -> None:
    own = {"save_experiment_best": 0, "save_trial_best": 5, "save_trial_latest": 1}
    write_json(life.folder.points, [{"hyperparameters": {}}, {"hyperparameters": {}, "checkpoint_storage": own}])
    hpc_det(*SET, "1", "--save-trial-latest", "3")
    assert policy_of(life.folder.trial(2)) == Policy(experiment_best=0, trial_best=5, trial_latest=3)


def test_a_policy_without_a_number_is_refused(hpc_det: Command, life: Life) -> None:
    assert hpc_det(*SET, "1").fails(2, "--save-experiment-best", "--save-trial-best", "--save-trial-latest")
    assert hpc_det(*SET, "1", "--save-trial-latest", "-1").code == 2
