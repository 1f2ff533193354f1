"""Labels, names, the archive, and the lists that go by them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_det.node.json_files import read_json, write_json
from tests.cli.conftest import Command
from tests.cli.life import FakeScheduler, Life


@pytest.fixture
def three(root: Path, scheduler: FakeScheduler) -> list[Life]:
    """Of three experiments the first has ended."""
    lives = [Life.submitted(root, job_id=str(job), title=f"run-{job}") for job in (11, 12, 13)]
    lives[0].begins()
    lives[0].finishes()
    return lives


def listed(hpc_det: Command, *options: str) -> list[int]:
    return [record["id"] for record in json.loads(hpc_det("e", "list", "--json", *options).out)]


def test_what_is_archived_is_listed_on_demand_only(hpc_det: Command, three: list[Life]) -> None:
    assert hpc_det("e", "archive", "1") == (0, "Archived experiment 1: lists show it with --all\n", "")
    assert listed(hpc_det) == [2, 3]
    assert listed(hpc_det, "--all") == [1, 2, 3]
    assert hpc_det("e", "archive", "1").out == "Experiment 1 was archived before\n"
    assert hpc_det("e", "unarchive", "1").out == "Unarchived experiment 1\n"
    assert hpc_det("e", "unarchive", "1").out == "Experiment 1 is not archived\n"
    assert listed(hpc_det) == [1, 2, 3]


def test_what_is_under_way_is_not_archived_and_keeps_no_other_from_it(hpc_det: Command, three: list[Life]) -> None:
    code, out, err = hpc_det("e", "archive", "2,1,3")
    assert (code, out) == (2, "Archived experiment 1: lists show it with --all\n")
    assert [line.split(";")[0] for line in err.splitlines()] == [
        f"hpc-det: experiment {number} is RUNNING" for number in (2, 3)
    ]
    assert "hpc-det experiment kill 2" in err


def test_labels_are_added_once_and_removed(hpc_det: Command, three: list[Life]) -> None:
    said = hpc_det("e", "label", "add", "1,3", "paper", "paper", "a b").out
    assert said == "Experiment 1 has labels: paper, a b\nExperiment 3 has labels: paper, a b\n"
    assert listed(hpc_det, "--label", "paper", "--label", "a b") == [1, 3]
    assert hpc_det("e", "label", "remove", "1", "paper").out == "Experiment 1 has labels: a b\n"
    assert listed(hpc_det, "--label", "paper") == [3]
    assert hpc_det("e", "label", "remove", "3", "paper", "a b").out == "Experiment 3 has labels: none\n"


def test_labels_of_the_configuration_count(hpc_det: Command, root: Path, scheduler: FakeScheduler) -> None:
    life = Life.submitted(root)
    config = json.loads(life.folder.effective.read_text())
    life.folder.effective.write_text(json.dumps({**config, "labels": ["mnist"]}))
    assert listed(hpc_det, "--label", "mnist") == [1]
    assert hpc_det("e", "label", "remove", "1", "mnist").out == "Experiment 1 has labels: none\n"


def test_a_label_that_is_not_there_is_told_with_the_nearest(hpc_det: Command, three: list[Life]) -> None:
    assert hpc_det("e", "label", "remove", "1", "x").err == "hpc-det: experiment 1: has no label 'x'; it has none\n"
    hpc_det("e", "label", "add", "1", "paper")
    assert hpc_det("e", "label", "remove", "1", "papr") == (
        2,
        "",
        "hpc-det: experiment 1: has no label 'papr'; did you mean 'paper'?\n",
    )


@pytest.mark.parametrize("label", ["", " ", "a\nb", "\x1b[31m"])
def test_a_label_that_a_terminal_cannot_show_is_refused(hpc_det: Command, three: list[Life], label: str) -> None:
    code, _, err = hpc_det("e", "label", "add", "1", label)
    assert code == 2
    assert "expected a text that can be printed" in err
    assert "\x1b" not in err


def test_a_list_of_some_states(hpc_det: Command, three: list[Life]) -> None:
    assert listed(hpc_det, "--state", "COMPLETED") == [1]
    assert listed(hpc_det, "--state", "COMPLETED", "--state", "RUNNING") == [1, 2, 3]
    assert "'DONE' is not one of 'SUBMITTING', 'QUEUED', 'RUNNING'" in hpc_det("e", "list", "--state", "DONE").err


def test_an_experiment_gets_another_name(hpc_det: Command, three: list[Life]) -> None:
    assert hpc_det("e", "set", "name", "1", "better").out == "Renamed experiment 1: run-11 is now better\n"
    assert hpc_det("e", "set", "description", "1", "with dropout").out == "Described experiment 1: with dropout\n"
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
    code, _, err = hpc_det("e", *command, "7,1,x", "word")
    assert code == 2
    assert "7" in err or "'x'" in err
