"""Ranges with Ray's names, and its functions for dicts and results."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hpc_det.compat import ray_tune as tune
from hpc_det.compat.ray_tune.helpers import date_str, deep_update, flatten_dict, merge_dicts
from hpc_det.compat.ray_tune.logger import pretty_print
from hpc_det.errors import UsageError
from hpc_det.sgd.tune.space import config_of
from tests.facts import refused


def values(name: str, spec: Any) -> list[Any]:
    return [point["x"]["val"] for point in config_of({"x": spec}).points(60, seed=1)]


def test_ranges_take_rays_names_of_arguments() -> None:
    config = {
        "a": tune.uniform(lower=1, upper=2),
        "b": tune.loguniform(lower=1, upper=10, base=2),
        "c": tune.randint(lower=1, upper=3),
        "d": tune.choice(categories=["x"]),
        "e": tune.grid_search(values=[7]),
    }
    (point,) = config_of(config).points(1, seed=1)
    assert 1 <= point["a"]["val"] <= 2
    assert 1 <= point["b"]["val"] <= 10
    assert point["c"]["val"] in (1, 2)
    assert (point["d"]["val"], point["e"]["val"]) == ("x", 7)


@pytest.mark.parametrize(
    ("spec", "low", "high", "step"),
    [
        (tune.quniform(0, 1, 0.25), 0, 1, 0.25),
        (tune.quniform(0.1, 0.3, 0.1), 0.1, 0.3, 0.1),
        (tune.qloguniform(5, 100, 5), 5, 100, 5),
        (tune.qrandint(0, 20, 5), 0, 20, 5),
        (tune.lograndint(1, 100), 1, 99, 1),
        (tune.qrandint(1, 24, 5), 5, 20, 5),
        (tune.qlograndint(1, 100, 10), 10, 100, 10),
        (tune.qrandn(0, 1, 0.5), -9, 9, 0.5),
    ],
)
def test_rounded_ranges(spec: Any, low: float, high: float, step: float) -> None:
    drawn = values("x", spec)
    assert len(set(drawn)) > 2
    assert all(low <= value <= high and math.isclose(value, round(value / step) * step) for value in drawn)


def test_each_integer_of_a_range_is_drawn_equally_often() -> None:
    drawn = [point["x"]["val"] for point in config_of({"x": tune.qrandint(1, 3)}).points(900, seed=1)]
    assert all(240 < drawn.count(value) < 360 for value in (1, 2, 3))


@pytest.mark.parametrize(
    ("name", "arguments", "facts"),
    [
        ("quniform", (0.1, 1, 0.5), ["lower", 0.1, 0.5]),
        ("quniform", (0, 1, 0.3), ["upper", 1, 0.3]),
        ("quniform", (1, 0, 0.5), [1, 0]),
        ("quniform", (0, 1, 0), ["q", 0]),
        ("qloguniform", (1e-4, 1e-1, 1e-3), ["lower", 1e-4, 1e-3]),
        ("qloguniform", (0, 1, 0.5), ["lower", 0]),
        ("lograndint", (0, 10), ["lower", 0]),
        ("lograndint", (5, 5), [5]),
        ("qrandint", (6, 9, 5), ["q", 5, 6, 9]),
        ("qlograndint", (0, 10, 1), ["lower", 0]),
        ("qrandn", (0, 1, 0), ["q", 0]),
    ],
)
def test_ranges_without_a_value_are_refused(name: str, arguments: Any, facts: list[Any]) -> None:
    with refused(UsageError, name, *facts):
        getattr(tune, name)(*arguments)


def test_normal_draws() -> None:
    drawn = values("x", tune.randn(5, 0.1))
    assert 4.5 < sum(drawn) / len(drawn) < 5.5


def test_functions_for_dicts() -> None:
    low, high = {"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"c": 9}, "e": {}}
    assert merge_dicts(low, high) == {"a": {"b": 1, "c": 9}, "d": 3, "e": {}}
    assert low == {"a": {"b": 1, "c": 2}, "d": 3}
    assert flatten_dict(low) == {"a/b": 1, "a/c": 2, "d": 3}
    assert flatten_dict(low, delimiter=".") == {"a.b": 1, "a.c": 2, "d": 3}
    assert deep_update(low, {"a": {"b": 5}}) is low
    assert low["a"] == {"b": 5, "c": 2}
    with pytest.raises(KeyError, match="'new'"):
        deep_update(low, {"new": 1}, new_keys_allowed=False)
    assert len(date_str()) == len("2026-01-31_12-00-00")


def test_a_result_is_printed_without_its_config() -> None:
    assert pretty_print({"loss": 0.5, "config": {"lr": 1}, "net": {"width": 2}, "nothing": None}) == (
        "loss: 0.5\nnet:\n  width: 2\n"
    )
