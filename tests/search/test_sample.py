from __future__ import annotations

import random
from typing import Any

import pytest

from hpc_det.search.sample import sample


def test_the_same_seed_draws_the_same_values_in_whatever_order_the_keys_stand() -> None:
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
    with pytest.raises(ValueError, match="type 'gauss': expected const, int, double, log or categorical"):
        sample({"a": {"type": "gauss"}})
