"""Values that Determined accepts or refuses (its schemas/expconf/v0), and so does hpc_det."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hpc_det.config.fields import size_bytes
from hpc_det.plan.effective import Effective
from tests.facts import each_names

Build = Callable[..., Effective]
Problems = Callable[..., list[str]]


@pytest.mark.parametrize(
    ("size", "in_bytes"),
    [(4096, 4096), ("4096", 4096), ("1b", 1), ("1 gib", 2**30), ("1GB", 2**30), (".5k", 512), ("1.5 MiB", 3 * 2**19)],
)
def test_a_size_of_shared_memory(size: Any, in_bytes: int) -> None:
    assert size_bytes(size) == in_bytes
    assert size_bytes("1p") == 2**50


@pytest.mark.parametrize("size", ["1 gi", "1i", "1  g", "1.", "-1", "g", " 1", "1 gibi"])
def test_any_other_size_is_refused(problems: Problems, size: str) -> None:
    each_names(problems(resources={"shm_size": size}), ["resources.shm_size", repr(size)])


@pytest.mark.parametrize("path", [".", "./", "a/.."])
def test_the_work_directory_itself_is_no_mount(problems: Problems, path: str) -> None:
    mount = {"host_path": "/a", "container_path": path}
    each_names(problems(bind_mounts=[mount]), ["bind_mounts[0].container_path", repr(path)])


@pytest.mark.parametrize(("first", "second"), [("/a", "/a"), ("/a", "/a/"), ("/a//b", "/a/./b"), ("data", "./data")])
def test_two_mounts_at_one_place_are_refused(problems: Problems, first: str, second: str) -> None:
    mounts = [{"host_path": host, "container_path": path} for host, path in (("/h", first), ("/i", second))]
    each_names(problems(bind_mounts=mounts), ["bind_mounts[1].container_path", repr(second), "bind_mounts[0]"])


def test_two_devices_at_one_place_are_refused(problems: Problems) -> None:
    devices = ["/h:/a", {"host_path": "/i", "container_path": "/a/"}]
    each_names(problems(resources={"devices": devices}), ["resources.devices[1].container_path", "'/a/'"])


LIST = [10, {"type": "const", "val": "a"}, {"type": "int", "minval": 1, "maxval": 2}, {"deep": [{"type": "log"}]}]


def test_a_range_in_a_list_is_a_constant_with_a_note(build: Build) -> None:
    found = build(hyperparameters={"layers": {"sizes": LIST}})
    assert found.tree["hyperparameters"]["layers"]["sizes"] == LIST
    each_names(
        found.notes,
        ["hyperparameters.layers.sizes[1]"],
        ["hyperparameters.layers.sizes[2]", "categorical"],
        ["hyperparameters.layers.sizes[3].deep[0]"],
    )


def test_a_grid_needs_a_count_for_a_range_in_a_list_too(problems: Problems, build: Build) -> None:
    grid = {"searcher": {"name": "grid", "metric": "a", "max_length": 1}}
    found = problems(hyperparameters={"sizes": LIST}, **grid)
    each_names(found, ["hyperparameters.sizes[2].count", "grid", "int"], ["hyperparameters.sizes[3].deep[0].count"])
    counted = [{"type": "int", "minval": 1, "maxval": 2, "count": 2}]
    assert build(hyperparameters={"sizes": counted}, **grid).tree["hyperparameters"] == {"sizes": counted}
