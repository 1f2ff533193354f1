from __future__ import annotations

from typing import NamedTuple

from hpc_det.pytorch.nested import mapped


class Pair(NamedTuple):
    first: int
    second: list[int]


def test_every_value_is_mapped_and_the_nesting_stays() -> None:
    data = {"a": [1, (2, Pair(3, [4]))], "b": {"c": 5}, "d": ()}
    assert mapped(lambda value: value * 10, data) == {"a": [10, (20, Pair(30, [40]))], "b": {"c": 50}, "d": ()}
    assert isinstance(mapped(lambda value: value, data)["a"][1][1], Pair)


def test_a_bare_value_is_mapped() -> None:
    assert mapped(str, 7) == "7"
