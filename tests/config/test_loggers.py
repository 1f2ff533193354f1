from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hpc_det.plan.effective import Effective
from hpc_det.plan.short_training import short_training
from tests.facts import unnamed

Build = Callable[..., Effective]
Problems = Callable[..., list[str]]
WANDB: dict[str, Any] = {"project": None, "entity": None, "mode": "online", "base_url": None, "tags": []}
MLFLOW: dict[str, Any] = {"tracking_uri": None, "experiment_name": None, "mode": "online"}


def test_each_entry_has_the_defaults_of_its_kind(build: Build) -> None:
    found = build(loggers=[{"wandb": {"project": "p"}}, {"mlflow": {}}])
    assert found.tree["loggers"] == [
        {"wandb": {**WANDB, "project": "p"}, "mlflow": None},
        {"wandb": None, "mlflow": MLFLOW},
    ]


def test_without_an_entry_there_is_no_logger(build: Build) -> None:
    assert build().tree["loggers"] == []


def test_an_entry_replaces_that_of_the_template_with_the_same_kind(build: Build) -> None:
    template = {"loggers": [{"mlflow": {"tracking_uri": "http://mlflow:5000"}}, {"wandb": {"entity": "site"}}]}
    found = build(template=template, loggers=[{"wandb": {"project": "p"}}]).tree["loggers"]
    assert [entry["wandb"] for entry in found] == [{**WANDB, "project": "p"}, None]
    assert found[1]["mlflow"]["tracking_uri"] == "http://mlflow:5000"


WRONG: list[tuple[Any, list[object]]] = [
    ([{"wandb": {"projekt": "p"}}], ["loggers[0].wandb.projekt", "project"]),
    ([{"tensorbord": {}}], ["loggers[0].tensorbord", "wandb", "mlflow"]),
    ([{}], ["loggers[0]", "wandb", "mlflow"]),
    ([{"wandb": None}], ["loggers[0]", "wandb", "mlflow"]),
    ([{"wandb": {}, "mlflow": {}}], ["loggers[0]", "wandb", "mlflow"]),
    ([{"wandb": {"project": "a"}}, {"wandb": {"project": "b"}}], ["loggers[1].wandb", "loggers[0]"]),
    ([{"wandb": {"mode": "dryrun"}}], ["loggers[0].wandb.mode", "'dryrun'", "online", "offline"]),
    ([{"mlflow": {"tracking_uri": 5000}}], ["loggers[0].mlflow.tracking_uri", 5000]),
    ("wandb", ["loggers", "'wandb'"]),
]


@pytest.mark.parametrize(("loggers", "facts"), WRONG)
def test_a_wrong_entry_is_named(problems: Problems, loggers: Any, facts: list[object]) -> None:
    found = problems(loggers=loggers)
    assert [line for line in found if not unnamed(line, *facts)]


@pytest.mark.parametrize(
    "entry",
    [
        {"mlflow": {"tracking_uri": "https://ada:hunter2@mlflow.example.org"}},
        {"mlflow": {"tracking_uri": "https://[ada:hunter2@mlflow"}},
        {"wandb": {"base_url": "https://hunter2@wandb.example.org"}},
        {"wandb": {"api_key": "hunter2"}},
        {"wandb": {"tags": "api_key=hunter2"}},
    ],
)
def test_a_secret_is_refused_and_not_shown(problems: Problems, entry: Any) -> None:
    found = problems(loggers=[entry])
    assert any("loggers[0]." in line for line in found)
    assert "hunter2" not in "".join(found)


def test_a_short_training_has_no_logger(build: Build) -> None:
    whole = build(loggers=[{"wandb": {}}]).tree
    tree = short_training(whole, title="check", label="check", batches=4, reports=2, variable="A=1")
    assert tree["loggers"] == []
