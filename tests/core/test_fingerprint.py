"""Values have the same fingerprint text only if they have the same bits."""

from __future__ import annotations

import copy
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from hpc_det.core.fingerprint import LARGEST_BYTES, some_texts_of, tensor_text, texts_of
from hpc_det.store.trace_names import unwrapped


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


class Held:
    def __init__(self, count: int) -> None:
        self.count = count

    def add(self) -> None:
        self.count += 1


class CountingModule(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counted = 0

    def count(self) -> None:
        self.counted += 1


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
    """A checkpoint restores copies."""
    assert texts_of("v", [[shared], {"it": shared}]) == texts_of("v", [[shared], {"it": copy.deepcopy(shared)}])
    assert texts_of("v", [[shared], {"it": shared}]) != texts_of("v", [[shared], {}])


def test_functions_files_and_what_is_skipped_are_left_out() -> None:
    held = Holder(1)
    with open("/dev/null") as file:
        assert some_texts_of("v", [print, lambda: 1, file, held, int], frozenset([id(held)])) == {}


def test_what_a_context_wraps_is_named_as_what_it_is() -> None:
    layer = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    found = texts_of("v", [layer, optimizer, schedule, torch.amp.GradScaler("cpu")])
    names = [name.partition("[")[0] for name in (name.removeprefix("v[") for name in found)]
    assert {name.partition("] ")[2] for name in names} == {
        unwrapped("module"),
        unwrapped("optimizer"),
        unwrapped("scheduler"),
        unwrapped("scaler"),
    }


def counter() -> Any:
    count = 0

    def next_one() -> int:
        nonlocal count
        count += 1
        return count

    return next_one


class Numbered:
    made = 0

    def next_one(self) -> int:
        Numbered.made += 1
        return Numbered.made


def numbers() -> Iterator[int]:
    number = 0
    while True:
        number += 1
        yield number


HELD: dict[str, tuple[Any, Callable[[Any], object]]] = {
    "closure": (counter(), lambda held: held()),
    "class": (Numbered, lambda held: held().next_one()),
    "method": (Held(0).add, lambda held: held()),
    "running generator": (numbers(), next),
    "iterator of a list": (iter([1, 2, 3]), next),
    "iterator of a data loader": (iter(torch.utils.data.DataLoader([1, 2, 3])), next),  # type: ignore[arg-type]
    "unwrapped module with a counter": (CountingModule(), lambda held: held.count()),
}


@pytest.mark.parametrize("kind", HELD)
def test_state_in_functions_classes_and_iterators_is_seen(kind: str) -> None:
    held, change = HELD[kind]
    before = texts_of("v", held)
    assert texts_of("v", held) == before
    change(held)
    assert texts_of("v", held) != before


class Lazy(Mapping[str, int]):
    """A mapping like that of a file, in which looking at the values would read the whole file."""

    def __getitem__(self, key: str) -> int:
        raise AssertionError

    def __iter__(self) -> Iterator[str]:
        raise AssertionError

    def __len__(self) -> int:
        raise AssertionError


def test_a_mapping_that_reads_its_values_from_elsewhere_is_not_read() -> None:
    assert texts_of("v", Lazy()) == {}


def test_objects_in_sets_and_as_keys_have_the_same_text_in_each_process() -> None:
    assert texts_of("v", {Holder(1)}) == texts_of("v", {Holder(1)})
    assert texts_of("v", {Holder(1): 2}) == texts_of("v", {Holder(1): 2})


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(9, device="meta"),
        torch.randn(9, dtype=torch.complex64).conj(),
        torch.randn(9).to(torch.float8_e4m3fn),
        torch.randn(3).to(torch.float8_e4m3fn),
        torch.zeros(9, dtype=torch.uint16),
        torch.zeros(0),
        torch.nested.nested_tensor([torch.zeros(3), torch.zeros(4)], layout=torch.jagged),
    ],
)
def test_a_tensor_of_any_kind_has_a_text(tensor: torch.Tensor) -> None:
    assert tensor_text(tensor) == tensor_text(tensor)


@pytest.mark.integration
@pytest.mark.parametrize("make", [np.zeros, torch.zeros])
def test_a_large_array_in_an_attribute_is_not_hashed_and_one_in_a_checkpoint_is(make: Callable[..., Any]) -> None:
    zeros, others = make(LARGEST_BYTES // 4 + 1), make(LARGEST_BYTES // 4 + 1)
    others[7] = 1
    assert some_texts_of("v", zeros) == some_texts_of("v", others)
    assert texts_of("v", zeros) != texts_of("v", others)


def test_a_sparse_tensor_has_a_text() -> None:
    sparse = torch.eye(8).to_sparse()
    assert tensor_text(sparse) == tensor_text(torch.eye(8))
    assert some_texts_of("v", {"it": sparse}) == {"v['it']": tensor_text(sparse)}


def test_an_object_in_a_key_of_several_values_has_the_same_text_in_each_process() -> None:
    assert texts_of("v", {(Holder(1), 2): 3}) == texts_of("v", {(Holder(1), 2): 3})
    assert texts_of("v", {(1, 2): 3}) != texts_of("v", {(1, 3): 3})
