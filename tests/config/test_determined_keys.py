from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hpc_det.config.determined_keys import NO_EFFECT, REMEDIES, REMEDIES_OF_KINDS
from hpc_det.config.schema import Experiment
from hpc_det.config.section import keys_at
from hpc_det.plan.effective import Effective
from tests.facts import each_names

Build = Callable[..., Effective]
Problems = Callable[..., list[str]]


def written(path: str, value: Any) -> dict[str, Any]:
    *sections, key = path.split(".")
    tree: dict[str, Any] = {key: value}
    for section in reversed(sections):
        tree = {section: tree}
    return tree


def is_a_key(path: str) -> bool:
    *sections, key = path.split(".")
    return key in (keys_at(Experiment, sections) or [])


@pytest.mark.parametrize("path", REMEDIES)
def test_a_key_that_only_determined_has_comes_with_a_remedy(problems: Problems, path: str) -> None:
    change = written(path, 1)
    change = {**change, "searcher": {"metric": "a", "max_length": 1, **change.get("searcher", {})}}
    each_names(problems(**change), [f"{path}: ", "Determined", "config", REMEDIES[path]])


@pytest.mark.parametrize("name", REMEDIES_OF_KINDS["searcher.name"])
def test_a_searcher_that_only_determined_has_comes_with_a_remedy(problems: Problems, name: str) -> None:
    remedy = REMEDIES_OF_KINDS["searcher.name"][name]
    found = problems(searcher={"name": name, "metric": "a", "max_length": 1})
    each_names(found, ["searcher.name: ", repr(name), "Determined", "config", remedy])


def test_every_row_names_a_key_that_is_none_or_one_of_ours() -> None:
    assert not [path for path in REMEDIES if is_a_key(path)]
    assert [path for path in NO_EFFECT if not is_a_key(path)] == []


VALUES: dict[str, Any] = {
    "project": "p",
    "workspace": "w",
    "debug": True,
    "records_per_epoch": 60000,
    "resources.weight": 2,
    "resources.native_parallel": True,
    "resources.agent_label": "old",
    "environment.force_pull_image": True,
    "environment.registry_auth": {"username": "u", "password": "p"},
    "environment.add_capabilities": ["SYS_PTRACE"],
    "environment.drop_capabilities": ["KILL"],
    "environment.ports": {"tensorboard": 6006},
    "environment.proxy_ports": [{"proxy_port": 8080, "proxy_tcp": True}],
    "environment.pod_spec": {"spec": {"hostNetwork": True}},
    "checkpoint_storage.propagation": "rshared",
    "optimizations.grad_updates_size_file": "/tmp/sizes",
    "optimizations.tensor_fusion_cycle_time": 7,
    "preemption_timeout": 3600,
    "integrations": {"pachyderm": {}},
    "security": {"tls": {}},
    "internal": {"native": {}},
    "data_layer": {"type": "shared_fs"},
    "tensorboard_storage": {"type": "shared_fs"},
}


@pytest.mark.parametrize("path", NO_EFFECT)
def test_a_key_without_effect_is_accepted_with_a_note(build: Build, path: str) -> None:
    change = written(path, VALUES[path])
    if path == "checkpoint_storage.propagation":
        change["checkpoint_storage"] |= {"type": "shared_fs", "host_path": "/c"}
    each_names(build(**change).notes, [path, NO_EFFECT[path]])


def test_one_note_names_all_keys_with_defaults_of_determined(build: Build) -> None:
    change = {
        "project": "Uncategorized",
        "debug": False,
        "records_per_epoch": 60000,
        "resources": {"weight": 1, "agent_label": "", "resource_pool": ""},
        "environment": {"ports": {}, "proxy_ports": [], "add_capabilities": ["SYS_PTRACE"]},
        "optimizations": {"tensor_fusion_cycle_time": 5, "grad_updates_size_file": None},
    }
    each_names(
        build(**change).notes,
        ["records_per_epoch", NO_EFFECT["records_per_epoch"]],
        ["environment.add_capabilities"],
        [
            *("project", "debug", "resources.weight", "resources.agent_label", "environment.ports"),
            *("environment.proxy_ports", "optimizations.tensor_fusion_cycle_time"),
        ],
    )


def test_an_empty_pool_is_unset(build: Build) -> None:
    change = {"resources": {"resource_pool": ""}}
    assert build(**change).tree["resources"]["resource_pool"] is None
    assert build({"resources": {"resource_pool": "a"}}, **change).tree["resources"]["resource_pool"] == "a"


def test_the_container_path_of_a_shared_folder_has_no_effect(build: Build) -> None:
    shared = {"type": "shared_fs", "host_path": "/c", "container_path": "/d"}
    each_names(build(checkpoint_storage=shared).notes, ["checkpoint_storage.container_path", "host_path"])
    assert build(checkpoint_storage={"type": "directory", "container_path": "/d"}).notes == []


def test_slots_are_slots_per_trial(problems: Problems) -> None:
    each_names(problems(resources={"slots": 4}), ["resources.slots", "slots_per_trial"])


def test_who_writes_nothing_is_told_nothing(build: Build) -> None:
    assert build(debug=None, environment={"ports": None}, slurm={"sbatch_args": ["-v"]}).notes == []


def test_a_section_of_another_scheduler_has_no_effect(build: Build) -> None:
    change = {"slurm": {"sbatch_args": ["-v"]}, "pbs": {"slots_per_node": 4, "pbsbatch_args": ["-m be"]}}
    each_names(build(**change).notes, ["pbs.slots_per_node"], ["pbs.pbsbatch_args"])
    assert build(cluster={"scheduler": "local"}, template=change).notes[0].startswith("slurm.sbatch_args: ")
