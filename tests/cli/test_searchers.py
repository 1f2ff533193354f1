"""Searchers that a submission checks further than the schema: Optuna's, users', and sources of weights."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Command
from tests.cli.life import Life
from tests.facts import unnamed
from tests.search.methods import POPULATION, ROUNDS

DRY = ("--cluster", "slurm", "--dry-run")
OPTUNA = ("--config", "searcher={name: optuna, metric: loss, max_length: 10, max_trials: 4}")

needs_optuna = pytest.mark.skipif(importlib.util.find_spec("optuna") is None, reason="needs the extra `optuna`")


def custom(name: str) -> tuple[str, str]:
    searcher = f"{{name: custom, class: 'mine:{name}', metric: loss, max_length: 8, max_trials: 4}}"
    return "--config", f"searcher={searcher}"


def test_without_optuna_the_command_to_install_it_is_told_before_anything_is_queued(
    hpc_det: Command, config: Path, code: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpc_det.submit.submission.find_spec", lambda name: None)
    result = hpc_det("experiment", "create", config, code, *OPTUNA, *DRY)
    assert (result.code, result.out) == (2, "")
    install = f"{sys.executable} -m pip install 'hpc_det[optuna]'"
    assert not unnamed(result.err, "searcher.name", "optuna", install)
    assert not root.exists()


def test_optuna_is_not_loaded_to_submit_and_its_choices_are_not_foretold(
    hpc_det: Command, config: Path, code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(code)
    loaded = "optuna" in sys.modules
    shown = hpc_det("preview-search", config, *OPTUNA)
    assert shown.out.startswith("optuna: 4 trials, at most 4 at a time\n  4 trials to 10 batches\n")
    assert not unnamed(shown.out, "hyperparameters")
    assert json.loads(hpc_det("preview-search", config, *OPTUNA, "--json").out)["first"] == []
    assert ("optuna" in sys.modules) == loaded


RANGE = ("--config", "hyperparameters.rate={type: double, minval: 0, maxval: 1}")


@needs_optuna
@pytest.mark.parametrize("command", [["config", "check"], ["experiment", "create", "--dry-run"]])
def test_a_sampler_that_optuna_does_not_have_is_told_before_anything_is_queued(
    hpc_det: Command, config: Path, code: Path, command: list[str]
) -> None:
    loaded = "optuna" in sys.modules
    result = hpc_det(*command, config, code, *OPTUNA, "--config", "searcher.sampler=TPESampeler", *RANGE)
    said = "hpc-det: searcher.sampler: optuna.samplers has no 'TPESampeler'; did you mean 'TPESampler'?\n"
    assert result == (2, "", said)
    assert hpc_det(*command, config, code, *OPTUNA, "--config", "searcher.sampler=mine:Mine").code == 0
    assert ("optuna" in sys.modules) == loaded


@pytest.mark.parametrize(("name", "text"), [("Rounds", ROUNDS), ("Population", POPULATION)])
def test_a_class_of_the_users_is_previewed_like_any_searcher(
    hpc_det: Command, config: Path, code: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    monkeypatch.chdir(code)
    (code / "mine.py").write_text(text)
    shown = hpc_det("preview-search", config, *custom(name))
    assert shown.code == 0, shown.err
    assert shown.out.startswith("custom: 4 trials, at most 4 at a time\n")


def test_what_is_wrong_with_a_class_is_told_at_the_submission(
    hpc_det: Command, config: Path, code: Path, root: Path
) -> None:
    (code / "mine.py").write_text(ROUNDS.replace("self.trials_expected = max_trials", "self.trials_expected = 0"))
    none_expected = hpc_det("experiment", "create", config, code, *custom("Rounds"), *DRY)
    assert (none_expected.code, unnamed(none_expected.err, "mine:Rounds", "trials_expected", 0)) == (2, [])
    (code / "mine.py").write_text("import no_such_package")
    missing = hpc_det("experiment", "create", config, code, *custom("Rounds"), *DRY)
    assert missing.code == 2
    assert not unnamed(missing.err, "'no_such_package'", f"{code}/mine.py, line 1")
    for look in (["config", "check", config, code], ["preview-search", config, code]):
        result = hpc_det(*look, *custom("Rounds"))
        assert (result.code, result.out, result.err) == (2, "", missing.err)
    assert not root.exists()


def test_an_unknown_source_of_weights_is_refused(hpc_det: Command, config: Path, code: Path) -> None:
    result = hpc_det("experiment", "create", config, code, "--config", "searcher.source_trial_id=12/3", *DRY)
    assert result.code == 2
    assert not unnamed(result.err, "searcher.source_trial_id", "experiment 12")
    malformed = hpc_det("experiment", "create", config, code, "--config", "searcher.source_trial_id=first", *DRY)
    assert not unnamed(malformed.err, "'12/3'")


@pytest.mark.integration
def test_a_search_that_has_given_up_is_an_error_and_says_why(hpc_det: Command, life: Life) -> None:
    searcher: dict[str, Any] = {"name": "custom", "class": "mine:Rounds", "max_trials": 4, "settings": {}}
    broken = Life.submitted(life.folder.path.parent.parent, **searcher)
    broken.folder.code.mkdir()
    listed = {each["id"]: each["state"] for each in json.loads(hpc_det("experiment", "list", "--json").out)}
    assert listed[broken.id] == "ERROR"
    assert life.id in listed
    waited = hpc_det("experiment", "wait", broken.id)
    assert waited.code == 1
    assert not unnamed(waited.err, "searcher.class", "mine:Rounds", "mine.py")
