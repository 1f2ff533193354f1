from __future__ import annotations

import math
from typing import Any

import pytest

from hpc_det.errors import UsageError
from hpc_det.search.sample import sample
from hpc_det.sgd.tune.space import choice, config_of, grid_search, loguniform, randint, uniform
from tests.facts import refused


def values(config: dict[str, Any], draws: int = 200) -> list[Any]:
    space = config_of({"x": config}).space
    return [sample(space)["x"] for _ in range(draws)]


def test_ranges_draw_between_the_ends_that_tune_has() -> None:
    assert all(1 <= x <= 2 for x in values(uniform(1, 2)))
    assert set(values(randint(3, 6))) == {3, 4, 5}
    assert set(values(randint(3, 4), 3)) == {3}
    assert set(values(choice("ab"))) == {"a", "b"}
    drawn = values(loguniform(1e-4, 1e-1))
    assert all(1e-4 * 0.999 <= x <= 1e-1 * 1.001 for x in drawn)
    assert 1e-3 < math.exp(sum(map(math.log, drawn)) / len(drawn)) < 1e-2


def test_ranges_of_an_experiment_file_are_taken_as_they_are() -> None:
    assert set(values({"type": "int", "minval": 1, "maxval": 2})) == {1, 2}


def test_values_grids_and_objects_are_taken_apart() -> None:
    config = config_of({"net": {"width": 8, "act": len, "depth": grid_search([1, 2])}, "sizes": (1, 2), "empty": {}})
    assert config.space == {"net": {"width": {"type": "const", "val": 8}}, "empty": {}}
    assert config.grid == {"net": {"depth": {"type": "categorical", "vals": [1, 2]}}}
    assert config.objects == {"net": {"act": len}, "sizes": (1, 2)}


def test_points_go_over_the_grid_as_often_as_there_are_samples() -> None:
    config = config_of({"a": grid_search([1, 2]), "b": grid_search(["x"]), "c": uniform(0, 1), "d": 5})
    points = config.points(2, seed=3)
    assert [point["a"]["val"] for point in points] == [1, 2, 1, 2]
    assert len({point["c"]["val"] for point in points}) == 4
    assert all(point["d"] == {"type": "const", "val": 5} for point in points)
    assert points == config.points(2, seed=3) != config.points(2, seed=4)


def test_a_value_that_is_a_map_stays_one_value() -> None:
    config = config_of({"optimizer": grid_search([{"type": "adam"}, {"type": "sgd"}])})
    assert [point["optimizer"]["val"]["type"] for point in config.points(1, 0)] == ["adam", "sgd"]


def test_everything_wrong_is_said_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        config_of({"a": uniform(2, 1), "b": choice([len]), "c": grid_search([]), "net": {"type": "norml"}})
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "config.b",
        "config.c.vals",
        "config.a.minval",
        "config.net.type",
    ]
    with refused(UsageError, "loguniform"):
        loguniform(0, 1)
