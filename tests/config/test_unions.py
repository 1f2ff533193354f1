"""Sections with several kinds, and lists of sections: the keys of each kind, and the messages for mistakes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hpc_det.config.searchers import Single
from hpc_det.config.storage import OwnFolder
from hpc_det.plan.effective import Effective
from tests.facts import each_names, unnamed

Build = Callable[..., Effective]
Problems = Callable[..., list[str]]
COMMON = {"metric": "loss", "max_length": {"batches": 900}}
MANY = {"max_trials": 64, "max_concurrent_trials": 16}
HALVING = {**MANY, "divisor": 4, "stop_once": False}

SEARCHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "single": ({}, {}),
    "random": ({"max_trials": 64}, MANY),
    "grid": ({}, {"max_concurrent_trials": 16}),
    "points": ({"points": [{"lr": 1}]}, {"max_concurrent_trials": 16, "points": [{"lr": 1}]}),
    "async_halving": ({"max_trials": 64, "num_rungs": 3}, {**HALVING, "num_rungs": 3}),
    "adaptive_asha": (
        {"max_trials": 64},
        {**HALVING, "mode": "standard", "max_rungs": 5, "bracket_rungs": []},
    ),
    "optuna": ({"max_trials": 64}, {**MANY, "sampler": "TPESampler", "sampler_settings": {}}),
    "custom": ({"max_trials": 64, "class": "mine:Search"}, {**MANY, "class": "mine:Search", "settings": {}}),
}


@pytest.mark.parametrize("name", SEARCHERS)
def test_a_searcher_has_determineds_defaults(name: str, build: Build) -> None:
    needed, effective = SEARCHERS[name]
    assert build(searcher={"name": name, **COMMON, **needed}).tree["searcher"] == {
        "name": name,
        **COMMON,
        "smaller_is_better": True,
        "source_trial_id": None,
        "source_checkpoint_uuid": None,
        **effective,
    }


def test_every_kind_is_listed_here() -> None:
    assert SEARCHERS.keys() == Single.kinds.keys()
    assert STORAGES.keys() == OwnFolder.kinds.keys()


STORAGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "": ({}, {"type": None}),
    "shared_fs": ({"host_path": "/shared"}, {"storage_path": None, "propagation": "rprivate", "container_path": None}),
    "directory": ({"container_path": "/checkpoints"}, {}),
    "s3": ({"bucket": "b"}, dict.fromkeys(("prefix", "endpoint_url", "access_key", "secret_key"))),
    "gcs": ({"bucket": "b"}, {"prefix": None}),
    "azure": (
        {"container": "c", "connection_string": "s"},
        {"account_url": None, "credential": None},
    ),
}


@pytest.mark.parametrize("kind", STORAGES)
def test_a_storage_keeps_one_best_and_the_latest(kind: str, build: Build) -> None:
    needed, defaults = STORAGES[kind]
    written = {"type": kind or None, **needed}
    assert build(checkpoint_storage=written).tree["checkpoint_storage"] == {
        **written,
        **defaults,
        "save_experiment_best": 0,
        "save_trial_best": 1,
        "save_trial_latest": 1,
    }


def halving(**changes: Any) -> dict[str, Any]:
    return {"searcher": {"name": "async_halving", **COMMON, "max_trials": 8, "num_rungs": 2, **changes}}


LOCAL = "bash train.sh"
PROBLEMS: dict[str, tuple[dict[str, Any], list[list[str]]]] = {
    "a key of another kind": (
        {"searcher": {"name": "random", **COMMON, "max_trials": 8, "max_rungs": 3}},
        [["searcher.max_rungs", "'random'", "searcher.name", "adaptive_asha"]],
    ),
    "a key of several other kinds": (
        {"searcher": {**COMMON, "divisor": 3}},
        [["searcher.divisor", "'single'", "searcher.name", "async_halving", "adaptive_asha"]],
    ),
    "a key of a storage, and no type": (
        {"checkpoint_storage": {"bucket": "b"}},
        [["checkpoint_storage.bucket", "checkpoint_storage.type", "s3", "gcs"]],
    ),
    "a key of no kind": (
        {"searcher": {"name": "random", **COMMON, "max_trails": 8}},
        [["searcher.max_trials", "1"], ["searcher.max_trails", "'max_trails'", "'max_trials'"]],
    ),
    "values in a union": (
        halving(divisor=1, num_rungs=0, max_concurrent_trials=-1),
        [["searcher.max_concurrent_trials", "1", "0"], ["searcher.divisor", "1"], ["searcher.num_rungs", "0", "1"]],
    ),
    "a searcher that is no map": (
        {"searcher": 3},
        [["searcher", "3", "map", "smaller_is_better", "source_trial_id", "source_checkpoint_uuid", "max_length"]],
    ),
    "a kind that is no text": (
        {"checkpoint_storage": {"type": ["s3"]}},
        [["checkpoint_storage.type", "'s3'", "shared_fs", "s3", "gcs"]],
    ),
    "rungs are shares of a length": (
        {**halving(max_length=None), "entrypoint": LOCAL},
        [["searcher.max_length", "batches", "records", "epochs", "1", "{batches: 100}", "100"]],
    ),
    "a time metric of the user's own": (
        halving(max_length=None, time_metric="steps", max_time=3),
        [
            ["searcher.time_metric", "'steps'", "batches", "records", "epochs"],
            [
                "searcher.time_metric",
                "time_metric",
                "'steps'",
                "max_time",
                "3",
                "max_length",
                "{batches: 1000}",
                "batches",
                "records",
                "epochs",
            ],
        ],
    ),
    "two lengths": (
        halving(time_metric="batches", max_time=3),
        [
            [
                "searcher.time_metric",
                "max_length",
                "{batches: 1000}",
                "time_metric",
                "batches",
                "records",
                "epochs",
                "max_time",
            ]
        ],
    ),
    "a class is named with its module": (
        {"searcher": {"name": "custom", **COMMON, "max_trials": 8, "class": "Search"}},
        [["searcher.class", "'Search'", "module:Class", "my_search"]],
    ),
    "a storage path outside": (
        {"checkpoint_storage": {"type": "shared_fs", "host_path": "/a", "storage_path": "/b/c"}},
        [
            [
                "checkpoint_storage.storage_path",
                "'/b/c'",
                "checkpoint_storage.host_path",
                "'/a'",
                "relative",
                "host_path",
            ]
        ],
    ),
    "a storage path that climbs": (
        {"checkpoint_storage": {"type": "shared_fs", "host_path": "/a", "storage_path": "b/../../c"}},
        [
            [
                "checkpoint_storage.storage_path",
                "'b/../../c'",
                "checkpoint_storage.host_path",
                "'/a'",
                "relative",
                "host_path",
            ]
        ],
    ),
    "a relative folder": (
        {"checkpoint_storage": {"type": "directory", "container_path": "c"}},
        [["checkpoint_storage.container_path", "'c'", "absolute"]],
    ),
    "elements of a list": (
        {"bind_mounts": [3, {"host_path": "a", "container_path": "/b", "read_onyl": True}]},
        [
            ["bind_mounts[0]", "3", "maps", "host_path", "container_path"],
            ["bind_mounts[1].host_path", "'a'", "absolute"],
            ["bind_mounts[1].read_onyl", "'read_onyl'", "'read_only'"],
        ],
    ),
    "devices as texts": (
        {"resources": {"devices": ["/a:/b:r", "/a", "x:/c"]}},
        [
            ["resources.devices[1]", "'/a'", "host_path", "container_path[:mode]", "maps"],
            ["resources.devices[2].host_path", "'x'", "absolute"],
        ],
    ),
    "a device that is none": (
        {"environment": {"image": {"tpu": "i"}}},
        [["environment.image.tpu", "'tpu'", "cpu", "cuda", "rocm"]],
    ),
    "both names of a device": (
        {"environment": {"image": {"gpu": "i", "cuda": "j"}}},
        [["environment.image.gpu", "'gpu'", "cpu", "cuda", "rocm"], ["environment.image.gpu", "cuda"]],
    ),
    "log policies": (
        {"log_policies": [{"name": "a", "pattern": "("}, {"name": "a", "pattern": "b"}, {"action": "explode"}]},
        [
            ["log_policies[0].pattern", "'('"],
            ["log_policies[2].action", "'explode'", "cancel_retries", "exclude_node"],
            ["log_policies[1].name", "'a'", "log_policies[0]"],
            ["log_policies[2].pattern"],
        ],
    ),
    "a range of batches": (
        {"profiling": {"begin_on_batch": 5, "end_after_batch": 4}},
        [["profiling.end_after_batch", "4", "profiling.begin_on_batch", "5"]],
    ),
    "mixed precision": (
        {"optimizations": {"mixed_precision": "O2"}},
        [["optimizations.mixed_precision", "'O2'", "O0", "O1", "O2", "O3"]],
    ),
    "no slots": (
        {"resources": {"slots_per_trial": 0}},
        [["resources.slots_per_trial", "0", "1", "slot_type", "cpu"]],
    ),
    "packed slots in no whole gangs": (
        {"resources": {"slots_per_trial": 2, "packed_slots": 5}},
        [["resources.packed_slots", "5", "resources.slots_per_trial", "2", "4", "6"]],
    ),
    "packed slots in no whole nodes": (
        {"resources": {"packed_slots": 3}},
        [["resources.packed_slots", "3", "2", "'lab'", "4"]],
    ),
    "packed slots that stay idle": (
        {"resources": {"slots_per_trial": 3, "packed_slots": 12}, "slurm": {"slots_per_node": 4}},
        [["resources.packed_slots", "3", "4", "slots_per_trial", "packed_slots"]],
    ),
    "a single node": (
        {"resources": {"slots_per_trial": 4, "is_single_node": True}},
        [["resources.is_single_node", "4", "2", "'lab'"]],
    ),
    "a size": (
        {"resources": {"shm_size": "lots"}},
        [["resources.shm_size", "'lots'", "'1.5 GiB'"]],
    ),
    "labels": (
        {"labels": ["a", "a"]},
        [["labels", "'a'"]],
    ),
}


@pytest.mark.parametrize(("change", "facts"), PROBLEMS.values(), ids=PROBLEMS.keys())
def test_a_mistake_is_reported(change: dict[str, Any], facts: list[list[str]], problems: Problems) -> None:
    each_names(problems(**change), *facts)


PODMAN = {"cluster": {"containers": {"runtime": "podman"}}}
WORKS: dict[str, tuple[dict[str, Any], str, Any]] = {
    "a size in words": ({"resources": {"shm_size": "1.5 GiB"}}, "resources.shm_size", 1610612736),
    "a size in bytes": ({"resources": {"shm_size": 4096}}, "resources.shm_size", 4096),
    "a short size": ({"resources": {"shm_size": "512m"}}, "resources.shm_size", 512 * 1024**2),
    "a device as text": (
        {"resources": {"devices": ["/dev/a:/dev/b"]}},
        "resources.devices",
        [{"host_path": "/dev/a", "container_path": "/dev/b", "mode": "mrw"}],
    ),
    "an image for all": ({"environment": {"image": "i"}, **PODMAN}, "environment.image", "i"),
    "an image for the old gpu": ({"environment": {"image": {"gpu": "i"}}}, "environment.image", {"cuda": "i"}),
    "variables for the old gpu": (
        {"environment": {"environment_variables": {"gpu": ["A=1"]}}},
        "environment.environment_variables",
        {"cuda": ["A=1"]},
    ),
    "the length of 0.38": (
        halving(max_length=None, time_metric="epochs", max_time=9),
        "searcher.max_length",
        {"epochs": 9},
    ),
    "a script knows its end": (
        {"entrypoint": LOCAL, "searcher": {"name": "random", "metric": "a", "max_trials": 2}},
        "searcher.max_length",
        None,
    ),
    "an action of 0.25": (
        {"log_policies": [{"pattern": "x", "action": {"type": "exclude_node"}}]},
        "log_policies",
        [{"name": None, "pattern": "x", "action": "exclude_node"}],
    ),
}
DEFAULT_POLICIES = ["CUDA OOM", "ECC Error"]


@pytest.mark.parametrize(("change", "path", "value"), WORKS.values(), ids=WORKS.keys())
def test_a_value_means_what_it_meant(change: dict[str, Any], path: str, value: Any, build: Build) -> None:
    found: Any = build(**change).tree
    for key in path.split("."):
        found = found[key]
    if path == "log_policies":
        found = [policy for policy in found if policy["name"] not in DEFAULT_POLICIES]
    assert found == value


def test_an_image_is_chosen_by_the_kind_of_slot(build: Build) -> None:
    environment = build(environment={"image": {"cuda": "g", "cpu": "c"}}, **PODMAN).experiment.environment
    assert [environment.image_for(kind) for kind in ("gpu", "cpu")] == ["g", "c"]
    assert build(environment={"image": "i"}, **PODMAN).experiment.environment.image_for("gpu") == "i"


def test_who_wrote_the_length_of_0_38_wrote_the_length(build: Build) -> None:
    found = build(**halving(max_length=None, time_metric="epochs", max_time=9))
    assert found.origins["searcher.max_length.epochs"] == "config"


def test_two_log_policies_are_always_there_and_a_name_alone_switches_one_off(build: Build) -> None:
    found = build(log_policies=[{"name": "CUDA OOM"}])
    assert [(policy["name"], policy["pattern"] is None) for policy in found.tree["log_policies"]] == [
        ("CUDA OOM", True),
        ("ECC Error", False),
    ]
    assert [policy["name"] for policy in build().tree["log_policies"]] == DEFAULT_POLICIES


def test_the_scheduler_section_changes_the_nodes_of_the_profile(build: Build) -> None:
    cluster = build(slurm={"slots_per_node": 8, "gpu_type": "a100"}).cluster
    assert (cluster.slots_per_node, cluster.gpu_type) == (8, "a100")
    assert build(pbs={"slots_per_node": 8}).cluster.slots_per_node == 2


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"name": None}, "MyTrial"),
        ({"name": None, "entrypoint": LOCAL}, "experiment"),
        ({"template": {"name": "from the site"}, "name": None}, "from the site"),
    ],
)
def test_a_name_that_nobody_gave_is_the_trials_class(change: dict[str, Any], name: str, build: Build) -> None:
    assert build(**change).experiment.name == name


@pytest.mark.parametrize(
    ("batch_size", "facts"),
    [
        ({"type": "int", "minval": 4, "maxval": 64}, None),
        ({"type": "categorical", "vals": [4, 64]}, None),
        ({"type": "int", "minval": 2, "maxval": 64}, [2, "resources.slots_per_trial", 4]),
        ({"type": "categorical", "vals": [64, 2]}, [2, "resources.slots_per_trial", 4]),
        ({"type": "log", "minval": 1, "maxval": 2}, ["{'type': 'log', 'minval': 1, 'maxval': 2}"]),
    ],
)
def test_the_smallest_batch_has_a_record_for_every_slot(
    batch_size: dict[str, Any], facts: list[object] | None, build: Build, problems: Problems
) -> None:
    change: dict[str, Any] = {
        "hyperparameters": {"global_batch_size": batch_size},
        "resources": {"slots_per_trial": 4},
        "searcher": {"name": "random", **COMMON, "max_trials": 3},
    }
    if facts is None:
        build(**change)
    else:
        (problem,) = problems(**change)
        assert not unnamed(problem, "hyperparameters.global_batch_size", *facts)
