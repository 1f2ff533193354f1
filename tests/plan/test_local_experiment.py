"""The configuration of a run outside a job, as commands read it."""

from __future__ import annotations

from hpc_det.config.schema import Experiment
from hpc_det.plan.local_experiment import DEFAULTS, IN_EFFECT, SEARCHER, Arguments
from tests.facts import unnamed


def test_the_defaults_are_those_of_the_schema() -> None:
    minimal = {"entrypoint": ["train.py"], "searcher": {"name": "single", "metric": "validation_loss"}}
    schema = Experiment.model_validate(minimal).model_dump(mode="json")
    assert {key: schema[key] for key in DEFAULTS if key != "environment"} == {
        key: value for key, value in DEFAULTS.items() if key != "environment"
    }
    assert DEFAULTS["environment"].items() <= schema["environment"].items()
    assert SEARCHER.items() <= schema["searcher"].items()


def test_a_run_outside_a_job_has_no_search() -> None:
    given = {"name": "async_halving", "metric": "error", "smaller_is_better": False, "max_length": 30, "num_rungs": 2}
    assert Arguments.of("digits", {}, {"searcher": given}).tree["searcher"] == {
        "name": "single",
        "metric": "error",
        "smaller_is_better": False,
        "max_length": {"batches": 30},
    }


def test_the_configuration_beats_the_defaults_but_not_the_name() -> None:
    arguments = Arguments.of("digits", {}, {"name": "other", "labels": ["x"], "checkpoint_storage": None})
    assert (arguments.tree["name"], arguments.tree["labels"]) == ("digits", ["x"])
    assert arguments.tree["checkpoint_storage"] == DEFAULTS["checkpoint_storage"]
    assert arguments.config == {"name": "digits", "labels": ["x"], "checkpoint_storage": None}


def test_a_hyperparameter_that_looks_like_a_range_is_a_constant() -> None:
    hparams = {"lr": 0.1, "model": {"type": "resnet", "layers": 18}, "data": {"size": 3}}
    assert Arguments.of("digits", hparams, {}).tree["hyperparameters"] == {
        "lr": 0.1,
        "model": {"type": "const", "val": {"type": "resnet", "layers": 18}},
        "data": {"size": 3},
    }


def test_keys_without_an_effect_outside_a_job_are_noted() -> None:
    given = {"labels": ["x"], "min_checkpoint_perod": {"epochs": 1}, "notify": []}
    perod, notify = Arguments.of("digits", {}, given).notes
    assert unnamed(perod, "min_checkpoint_perod", "min_checkpoint_period") == []
    assert unnamed(notify, "notify") == []


def test_the_keys_with_an_effect_are_those_of_the_schema() -> None:
    assert Experiment.model_fields.keys() >= IN_EFFECT
