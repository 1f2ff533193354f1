"""The report's facts, from experiments on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_det.node.json_files import read_json, write_json
from hpc_det.report.facts import curves, facts
from hpc_det.requeue import Action, Cause
from hpc_det.store.experiment_config import write_about
from hpc_det.store.folders import ExperimentFolder
from hpc_det.view.metric_history import MetricHistory
from hpc_det.view.state import ExperimentState, ExperimentView
from tests.cli.life import Life, halving, random_search
from tests.report.searches import ADAPTIVE, BEGAN, lived

COMPLETED = ExperimentState.COMPLETED


def facts_of(folder: ExperimentFolder, state: ExperimentState = COMPLETED) -> dict[str, Any]:
    found = facts(ExperimentView(folder), state, BEGAN + 1e6)
    assert json.loads(json.dumps(found, allow_nan=False))
    return found


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the facts of a search by successive halving with 30 trials."""
    return facts_of(lived(tmp_path_factory.mktemp("root"), 30))


def test_the_head_names_the_experiment_its_searcher_and_its_result(searched: dict[str, Any]) -> None:
    assert (searched["name"], searched["state"], searched["slots"]) == ("digits", "COMPLETED", 4)
    assert searched["searcher"]["name"] == "async_halving"
    assert BEGAN == searched["submitted"] < searched["began"] < searched["ended"]
    best = max((trial["best"]["value"], trial["id"]) for trial in searched["trials"])
    assert (searched["best"]["value"], searched["best"]["trial"]) == pytest.approx(best, rel=0.02)


def test_every_trial_tells_its_curves_and_its_attempts(searched: dict[str, Any]) -> None:
    assert [trial["id"] for trial in searched["trials"]] == list(range(1, 31))
    for trial in searched["trials"]:
        batches = [at for at, _ in trial["training"]["loss"]]
        assert batches == sorted(set(batches)), "batches that were lost and repeated count once"
        assert set(trial["validation"]) == {"accuracy", "loss"}
        assert trial["attempts"][-1]["cause"] in ("finished", "waiting")


def test_the_time_of_slots_adds_up(searched: dict[str, Any]) -> None:
    for trial in searched["trials"]:
        held = sum(attempt["ended"] - attempt["started"] for attempt in trial["attempts"])
        restarts = sum(attempt["action"] == "restart" for attempt in trial["attempts"])
        without = ("queued", "waiting", "paused")
        spent = sum(amount for phase, amount in trial["seconds"].items() if phase not in without)
        assert spent == pytest.approx(held + 0.5 * restarts, abs=1)
        assert trial["goodput"] == pytest.approx(trial["seconds"].get("training", 0) / spent)
    assert 0.3 < searched["goodput"] < 0.9
    assert searched["seconds"]["lost"] > 0


def test_trials_of_jobs_that_had_just_come_waited_in_the_queue_and_others_did_not(searched: dict[str, Any]) -> None:
    first = [trial["spans"][0]["phase"] for trial in searched["trials"]]
    assert first == ["queued"] * 6 + ["starting"] * 24


def test_the_rungs_say_who_was_promoted(searched: dict[str, Any]) -> None:
    (bracket,) = searched["brackets"]
    assert [rung["length"] for rung in bracket["rungs"]] == [25, 100, 400]
    lower, middle, top = ({t["trial"]: t for t in rung["trials"]} for rung in bracket["rungs"])
    assert len(lower) == 30
    assert {trial for trial, its in lower.items() if its["status"] == "promoted"} == set(middle)
    assert {trial for trial, its in middle.items() if its["status"] == "promoted"} == set(top)
    assert {its["status"] for its in top.values()} == {"finished"}
    stopped = [its["value"] for its in lower.values() if its["status"] == "stopped"]
    assert max(its["value"] for its in lower.values()) > max(stopped)


def test_each_bracket_has_rungs_of_its_own(tmp_path: Path) -> None:
    found = facts_of(lived(tmp_path, 12, **ADAPTIVE))
    assert [[rung["length"] for rung in bracket["rungs"]] for bracket in found["brackets"]] == [[100, 400], [400]]
    assert sum(len(bracket["rungs"][0]["trials"]) for bracket in found["brackets"]) == 12


