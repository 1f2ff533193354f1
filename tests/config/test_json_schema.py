from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from hpc_det.config.json_schema import cluster_schema, experiment_schema
from hpc_det.config.plain_yaml import load_yaml
from hpc_det.resources import data_path
from tests.config.test_unions import PROBLEMS, SEARCHERS, STORAGES, WORKS

EXAMPLES = [*data_path("docs/examples").glob("*/*.yaml"), *(data_path("conf") / "experiment").glob("*.yaml")]
CLUSTERS = [*(data_path("conf") / "cluster").glob("*.yaml")]


@cache
def of_experiments() -> Draft202012Validator:
    return Draft202012Validator(experiment_schema())


def refused(tree: Any) -> list[str]:
    return [error.json_path for error in of_experiments().iter_errors(tree)]


@pytest.mark.integration
def test_both_are_json_schemas() -> None:
    for schema in (experiment_schema(), cluster_schema()):
        Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("file", EXAMPLES, ids=[file.stem for file in EXAMPLES])
def test_every_example_is_valid(file: Path) -> None:
    assert refused(load_yaml(file)) == []


@pytest.mark.parametrize("file", CLUSTERS, ids=[file.stem for file in CLUSTERS])
def test_every_cluster_is_valid(file: Path) -> None:
    assert [*Draft202012Validator(cluster_schema()).iter_errors(load_yaml(file))] == []


def test_a_template_lacks_what_the_experiment_gives() -> None:
    assert refused(load_yaml(data_path("conf") / "template" / "small.yaml")) == []


@pytest.mark.parametrize("change", [change for change, _path, _value in WORKS.values()], ids=WORKS.keys())
def test_it_accepts_what_works(change: dict[str, Any]) -> None:
    assert refused({key: value for key, value in change.items() if key != "cluster"}) == []


@pytest.mark.parametrize("name", SEARCHERS)
def test_it_accepts_every_searcher_with_all_its_keys(name: str) -> None:
    needed, effective = SEARCHERS[name]
    assert refused({"searcher": {"name": name, "metric": "a", "max_length": 5, **needed, **effective}}) == []


@pytest.mark.parametrize("kind", STORAGES)
def test_it_accepts_every_storage_with_all_its_keys(kind: str) -> None:
    needed, effective = STORAGES[kind]
    assert refused({"checkpoint_storage": {"type": kind or None, **needed, **effective, "save_trial_best": 2}}) == []


# Problems that a schema cannot express: they depend on the whole experiment, the cluster or a program.
BEYOND_A_SCHEMA = {
    "rungs are shares of a length",
    "two lengths",
    "a storage path outside",
    "a storage path that climbs",
    "both names of a device",
    "a range of batches",
    "packed slots in no whole gangs",
    "packed slots in no whole nodes",
    "packed slots that stay idle",
    "a single node",
    "an object store",
    # The template may name the kind.
    "a key of several other kinds",
    "a key of a storage, and no type",
}


@pytest.mark.parametrize("case", [case for case in PROBLEMS if case not in BEYOND_A_SCHEMA])
def test_it_refuses_what_is_wrong_by_itself(case: str) -> None:
    change, _told = PROBLEMS[case]
    assert refused(change) != []


def test_it_says_where() -> None:
    assert sorted(refused({"max_restarts": "5", "resources": {"slots": 1}})) == ["$.max_restarts", "$.resources"]


LR = {"type": "log", "minval": -3, "maxval": -1}


@pytest.mark.parametrize(
    ("tree", "path", "said"),
    [
        ({"searcher": {"name": "random", "max_trails": 4}}, "$.searcher", "'max_trails' was unexpected"),
        ({"searcher": {"name": "random", "max_trials": 0}}, "$.searcher.max_trials", "0 is not valid"),
        ({"searcher": {"name": "pbt"}}, "$.searcher.name", "'pbt' is not one of ['single', 'random'"),
        ({"searcher": {"max_trails": 4}}, "$.searcher", "'max_trails' was unexpected"),
        ({"searcher": []}, "$.searcher", "[] is not of type 'object', 'null'"),
        ({"checkpoint_storage": {"type": "s3", "buckit": "b"}}, "$.checkpoint_storage", "'buckit' was unexpected"),
        ({"hyperparameters": {"lr": {**LR, "cuont": 2}}}, "$.hyperparameters.lr", "'cuont' was unexpected"),
        ({"hyperparameters": {"a": {"lr": {**LR, "base": 0}}}}, "$.hyperparameters.a.lr.base", "0 is less than"),
        ({"hyperparameters": {"lr": {"type": "float"}}}, "$.hyperparameters.lr.type", "'float' is not one of ['const'"),
    ],
)
def test_of_several_kinds_it_says_what_is_wrong_with_the_named_one(tree: Any, path: str, said: str) -> None:
    (error,) = Draft202012Validator(experiment_schema()).iter_errors(tree)
    assert (error.json_path, said in error.message) == (path, True), error.message


def test_constants_and_maps_without_a_type_are_free() -> None:
    constants = {"a": 1, "b": [{"type": "x"}], "c": None, "d": {"e": {"f": "g"}}, "lr": LR}
    assert refused({"hyperparameters": constants}) == []
    assert refused({"hyperparameters": {"lr": {"minval": 1}}, "searcher": {"name": None}}) == []
    assert refused({"hyperparameters": None, "searcher": None, "checkpoint_storage": None}) == []


def test_every_key_says_what_it_means() -> None:
    schema = experiment_schema()
    sections = {"": schema, **schema["$defs"]}
    silent = [
        f"{name}.{key}"
        for name, section in sections.items()
        for key, value in section.get("properties", {}).items()
        if not value.get("description")
    ]
    assert silent == []
