from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

from hpc_det.pytorch import data_length, to_device
from hpc_det.pytorch.strategies.device import ToDevice, mapped, prefetched
from tests.facts import warned


class Movable:
    def __init__(self, device: Any = None) -> None:
        self.device = device

    def to(self, device: torch.device) -> Movable:
        return Movable(device)


def test_whatever_has_a_to_of_its_own_moves() -> None:
    moved = ToDevice(torch.device("meta"))([Movable()])
    assert moved[0].device == torch.device("meta")


def test_a_tensor_that_is_there_already_stays_the_same_object() -> None:
    tensor = torch.ones(2)
    assert ToDevice(torch.device("cpu"))({"x": (tensor,)})["x"][0] is tensor


def test_each_type_that_stays_is_warned_about_once() -> None:
    move = ToDevice(torch.device("cpu"))
    with warned(UserWarning, "str"):
        move(["a", "b"])
    assert move("c") == "c", "no second warning, which would be an error here"


@pytest.mark.gpu
def test_prefetched_batches_are_all_there_and_in_order() -> None:
    device = torch.device("cuda", 0)
    batches = [torch.full((1000, 1000), float(number)).pin_memory() for number in range(5)]
    means = [batch.mean().item() for batch in prefetched(batches, ToDevice(device), device)]
    assert means == [0.0, 1.0, 2.0, 3.0, 4.0]


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
    """An output type of model libraries: a dict whose items are also attributes."""

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


def test_the_function_of_the_package_warns_of_a_type_once_for_all_calls() -> None:
    seen: set[type] = set()
    with warned(UserWarning, "to_device: ", "str"):
        moved = to_device({"x": np.ones(2), "name": "a"}, torch.device("cpu"), seen)
    assert isinstance(moved["x"], torch.Tensor)
    assert seen == {str}
    assert to_device(["b"], "cpu", seen) == ["b"]


def test_the_length_of_a_batch_needs_no_trial() -> None:
    assert data_length({"data": [torch.ones(6)], "label": torch.ones(2)}) == 6
