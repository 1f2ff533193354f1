"""Cluster profiles: pools, containers, and keys that a profile may not have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_det.config.cluster import Cluster
from hpc_det.config.plain_yaml import load_yaml
from hpc_det.plan.effective import Effective, valid_profile
from hpc_det.resources import data_path
from tests.facts import each_names, golden, unnamed

POOLS: dict[str, Any] = {
    "short": {"max_time_limit": "01:00:00", "default": True},
    "low": {"slots_per_node": 8, "gpu_type": "h100", "preempt_mode": "requeue", "grace_time_s": 0, "max_nodes": 3},
}


def cluster(**changes: Any) -> Cluster:
    required: dict[str, Any] = {"name": "atlas", "scheduler": "slurm", "slots_per_node": 4, "slot_type": "gpu"}
    return Cluster.model_validate({**required, "gpu_type": "a100", "grace_time_s": 60, "pools": POOLS, **changes})


def test_what_a_pool_says_comes_before_what_the_profile_says() -> None:
    found = cluster().in_pool("low")
    assert (found.slots_per_node, found.gpu_type, found.max_nodes, found.grace_time_s) == (8, "h100", 3, 0)
    assert (found.slot_type, found.max_time_limit) == ("gpu", None)


def test_without_a_name_it_is_the_default_pool() -> None:
    assert cluster().in_pool(None).max_time_limit_min == 60
    assert cluster(pools={"low": POOLS["low"]}).in_pool(None).slots_per_node == 4


def test_a_profile_in_its_pool_stays_there() -> None:
    low = cluster().in_pool("low")
    assert low.in_pool(None) == low


def test_an_unknown_pool_changes_nothing() -> None:
    assert cluster().in_pool("nowhere") == cluster()


@pytest.mark.parametrize("name", ["local", "slurm", "pbs"])
def test_the_profiles_that_come_along_are_valid(name: str) -> None:
    tree = load_yaml(data_path("conf") / "cluster" / f"{name}.yaml")
    assert valid_profile(tree).name == name


WRONG_PROFILES: list[tuple[dict[str, Any], list[object]]] = [
    (
        {"pools": {"low": {"slots": 8}}},
        ["cluster.pools.low.slots", "'slots'", "'lab'"],
    ),
    (
        {"pools": {"a": {"default": True}, "b": {"default": True}}},
        ["cluster.pools", "{'a': {'default': True}, 'b': {'default': True}}", "'lab'"],
    ),
    (
        {"pools": {"low": {"grace_time_s": -1}}},
        ["cluster.pools.low.grace_time_s", "-1", "'lab'", 0],
    ),
    (
        {"pools": {"low": {"max_time_limit": "soon"}}},
        ["cluster.pools.low.max_time_limit", "'soon'", "'lab'", "HH:MM:SS", "D-HH:MM:SS"],
    ),
    (
        {"preempt_mode": "kill"},
        ["cluster.preempt_mode", "'kill'", "'lab'"],
    ),
    (
        {"containers": {"runtime": "docker"}},
        ["cluster.containers.runtime", "'docker'", "'lab'", "apptainer", "podman", "pyxis"],
    ),
    (
        {"scratch": "tmp"},
        ["cluster.scratch", "'tmp'", "'lab'", "$"],
    ),
    (
        {"max_array_size": 0},
        ["cluster.max_array_size", 0, "'lab'", 1],
    ),
]


@pytest.mark.parametrize(
    ("profile", "facts"),
    WRONG_PROFILES,
)
def test_a_wrong_profile_is_told_with_the_path(
    profile: dict[str, Any], facts: list[object], problems: Callable[..., list[str]]
) -> None:
    (found,) = problems(cluster=profile)
    assert not unnamed(found, *facts)


def test_the_words_for_a_wrong_profile(problems: Callable[..., list[str]]) -> None:
    assert [problem for profile, _ in WRONG_PROFILES for problem in problems(cluster=profile)] == golden(
        __file__, "cluster.txt"
    )


def test_the_pool_of_the_experiment_decides_how_many_slots_a_node_has(build: Callable[..., Effective]) -> None:
    pools = {"pools": {"low": {"slots_per_node": 8}, "high": {"slots_per_node": 1}}}
    wanted = {"slots_per_trial": 8, "resource_pool": "low"}
    assert build(cluster=pools, resources=wanted).cluster.slots_per_node == 8


def test_what_the_experiment_says_of_its_nodes_comes_before_the_pool(build: Callable[..., Effective]) -> None:
    pools = {"pools": {"low": {"slots_per_node": 8, "gpu_type": "a100"}}}
    found = build(cluster=pools, resources={"resource_pool": "low"}, slurm={"slots_per_node": 4})
    assert (found.cluster.slots_per_node, found.cluster.gpu_type) == (4, "a100")


def test_the_pool_of_the_profile_is_the_experiments_where_it_names_none(
    build: Callable[..., Effective], code: Path
) -> None:
    pools = {"pools": {"low": {"slots_per_node": 8}}, "resource_pool": "low"}
    found = build(cluster=pools)
    assert (found.experiment.resources.resource_pool, found.cluster.slots_per_node) == ("low", 8)


def test_the_default_pool_is_the_experiments_where_nobody_names_one(build: Callable[..., Effective]) -> None:
    found = build(cluster={"pools": POOLS})
    assert (found.experiment.resources.resource_pool, found.origins["resources.resource_pool"]) == ("short", "cluster")
    assert build(cluster={"pools": POOLS, "resource_pool": "low"}).experiment.resources.resource_pool == "low"


def test_all_that_a_cluster_cannot_give_is_told_at_once(problems: Callable[..., list[str]]) -> None:
    found = problems(
        cluster={"max_time_limit": "01:00:00"},
        resources={"slots_per_trial": 3, "time_limit": "02:00:00"},
        environment={"image": "site/torch:2"},
    )
    each_names(
        found,
        ["resources.time_limit", "'02:00:00'", 120, "'lab'", "'01:00:00'", 60],
        ["resources.slots_per_trial", 3, 2, "'lab'", 4],
        ["environment.image", "'site/torch:2'", "'lab'", "containers.runtime", "--config", "environment.image="],
    )


def test_a_pool_without_a_grace_time_is_worth_a_note(build: Callable[..., Effective]) -> None:
    found = build(cluster={"pools": POOLS}, resources={"resource_pool": "low"})
    each_names(found.notes, ["'low'", "'lab'", "min_checkpoint_period", "checkpoint_interval"])
    assert build(cluster={"pools": POOLS}).notes == []


@pytest.mark.parametrize(
    "name",
    ["a b", "a'b", 'a"b', "ünï", "-x", "a.b", "a[0]", "[", "]a[", "<<", "<slurm>", "<", "{}", "${x}", "$(id)", "'"],
)
def test_a_pool_may_be_called_anything_and_its_mistakes_are_messages(
    build: Callable[..., Effective], problems: Callable[..., list[str]], name: str
) -> None:
    assert build(cluster={"pools": {name: {"default": True}}}).cluster.name == "lab"
    for wrong in ({"nope": 1}, {"slots_per_node": -1}, {"experiment": {"x": 1}}, 7):
        found = problems(cluster={"pools": {name: wrong}})
        assert all(line.startswith("cluster.pools") for line in found), found
    assert problems(cluster={"pools": {name: {}}}, resources={"resource_pool": "another"})
