"""A template and a configuration, and what Determined merges them to.

The rows without a difference are those that Determined's own tests or its code state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.conformance.row import Row

MERGE = "master/pkg/schemas/merge.go"
MERGING = "schemas/test_cases/v0/merging.yaml"
POLICIES = "schemas/test_cases/v0/log_policies.yaml"
ENVIRONMENT = "master/pkg/schemas/expconf/environment_config.go"
EXPERIMENT = "master/pkg/schemas/expconf/experiment_config.go"
LENGTH = "master/pkg/schemas/expconf/length.go"
STORAGE = "master/pkg/schemas/expconf/storage_config.go"


@dataclass(frozen=True, kw_only=True)
class Merge(Row):
    """Two trees and the result of their merge."""

    template: dict[str, Any]
    config: dict[str, Any]
    merged: dict[str, Any]


def mount(host: str, container: str) -> dict[str, str]:
    return {"host_path": host, "container_path": container}


SAVE_10 = {"save_experiment_best": 10, "save_trial_best": 10, "save_trial_latest": 10}

ROWS = [
    Merge(
        case="a scalar in both",
        follows=MERGE,
        template={"a": 1, "b": 2},
        config={"b": 3},
        merged={"a": 1, "b": 3},
    ),
    Merge(
        case="a null in the configuration",
        follows=MERGE,
        template={"a": 1, "b": 2},
        config={"b": None},
        merged={"a": 1, "b": 2},
    ),
    Merge(
        case="mounts by their container_path",
        follows=MERGING,
        template={"bind_mounts": [mount("z", "/z"), mount("n", "/a")]},
        config={"bind_mounts": [mount("a", "/a")]},
        merged={"bind_mounts": [mount("a", "/a"), mount("z", "/z")]},
    ),
    Merge(
        case="devices by their container_path, as texts and maps",
        follows=MERGING,
        template={"resources": {"devices": ["/z:/z", "/n:/a"]}},
        config={"resources": {"devices": [mount("/a", "/a"), "/q:/q:r"]}},
        merged={
            "resources": {
                "devices": [
                    mount("/a", "/a"),
                    {"host_path": "/q", "container_path": "/q", "mode": "r"},
                    mount("/z", "/z"),
                ]
            }
        },
    ),
    Merge(
        case="a storage whose type only the configuration names",
        follows=MERGING,
        template={"checkpoint_storage": SAVE_10},
        config={"checkpoint_storage": {"type": "gcs", "bucket": "w", "save_experiment_best": 3}},
        merged={
            "checkpoint_storage": {
                "save_experiment_best": 3,
                "save_trial_best": 10,
                "save_trial_latest": 10,
                "type": "gcs",
                "bucket": "w",
            }
        },
    ),
    Merge(
        case="a storage of another type",
        follows=MERGING,
        template={
            "checkpoint_storage": {
                "type": "s3",
                "bucket": "x",
                "save_experiment_best": 10,
                "save_trial_best": 10,
                "save_trial_latest": 10,
            }
        },
        config={
            "checkpoint_storage": {"type": "shared_fs", "host_path": "/tmp", "storage_path": "d", "save_trial_best": 1}
        },
        merged={
            "checkpoint_storage": {
                "save_experiment_best": 10,
                "save_trial_best": 1,
                "save_trial_latest": 10,
                "type": "shared_fs",
                "host_path": "/tmp",
                "storage_path": "d",
            }
        },
    ),
    Merge(
        case="the common keys of a searcher",
        follows=MERGING,
        template={"searcher": {"metric": "sae", "smaller_is_better": True, "source_trial_id": 1}},
        config={"searcher": {"name": "random", "max_trials": 10}},
        merged={
            "searcher": {
                "name": "random",
                "max_trials": 10,
                "metric": "sae",
                "smaller_is_better": True,
                "source_trial_id": 1,
            }
        },
    ),
    Merge(
        case="a searcher of another name",
        follows=MERGING,
        template={
            "searcher": {
                "name": "random",
                "max_trials": 10000,
                "max_length": {"batches": 10000},
                "smaller_is_better": False,
                "source_checkpoint_uuid": "u",
            }
        },
        config={"searcher": {"name": "single", "max_length": {"batches": 1000}, "smaller_is_better": True}},
        merged={
            "searcher": {
                "name": "single",
                "max_length": {"batches": 1000},
                "smaller_is_better": True,
                "source_checkpoint_uuid": "u",
            }
        },
    ),
    Merge(
        case="a range in both",
        follows=MERGING,
        template={"hyperparameters": {"n": {"type": "int", "minval": 50, "maxval": 500, "count": 5}}},
        config={"hyperparameters": {"n": {"type": "int", "minval": 10, "maxval": 100}}},
        merged={"hyperparameters": {"n": {"type": "int", "minval": 10, "maxval": 100}}},
    ),
    Merge(
        case="maps of hyperparameters",
        follows=MERGING,
        template={"hyperparameters": {"transformer": {"task": "lm"}}},
        config={"hyperparameters": {"transformer": {"backbone": "bert"}}},
        merged={"hyperparameters": {"transformer": {"task": "lm", "backbone": "bert"}}},
    ),
    Merge(
        case="a hyperparameter that is null, and a map",
        follows=MERGING,
        template={"hyperparameters": {"transformer": {"task": "lm"}}},
        config={"hyperparameters": {"transformer": None}},
        merged={"hyperparameters": {"transformer": None}},
    ),
    Merge(
        case="a storage of the same type",
        follows=MERGING,
        template={"checkpoint_storage": {"connection_string": "s", "container": "c"}},
        config={"checkpoint_storage": {"type": "azure"}},
        merged={"checkpoint_storage": {"type": "azure", "connection_string": "s", "container": "c"}},
    ),
    Merge(
        case="environment variables",
        follows=ENVIRONMENT,
        template={"environment": {"environment_variables": ["A=1"]}},
        config={"environment": {"environment_variables": ["A=2", "B=3"]}},
        merged={"environment": {"environment_variables": ["A=1", "A=2", "B=3"]}},
    ),
    Merge(
        case="environment variables by kind of slot",
        follows=ENVIRONMENT,
        template={"environment": {"environment_variables": ["A=1"]}},
        config={"environment": {"environment_variables": {"cuda": ["A=2"]}}},
        merged={"environment": {"environment_variables": {"cpu": ["A=1"], "cuda": ["A=1", "A=2"], "rocm": ["A=1"]}}},
    ),
    Merge(
        case="labels",
        follows=EXPERIMENT,
        template={"labels": ["x"]},
        config={"labels": ["y", "x"]},
        merged={"labels": ["x", "y"]},
    ),
    Merge(
        case="one image, and an image for one kind of slot",
        follows=ENVIRONMENT,
        template={"environment": {"image": "i"}},
        config={"environment": {"image": {"cuda": "g"}}},
        merged={"environment": {"image": {"cpu": "i", "cuda": "g", "rocm": "i"}}},
    ),
    Merge(
        case="options of sbatch",
        follows=MERGE,
        differs="both lists, as the documentation of templates says; Determined's code took the configuration's alone",
        template={"slurm": {"sbatch_args": ["-Aacct"]}},
        config={"slurm": {"sbatch_args": ["-t10"]}},
        merged={"slurm": {"sbatch_args": ["-Aacct", "-t10"]}},
    ),
    Merge(
        case="log policies by their names",
        follows=POLICIES,
        template={"log_policies": [{"name": "CUDA OOM", "pattern": "p"}, {"action": "a", "pattern": "q"}]},
        config={"log_policies": [{"name": "CUDA OOM"}]},
        merged={"log_policies": [{"name": "CUDA OOM"}, {"action": "a", "pattern": "q"}]},
    ),
    Merge(
        case="a length in another unit",
        follows=LENGTH,
        template={"min_validation_period": {"epochs": 1}},
        config={"min_validation_period": {"batches": 5}},
        merged={"min_validation_period": {"batches": 5}},
    ),
    Merge(
        case="different keys of a map",
        follows=MERGE,
        template={"resources": {"slots_per_trial": 8}},
        config={"resources": {"priority": 3}},
        merged={"resources": {"slots_per_trial": 8, "priority": 3}},
    ),
    Merge(
        case="entrypoints that are lists",
        follows=MERGE,
        template={"entrypoint": ["a", "b"]},
        config={"entrypoint": ["c"]},
        merged={"entrypoint": ["c"]},
    ),
    Merge(
        case="the values of a categorical hyperparameter",
        follows=MERGING,
        template={"hyperparameters": {"o": {"type": "categorical", "vals": [1, 2]}}},
        config={"hyperparameters": {"o": {"type": "categorical", "vals": [3]}}},
        merged={"hyperparameters": {"o": {"type": "categorical", "vals": [3]}}},
    ),
    Merge(
        case="rungs of brackets",
        follows=MERGE,
        template={"searcher": {"bracket_rungs": [1, 2]}},
        config={"searcher": {"bracket_rungs": [3]}},
        merged={"searcher": {"bracket_rungs": [3]}},
    ),
    Merge(
        case="credentials of a registry",
        follows=ENVIRONMENT,
        template={"environment": {"registry_auth": {"username": "u", "password": "p"}}},
        config={"environment": {"registry_auth": {"username": "v"}}},
        merged={"environment": {"registry_auth": {"username": "v"}}},
    ),
    Merge(
        case="proxy ports",
        follows=ENVIRONMENT,
        template={"environment": {"proxy_ports": [{"proxy_port": 1, "proxy_tcp": True}, {"proxy_port": 2}]}},
        config={"environment": {"proxy_ports": [{"proxy_port": 1}]}},
        merged={"environment": {"proxy_ports": [{"proxy_port": 1}, {"proxy_port": 2}]}},
    ),
    Merge(
        case="unknown keys",
        follows="master/pkg/schemas/expconf/parse.go",
        differs="kept, and refused in the result; Determined refuses them where it reads a file",
        template={"nope": 1},
        config={"nor": 2},
        merged={"nope": 1, "nor": 2},
    ),
    Merge(
        case="credentials of azure of different kinds",
        follows=STORAGE,
        template={"checkpoint_storage": {"type": "azure", "connection_string": "s", "container": "c"}},
        config={"checkpoint_storage": {"type": "azure", "account_url": "u", "credential": "k"}},
        merged={"checkpoint_storage": {"type": "azure", "account_url": "u", "credential": "k", "container": "c"}},
    ),
    Merge(
        case="ports by their names",
        follows=ENVIRONMENT,
        template={"environment": {"ports": {"a": 1, "b": 2}}},
        config={"environment": {"ports": {"b": 3}}},
        merged={"environment": {"ports": {"a": 1, "b": 3}}},
    ),
    Merge(
        case="log policies without names",
        follows=POLICIES,
        template={"log_policies": [{"action": "a", "pattern": "q"}, {"action": "b", "pattern": "q"}]},
        config={"log_policies": [{"action": "a", "pattern": "q"}]},
        merged={"log_policies": [{"action": "a", "pattern": "q"}, {"action": "b", "pattern": "q"}]},
    ),
    Merge(
        case="a tensorboard_storage of another type",
        follows=STORAGE,
        template={"tensorboard_storage": {"type": "s3", "bucket": "b"}},
        config={"tensorboard_storage": {"type": "shared_fs", "host_path": "/t"}},
        merged={"tensorboard_storage": {"type": "shared_fs", "host_path": "/t"}},
    ),
    Merge(
        case="the points of a searcher",
        follows=MERGE,
        differs="hpc_det's own searcher; Determined has none",
        template={"searcher": {"points": [1, 2]}},
        config={"searcher": {"points": [3]}},
        merged={"searcher": {"points": [3]}},
    ),
    Merge(
        case="values of different kinds",
        follows=MERGE,
        differs="the configuration's value; Determined's master ended with an error",
        template={"data": {"a": {"b": 1}, "c": 1}},
        config={"data": {"a": 2, "c": {"d": 3}}},
        merged={"data": {"a": 2, "c": {"d": 3}}},
    ),
    Merge(
        case="two legacy log policies, of which one is in both",
        follows=POLICIES,
        template={"log_policies": [{"pattern": "x", "action": {"type": "cancel_retries"}}]},
        config={"log_policies": [{"pattern": "x", "action": {"type": "exclude_node"}}]},
        merged={
            "log_policies": [
                {"pattern": "x", "action": {"type": "exclude_node"}},
                {"pattern": "x", "action": {"type": "cancel_retries"}},
            ]
        },
    ),
    Merge(
        case="mounts whose container_path is the same in another spelling",
        follows=MERGING,
        differs="`/in` and `/in/` are one mount; Determined took both",
        template={"bind_mounts": [mount("/old", "/in/"), mount("/other", "/a")]},
        config={"bind_mounts": [mount("/new", "/./in")]},
        merged={"bind_mounts": [mount("/new", "/./in"), mount("/other", "/a")]},
    ),
]