def test_the_importance_is_of_trials_at_the_same_length(searched: dict[str, Any]) -> None:
    importance = searched["importance"]
    assert (importance["length"], importance["trials"]) == (25, 30)
    assert importance["names"][0]["name"] == "lr"
    assert {its["name"] for its in importance["names"]} == {"lr", "width", "dropout", "optimizer"}
    assert searched["hyperparameters"] == ["dropout", "lr", "optimizer", "width"]


def test_a_trial_that_nobody_has_promoted_waits_as_long_as_the_search_goes_on(tmp_path: Path) -> None:
    life = Life.submitted(tmp_path, **halving(4))
    life.begins()
    life.reaches(0.5)
    found = facts_of(life.folder, ExperimentState.RUNNING)
    (rung, above) = found["brackets"][0]["rungs"]
    assert [(its["trial"], its["value"], its["status"]) for its in rung["trials"]] == [(1, 0.5, "waiting")]
    assert above["trials"] == []


def test_secrets_are_masked_and_each_key_has_its_origin(tmp_path: Path) -> None:
    life = Life.submitted(tmp_path)
    config = read_json(life.folder.effective) or {}
    variables = ["API_TOKEN=hunter2", "EPOCHS=3"]
    write_json(life.folder.effective, {**config, "environment": {"environment_variables": variables}})
    write_json(life.folder.origin, {"name": "config"})
    write_about(life.folder, name="renamed")
    found = facts_of(life.folder)
    assert "hunter2" not in json.dumps(found)
    rows = {row["key"]: (row["value"], row["origin"]) for row in found["config"]}
    assert rows["name"] == ("renamed", "config")
    assert rows["environment.environment_variables[0]"] == ("API_TOKEN=********", "default")
    assert rows["environment.environment_variables[1]"] == ("EPOCHS=3", "default")


def test_an_experiment_that_has_not_begun_has_facts_too(tmp_path: Path) -> None:
    found = facts_of(Life.submitted(tmp_path).folder, ExperimentState.QUEUED)
    assert (found["trials"], found["best"], found["goodput"], found["began"]) == ([], None, None, None)


def test_a_failed_trial_says_why(tmp_path: Path) -> None:
    life = Life.submitted(tmp_path, **random_search(2))
    life.begins()
    life.ends(Cause.FAILED, Action.GIVE_UP, failure="rank 0 on node1: ValueError: no\nsuch layer")
    (attempt,) = facts_of(life.folder, ExperimentState.ERROR)["trials"][0]["attempts"]
    assert attempt["failure"] == "rank 0 on node1: ValueError: no; such layer"


def test_the_best_checkpoint_is_named(tmp_path: Path) -> None:
    life = Life.submitted(tmp_path)
    life.begins()
    life.reports("validation", 100, {"accuracy": 0.9})
    life.reports("validation", 200, {"accuracy": 0.8})
    kept, _ = life.saves(100), life.saves(200)
    best = facts_of(life.folder)["best"]
    assert best["checkpoint"] == {"path": str(kept.path), "batches": 100}


def test_traces_of_the_profiler_are_named(tmp_path: Path) -> None:
    life = Life.submitted(tmp_path)
    life.begins()
    trace = life.trial.tensorboard / "rank-1" / "node1.pt.trace.json"
    trace.parent.mkdir(parents=True)
    trace.write_text("{}")
    assert facts_of(life.folder)["trials"][0]["traces"] == ["tensorboard/rank-1/node1.pt.trace.json"]


def report(kind: str, steps: int, metrics: dict[str, Any]) -> dict[str, Any]:
    return {"kind": kind, "attempt": 1, "time": 1.0, "steps": steps, "metrics": metrics}


def test_curves_are_of_numbers_and_what_is_none_is_a_gap() -> None:
    history = MetricHistory(
        [
            report("validation", 10, {"accuracy": 0.5, "matrix": [[1]], "odd": None}),
            report("validation", 20, {"accuracy": "NaN", "matrix": [[1]], "odd": None}),
            report("training", 20, {"loss": 1}),
        ]
    )
    assert curves(history.validation) == {"accuracy": [(10, 0.5), (20, None)]}
    assert curves(history.training) == {"loss": [(20, 1.0)]}
