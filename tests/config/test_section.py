from __future__ import annotations

from typing import Annotated

import pytest
from pydantic import Field

from hpc_det.config.fields import Positive
from hpc_det.config.schema import Experiment
from hpc_det.config.section import Section, Where, expectation, keys_at
from tests.facts import unnamed


class Pool(Section):
    slots: Positive = 1


class Site(Section):
    """A section with types of keys that the experiment's schema does not have."""

    pools: dict[str, Pool] = Field(default={})
    scratch: Annotated[str, Field(description="a folder of the node")] = "/tmp"


@pytest.mark.parametrize(
    ("where", "keys"),
    [
        (["reproducibility"], ["experiment_seed"]),
        (["retention_policy", "log_retention_days"], None),
        (["bind_mounts", 0], ["host_path", "container_path", "read_only", "propagation"]),
        (["checkpoint_storage", "<directory>", "container_path"], None),
        (["nothing", "here"], None),
        (["data", "x"], None),
    ],
)
def test_the_keys_of_a_section(where: Where, keys: list[str] | None) -> None:
    assert keys_at(Experiment, where) == keys


def test_a_section_of_several_kinds_has_the_keys_of_all() -> None:
    every, one = keys_at(Experiment, ["searcher"]), keys_at(Experiment, ["searcher", "<custom>"])
    assert every is not None
    assert one is not None
    assert {"class", "settings", "metric"} < set(one) < set(every)
    assert "bracket_rungs" in set(every) - set(one)


def test_a_map_of_sections_has_names_of_the_users_above_its_keys() -> None:
    assert keys_at(Site, ["pools"]) is None
    assert keys_at(Site, ["pools", "debug"]) == ["slots"]


@pytest.mark.parametrize(
    ("model", "where", "facts"),
    [
        (Experiment, ["checkpoint_policy"], ["best", "all", "none"]),
        (Experiment, ["name"], ["name"]),
        (Experiment, ["environment", "image", "<map>", "cuda"], ["cpu", "cuda", "rocm"]),
        (Experiment, ["searcher", "<grid>", "max_concurrent_trials"], [0]),
        (Experiment, ["reproducibility"], ["experiment_seed"]),
        (Experiment, ["resources", "devices", 3, "host_path"], ["path"]),
        (Site, ["pools", "debug", "slots"], [1]),
        (Site, ["scratch"], ["folder"]),
        (Site, [], ["pools", "scratch"]),
    ],
)
def test_what_may_stand_at_a_path(model: type[Section], where: Where, facts: list[object]) -> None:
    assert not unnamed(expectation(model, where), *facts)
