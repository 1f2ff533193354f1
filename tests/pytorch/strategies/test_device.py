from __future__ import annotations

from typing import Any

import pytest
import torch

from hpc_det.pytorch.strategies.device import ToDevice, prefetched


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
    with pytest.warns(UserWarning, match="str stays where it is"):
        move(["a", "b"])
    assert move("c") == "c", "no second warning, which would be an error here"


@pytest.mark.gpu
def test_prefetched_batches_are_all_there_and_in_order() -> None:
    device = torch.device("cuda", 0)
    batches = [torch.full((1000, 1000), float(number)).pin_memory() for number in range(5)]
    means = [batch.mean().item() for batch in prefetched(batches, ToDevice(device), device)]
    assert means == [0.0, 1.0, 2.0, 3.0, 4.0]
