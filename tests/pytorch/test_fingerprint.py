"""The same text means the same bits."""

from __future__ import annotations

import copy
import itertools
import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from hpc_det.pytorch.fingerprint import LARGEST_BYTES, tensor_text, texts_of


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


class Linked:
    def __init__(self) -> None:
        self.me = self
        self.count = 1


LARGE = torch.arange(100.0)
PAIRS: list[tuple[Any, Any]] = [
    (0.0, -0.0),
    (1, 1.0),
    (1, True),
    ("1", 1),
    (None, 0),
    (torch.tensor(0.1), torch.tensor(0.1, dtype=torch.float64)),
    (torch.tensor([1.0, -0.0]), torch.tensor([1.0, 0.0])),
    (LARGE, torch.nextafter(LARGE, torch.tensor(1e9))),
    (LARGE, LARGE.reshape(10, 10)),
    (LARGE.bfloat16(), LARGE.half()),
    (LARGE.numpy(), LARGE.numpy() + 1),
    (np.float32(0.1), np.float64(0.1)),
    ([1, 2], [2, 1]),
    ((1,), (1, 2)),
    ({"a": 1}, {"a": 2}),
    ({"a": 1}, {"b": 1}),
    (deque([1]), deque([2])),
    ({1, 2}, {1, 3}),
    (itertools.count(1), itertools.count(2)),
    (random.Random(1), random.Random(2)),
    (np.random.default_rng(1), np.random.default_rng(2)),
    (np.random.RandomState(1), np.random.RandomState(2)),
    (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)),
    (Holder(1), Holder(2)),
    (Holder(Holder([1])), Holder(Holder([2]))),
    ("x" * 200, "x" * 199 + "y"),
]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_values_that_differ_have_other_texts(one: Any, other: Any) -> None:
    assert texts_of("v", one) != texts_of("v", other)


@pytest.mark.parametrize("value", [value for pair in PAIRS for value in pair])
def test_a_value_has_the_same_text_each_time(value: Any) -> None:
    assert texts_of("v", value) == texts_of("v", value)
    assert texts_of("v", value)


def test_a_draw_changes_the_text_of_a_generator() -> None:
    generator = torch.Generator().manual_seed(1)
    before = texts_of("v", generator)
    torch.rand(1, generator=generator)
    assert texts_of("v", generator) != before


def test_names_are_the_expressions_that_lead_to_the_values() -> None:
    assert texts_of("trial.a", {"b": [1, Holder(2)]}) == {"trial.a['b'][0]": "1", "trial.a['b'][1].value": "2"}


def test_objects_that_refer_to_themselves_have_an_end() -> None:
    itself: list[Any] = [1]
    itself.append(itself)
    assert texts_of("v", Linked()) == {"v.count": "1"}
    assert texts_of("v", itself) == {"v[0]": "1"}


@pytest.mark.parametrize("shared", [[0.1], {"rate": [0.1]}, torch.ones(9), random.Random(1)])
def test_a_value_that_two_others_share_has_the_same_texts_as_two_copies(shared: Any) -> None:
    """A checkpoint brings back copies."""
    assert texts_of("v", [[shared], {"it": shared}]) == texts_of("v", [[shared], {"it": copy.deepcopy(shared)}])
    assert texts_of("v", [[shared], {"it": shared}]) != texts_of("v", [[shared], {}])


def test_functions_files_and_what_is_skipped_are_left_out() -> None:
    held = Holder(1)
    with open("/dev/null") as file:
        assert texts_of("v", [print, lambda: 1, file, held, int], frozenset([id(held)])) == {}


def test_a_module_and_an_optimizer_are_named_as_what_they_are() -> None:
    layer = torch.nn.Linear(1, 1)
    names = texts_of("v", [layer, torch.optim.SGD(layer.parameters(), momentum=0.9)])
    assert "v[0] (a module that is not wrapped)['weight']" in names
    assert any(name.startswith("v[1] (an optimizer that is not wrapped)") for name in names)


def test_a_large_array_is_not_hashed() -> None:
    shown = texts_of("v", np.zeros(LARGEST_BYTES // 8 + 1))
    assert shown == texts_of("v", np.ones(LARGEST_BYTES // 8 + 1))


def test_a_sparse_tensor_has_a_text() -> None:
    sparse = torch.eye(8).to_sparse()
    assert tensor_text(sparse) == tensor_text(torch.eye(8))
