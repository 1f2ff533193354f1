from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_det.search.by_name import sampler
from hpc_det.search.sample import (
    GridSampler,
    NumpyRandom,
    PointsSampler,
    SpaceSampler,
    first_sample,
    sample,
)
from tests.facts import refused

SPACE = {
    "global_batch_size": {"type": "const", "val": 64},
    "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -2},
    "n": {"type": "int", "minval": 8, "maxval": 64},
    "opt": {"type": "categorical", "vals": ["a", "b", "c"]},
}


# --- values of a space; tests/conformance/searches.py has Determined's


def test_a_trials_sample_is_the_same_whenever_it_is_asked_for() -> None:
    forward, backward = SpaceSampler(SPACE, 5), SpaceSampler(SPACE, 5)
    expected = [forward.sample(trial) for trial in range(1, 20)]
    assert [backward.sample(trial) for trial in range(19, 0, -1)] == expected[::-1]
    assert first_sample(SPACE, 5) == expected[0]


def test_what_a_caller_does_with_a_sample_is_its_own_business() -> None:
    space = {"layers": {"type": "categorical", "vals": [[1, 2]]}}
    samples = SpaceSampler(space, 0)
    samples.sample(1).hparams["layers"].append(3)
    assert samples.sample(1).hparams == {"layers": [1, 2]}
    assert samples.sample(2).hparams == {"layers": [1, 2]}


def test_keys_are_drawn_in_sorted_order_in_nested_maps_too() -> None:
    space: dict[str, Any] = {name: {"type": "double", "minval": 0, "maxval": 1} for name in "abc"}
    nested = {"z": dict(reversed(space.items())), **space}
    turned = dict(reversed(nested.items()))
    assert SpaceSampler(nested, 1).sample(2) == SpaceSampler(turned, 1).sample(2)
    assert list(first_sample(nested, 1).hparams["z"]) == ["a", "b", "c"]


def test_constants_draw_nothing() -> None:
    constants = {"a": 1, "b": {"c": [1]}, "d": {"type": "const", "val": None}}
    lr = {"lr": SPACE["lr"]}
    assert first_sample({**constants, **lr}, 9).hparams == {"a": 1, "b": {"c": [1]}, "d": None} | (
        first_sample(lr, 9).hparams
    )


def test_a_seed_is_one_that_numpy_and_torch_take() -> None:
    samples = SpaceSampler({}, 2**31 - 1)
    seeds = {samples.sample(trial).seed for trial in range(1, 1000)}
    assert len(seeds) == 999
    assert all(0 <= seed < 2**31 for seed in seeds)


# --- grids


def axis(**spec: Any) -> list[Any]:
    grid = GridSampler({"x": spec}, 0)
    return [grid.sample(trial).hparams["x"] for trial in range(1, grid.points + 1)]


@pytest.mark.parametrize(
    ("low", "high", "count", "points"),
    [
        (0, 5, 3, [0, 3, 5]),  # half is rounded away from zero
        (-5, 0, 3, [-5, -3, 0]),
        (1, 3, 10, [1, 2, 3]),  # the range has only three integers
        (0, 5, 1, [3]),
        (-5, 0, 1, [-3]),
        (2**62, 2**62 + 4, 3, [2**62, 2**62 + 2, 2**62 + 4]),  # exact beyond the integers that a float can represent
    ],
)
def test_points_of_an_int(low: int, high: int, count: int, points: list[int]) -> None:
    assert axis(type="int", minval=low, maxval=high, count=count) == points


def test_points_of_a_double_are_even() -> None:
    assert axis(type="double", minval=0, maxval=1, count=5) == [0, 0.25, 0.5, 0.75, 1]
    assert axis(type="double", minval=0, maxval=1, count=1) == [0.5]


def test_points_of_a_log_are_even_in_the_exponent() -> None:
    assert axis(type="log", base=10, minval=-4, maxval=-2, count=3) == pytest.approx([1e-4, 1e-3, 1e-2])
    assert axis(type="log", minval=-4, maxval=-2, count=1) == pytest.approx([1e-3])
    assert axis(type="log", base=2, minval=1, maxval=3, count=3) == [2, 4, 8]


def test_a_grid_goes_through_its_points_in_natural_order_the_last_key_fastest() -> None:
    grid = GridSampler(
        {
            "b": {"type": "int", "minval": 0, "maxval": 10, "count": 3},
            "a": {"x": {"type": "int", "minval": 0, "maxval": 20, "count": 3}, "constant": 7},
        },
        0,
    )
    assert grid.points == 9
    points = [grid.sample(trial).hparams for trial in range(1, 10)]
    assert [(point["a"]["x"], point["b"]) for point in points] == [(x, b) for x in (0, 10, 20) for b in (0, 5, 10)]
    assert all(point["a"]["constant"] == 7 for point in points)


