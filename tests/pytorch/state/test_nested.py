from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pack_padded_sequence

from hpc_det.pytorch.state.nested import mapped


class Pair(NamedTuple):
    first: int
    second: list[int]


def test_every_value_is_mapped_and_the_nesting_stays() -> None:
    data = {"a": [1, (2, Pair(3, [4]))], "b": {"c": 5}, "d": ()}
    assert mapped(lambda value: value * 10, data) == {"a": [10, (20, Pair(30, [40]))], "b": {"c": 50}, "d": ()}
    assert isinstance(mapped(lambda value: value, data)["a"][1][1], Pair)


def test_a_bare_value_is_mapped() -> None:
    assert mapped(str, 7) == "7"


class Outputs(OrderedDict[str, Any]):
    """As model libraries return them: a dict whose items are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def test_a_dict_of_a_class_of_its_own_stays_one_and_the_original_as_it_is() -> None:
    outputs = Outputs(loss=1, extra=[2])
    found = mapped(lambda value: value * 10, outputs)
    assert (type(found), found.loss, found.extra) == (Outputs, 10, [20])
    assert outputs.loss == 1


def test_what_moves_itself_is_one_value() -> None:
    packed = pack_padded_sequence(torch.ones(3, 2, 1), torch.tensor([3, 2]))
    assert mapped(lambda value: value, packed) is packed
