"""Hyperparameters that functions draw, and the mutations of population based training."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest

from hpc_det.errors import UsageError
from hpc_det.sgd.tune import choice, grid_search, pbt, sample_from, uniform
from hpc_det.sgd.tune.draws import MUTATION_DRAWS, mutations_of
from hpc_det.sgd.tune.space import config_of, searcher_of
from tests.facts import refused


def values(config: dict[str, Any], samples: int = 3) -> list[dict[str, Any]]:
    points = config_of(config).points(samples, seed=1)
    return [{name: spec["val"] for name, spec in point.items()} for point in points]


def test_a_function_draws_a_value_for_each_trial() -> None:
    drawn = values({"lr": sample_from(lambda: random.uniform(0, 1)), "depth": 3})
    assert len({point["lr"] for point in drawn}) == 3
    assert {point["depth"] for point in drawn} == {3}


def test_a_function_sees_the_values_that_were_drawn_before() -> None:
    config = {
        "lr": uniform(1, 2),
        "width": grid_search([4, 8]),
        "double": sample_from(lambda spec: spec.config.lr * 2),
        "more": sample_from(lambda spec: spec["config"]["double"] + spec.config.width),
    }
    drawn = values(config, samples=1)
    assert [point["width"] for point in drawn] == [4, 8]
    assert all(point["double"] == 2 * point["lr"] for point in drawn)
    assert all(point["more"] == point["double"] + point["width"] for point in drawn)


def test_functions_of_nested_parts_draw_too() -> None:
    config = {"net": {"width": 4, "wider": sample_from(lambda spec: spec.config.width + 1)}}
    (point,) = config_of(config).points(1, seed=1)
    assert {name: spec["val"] for name, spec in point["net"].items()} == {"width": 4, "wider": 5}


def test_a_search_that_is_continued_draws_the_same_values_with_either_generator() -> None:
    config = {"a": sample_from(random.random), "b": sample_from(lambda n=1: numpy.random.uniform())}
    before = random.getstate(), str(numpy.random.get_state())
    assert values(config) == values(config)
    assert (random.getstate(), str(numpy.random.get_state())) == before
    assert {type(point["b"]) for point in values(config)} == {float}


def test_a_value_that_cannot_be_recorded_is_refused() -> None:
    with refused(UsageError, "config.act", "return a number or a text"):
        values({"act": sample_from(lambda: len)})


def test_a_value_that_is_not_drawn_yet_is_named() -> None:
    with pytest.raises(AttributeError, match="'later'"):
        values({"early": sample_from(lambda spec: spec.config.later), "later": sample_from(lambda: 1)})


def test_mutations_are_ranges_lists_and_functions() -> None:
    given = {"lr": lambda: random.uniform(2, 3), "momentum": [0.8, 0.9], "net": {"width": uniform(1, 2)}}
    space = mutations_of(given, seed=1)
    assert space["momentum"] == choice([0.8, 0.9])
    assert space["net"] == {"width": uniform(1, 2)}
    assert space["lr"]["type"] == "drawn"
    assert len(space["lr"]["vals"]) == MUTATION_DRAWS
    assert all(2 <= value <= 3 for value in space["lr"]["vals"])
    assert mutations_of(given, seed=1) == space != mutations_of(given, seed=2)


@pytest.mark.parametrize("given", [{"lr": 3}, {"lr": uniform(2, 1)}, {"lr": []}, {"lr": lambda: len}])
def test_mutations_that_are_none_are_refused(given: dict[str, Any]) -> None:
    with refused(UsageError, "mutations"):
        mutations_of(given, seed=1)


def test_the_searcher_contains_what_a_population_needs() -> None:
    asked = pbt(mutations={"momentum": [0.8, 0.9]}, resampled=0.5)
    config = config_of({"lr": sample_from(random.random), "momentum": 0.8})
    found = searcher_of(asked, config, num_samples=2, metric="loss", mode="min", length=3, max_concurrent=1, seed=1)
    assert (found["resampled"], found["mutations"]) == (0.5, {"momentum": choice([0.8, 0.9])})
    assert [point["momentum"]["val"] for point in found["points"]] == [0.8, 0.8]
    assert pbt() == {"name": "population", "interval": 1, "quantile": 0.25}, "as before there were mutations"
    with refused(UsageError, "pbt", "1.5"):
        pbt(resampled=1.5)
