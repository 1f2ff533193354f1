"""The arguments `config` and `loggers` of a run outside a job, checked by the schema of experiment files."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_det.core.entry import in_job
from hpc_det.distributed import rank_process
from hpc_det.errors import UsageError
from hpc_det.plan.local_experiment import Arguments
from tests.facts import each_names, keys, refused, unnamed

PASSWORD = {"mlflow": {"tracking_uri": "http://me:hunter2@host"}}


def problems(config: dict[str, Any]) -> list[str]:
    """Return the problems for which this configuration is refused."""
    with pytest.raises(UsageError) as info:
        Arguments.of("digits", {}, config)
    return info.value.problems


def test_all_problems_of_loggers_are_named_with_the_nearest_known_key() -> None:
    found = problems({"loggers": [{"wandb": {"projet": "digits"}}, {"mlflow": {"mode": "offlne"}}, {"wandbb": {}}]})
    each_names(
        found,
        ("loggers[0].wandb.projet", "project"),
        ("loggers[1].mlflow.mode", "offlne", "online", "offline"),
        ("loggers[2].wandbb", "wandb"),
    )


@pytest.mark.parametrize(
    ("loggers", "path"),
    [({"wandb": {}}, "loggers"), ("wandb", "loggers"), (["wandb"], "loggers[0]"), ([3], "loggers[0]")],
)
def test_loggers_are_a_list_of_maps(loggers: Any, path: str) -> None:
    found = problems({"loggers": loggers})
    assert keys(found) == [path]
    each_names(found, ("wandb", "mlflow"))


def test_valid_loggers_are_accepted() -> None:
    given = {"loggers": [{"wandb": {"project": "digits", "tags": ("a", "b")}}, {"mlflow": {"mode": "offline"}}]}
    assert Arguments.of("digits", {}, given).config["loggers"] == given["loggers"]


@pytest.mark.parametrize(
    ("logger", "path"),
    [
        (PASSWORD, "loggers[0].mlflow.tracking_uri"),
        ({"wandb": {"base_url": "https://me:hunter2@host"}}, "loggers[0].wandb.base_url"),
        ({"mlflow": "http://me:hunter2@host"}, "loggers[0].mlflow"),
    ],
)
def test_a_password_in_an_address_is_refused_and_not_shown(logger: Any, path: str) -> None:
    found = problems({"loggers": [logger]})
    assert keys(found) == [path]
    assert "hunter2" not in found[0]


def test_contradictions_of_loggers_are_reported_together_with_wrong_values() -> None:
    both = {"wandb": {}, "mlflow": {"mode": "offlne"}}
    assert sorted(keys(problems({"loggers": [both]}))) == ["loggers[0]", "loggers[0].mlflow.mode"]


def test_all_problems_of_the_configuration_are_named() -> None:
    found = problems(
        {
            "searcher": {"metrics": "acc"},
            "min_checkpoint_period": {"epoch": 1},
            "checkpoint_policy": "bst",
            "checkpoint_storage": {"save_trial_best": "2"},
            "reproducibility": {"experiment_seed": -1},
            "profiling": {"enabld": True},
            "loggers": [{"wandb": {"projet": "digits"}}],
        }
    )
    assert sorted(keys(found)) == [
        "checkpoint_policy",
        "checkpoint_storage.save_trial_best",
        "loggers[0].wandb.projet",
        "min_checkpoint_period",
        "profiling.enabld",
        "reproducibility.experiment_seed",
        "searcher.metrics",
    ]
    hints = {
        "searcher.metrics": ("metric",),
        "checkpoint_policy": ("bst", "best"),
        "min_checkpoint_period": ("epochs",),
    }
    named = dict(zip(keys(found), found, strict=True))
    assert {path: unnamed(named[path], *facts) for path, facts in hints.items()} == {path: [] for path in hints}


@pytest.mark.parametrize("name", ["asha", "adaptive", 3])
def test_an_unknown_searcher_is_refused(name: Any) -> None:
    assert keys(problems({"searcher": {"name": name, "metric": "acc"}})) == ["searcher.name"]


def test_any_part_of_a_section_may_be_given() -> None:
    given: dict[str, Any] = {
        "searcher": {"name": "random", "smaller_is_better": False},
        "checkpoint_storage": {"save_trial_latest": 2},
        "reproducibility": None,
        "min_checkpoint_period": 20,
        "labels": ["a", "b"],
        "data": {"anything": {"at": "all"}},
        "notify": "without effect",
    }
    assert Arguments.of("digits", {}, given).config == {**given, "name": "digits"}


def test_a_searcher_without_an_effect_is_noted() -> None:
    (note,) = Arguments.of("digits", {}, {"searcher": {"name": "random", "metric": "acc"}}).notes
    assert unnamed(note, "searcher.name", "random") == []
    for searcher in (None, {"metric": "acc"}, {"name": "single"}):
        assert [*Arguments.of("digits", {}, {"searcher": searcher}).notes] == []


def test_loggers_of_a_point_of_a_sweep_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_process, "host", object())
    with refused(UsageError, "loggers[0].mlflow.tracking_uri"), in_job({}, {"loggers": [PASSWORD]}):
        pass