def test_a_grid_of_constants_is_one_point() -> None:
    assert GridSampler({"a": 1}, 0).points == 1
    assert GridSampler({}, 0).points == 1


def test_seeds_of_a_grid_are_those_of_a_space_of_constants() -> None:
    values = {"a": {"type": "categorical", "vals": [1, 2, 3]}}
    grid, constants = GridSampler(values, 3), SpaceSampler({"a": 1}, 3)
    assert [grid.sample(k).seed for k in (1, 2, 3)] == [constants.sample(k).seed for k in (1, 2, 3)]


# --- points one by one


def test_points_have_the_constants_that_were_written() -> None:
    points = PointsSampler([{"a": 1}, {"a": {"type": "const", "val": 2}, "b": {"c": 3}}], 0)
    assert points.points == 2
    assert [points.sample(k).hparams for k in (1, 2)] == [{"a": 1}, {"a": 2, "b": {"c": 3}}]


@pytest.mark.parametrize(
    ("searcher", "kind", "points"),
    [
        ({"name": "single"}, SpaceSampler, None),
        ({"name": "adaptive_asha"}, SpaceSampler, None),
        ({"name": "grid"}, GridSampler, 3),
        ({"name": "points", "points": [{"n": 1}, {"n": 2}]}, PointsSampler, 2),
    ],
)
def test_a_searcher_has_its_sampler(searcher: dict[str, Any], kind: type, points: int | None) -> None:
    found = sampler(searcher, {"n": {"type": "int", "minval": 0, "maxval": 9, "count": 3}}, 0)
    assert isinstance(found, kind)
    assert found.points == points


# --- values of any random numbers


def test_the_same_random_numbers_give_the_same_values_in_whatever_order_the_keys_stand() -> None:
    space: dict[str, Any] = {name: {"type": "double", "minval": 0, "maxval": 1} for name in "abc"}
    turned = dict(reversed(space.items()))
    assert sample(space, random.Random(1)) == sample(turned, random.Random(1))
    assert sample(space, random.Random(1)) != sample(space, random.Random(2))


def test_constants_of_every_form_stay_as_they_are() -> None:
    constants = {"a": 1, "b": [1, 2], "c": None, "d": {"e": "text"}}
    assert sample({**constants, "f": {"type": "const", "val": 3}}) == {**constants, "f": 3}


def test_both_ends_of_an_int_are_drawn() -> None:
    draws = random.Random(3)
    assert {sample({"n": {"type": "int", "minval": 1, "maxval": 3}}, draws)["n"] for _ in range(100)} == {1, 2, 3}


def test_an_unknown_type_is_refused() -> None:
    with refused(ValueError, "'gauss'", "const", "int", "double", "log", "categorical"):
        sample({"a": {"type": "gauss"}})


SEEDS = st.integers(0, 2**32 - 1)
WIDTHS = st.one_of(
    st.integers(1, 2**64),
    st.integers(1, 300),
    st.sampled_from([width + i for width in (2**31, 2**32, 2**33, 2**63) for i in (-1, 0, 1)] + [2**64 - 1, 2**64]),
)
INTEGERS = st.tuples(st.integers(-(2**63), 2**63 - 1), WIDTHS).filter(lambda ends: sum(ends) <= 2**63)


@pytest.mark.integration
@given(SEEDS, st.lists(INTEGERS, max_size=20))
def test_whole_numbers_are_numpys_and_leave_its_stream_where_numpy_does(
    seed: int, ranges: list[tuple[int, int]]
) -> None:
    ours, theirs = NumpyRandom(seed), np.random.RandomState(seed)
    for low, width in ranges:
        assert ours.randrange(low, low + width) == theirs.randint(low, low + width, dtype=np.int64)
    assert ours.random() == theirs.random_sample()


@given(SEEDS, st.floats(-1e300, 1e300), st.floats(-1e300, 1e300))
def test_numbers_of_a_range_are_numpys(seed: int, low: float, high: float) -> None:
    ours, theirs = NumpyRandom(seed), np.random.RandomState(seed)
    assert [ours.uniform(low, high) for _ in range(3)] == list(theirs.uniform(low, high, 3))


@pytest.mark.parametrize("seed", [0, 1, 777, 2**31 - 1, 2**32 - 1])
def test_a_long_stream_is_numpys(seed: int) -> None:
    """Longer than the generator's state, so that the state is regenerated."""
    ours, theirs = NumpyRandom(seed), np.random.RandomState(seed)
    assert [ours.uint32() for _ in range(2000)] == theirs.randint(0, 2**32, 2000, dtype=np.uint32).tolist()
