from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from hpc_det.core.progress import Position
from hpc_det.distributed.rng import seed_generators
from hpc_det.errors import UsageError
from hpc_det.pytorch.data import DataLoader, training_data
from tests.facts import refused


class Records(Dataset[Any]):
    """Each record is its index."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return index


def numbers(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


# --- its arguments


def test_its_arguments_are_torchs_in_torchs_order() -> None:
    ours = list(inspect.signature(DataLoader).parameters.values())
    torchs = inspect.signature(torch.utils.data.DataLoader).parameters
    assert [parameter.name for parameter in ours] == list(torchs)[: len(ours)]
    assert [parameter.kind for parameter in ours] == [torchs[parameter.name].kind for parameter in ours]


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


OUT = "context.experimental.disable_dataset_reproducibility_checks()"


def test_an_iterable_dataset_is_refused_with_the_way_out() -> None:
    with refused(UsageError, "IterableDataset", OUT):
        DataLoader(Endless())


def test_no_batch_size_is_refused_with_the_way_out() -> None:
    with refused(UsageError, "batch_size is None", OUT):
        DataLoader(Records(3), batch_size=None)


SEQUENTIAL = SequentialSampler(range(3))
BATCHES = BatchSampler(SEQUENTIAL, 2, drop_last=False)


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        ({"batch_size": 0}, ["batch_size is 0", 1]),
        ({"sampler": SEQUENTIAL, "shuffle": True}, ["sampler", "shuffle=True"]),
        ({"batch_sampler": BATCHES, "batch_size": 2}, ["batch_sampler", "batch_size=2"]),
        ({"batch_sampler": BATCHES, "shuffle": True}, ["batch_sampler", "shuffle=True"]),
        ({"batch_sampler": BATCHES, "sampler": SEQUENTIAL}, ["batch_sampler", "sampler"]),
        (
            {"batch_sampler": BATCHES, "drop_last": True, "batch_size": 3},
            ["batch_sampler", "batch_size=3", "drop_last=True"],
        ),
        (
            {"sampler": DistributedSampler(Records(8), num_replicas=2, rank=0)},
            ["sampler", "2 ranks"],
        ),
        ({"num_workers": -1}, ["num_workers option"]),
        ({"prefetch_factor": 2}, ["prefetch_factor option"]),
        ({"persistent_workers": True}, ["persistent_workers option", "num_workers > 0"]),
        ({"timeout": -1, "num_workers": 1}, ["timeout option"]),
        ({"multiprocessing_context": "no such", "num_workers": 1}, ["multiprocessing_context option"]),
    ],
)
def test_arguments_that_exclude_each_other_are_refused(arguments: dict[str, Any], facts: list[object]) -> None:
    with refused(UsageError, "DataLoader: ", *facts):
        DataLoader(Records(3), **arguments)


def test_all_problems_come_at_once() -> None:
    with pytest.raises(UsageError) as refused:
        DataLoader(Records(3), batch_size=0, shuffle=True, sampler=SEQUENTIAL)
    assert len(refused.value.problems) == 2


class WithoutLength:
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"dataset": WithoutLength()}, "WithoutLength"),
        ({"dataset": Records(3), "sampler": itertools.count()}, "count"),
        ({"dataset": Records(3), "batch_sampler": itertools.repeat([1])}, "repeat"),
    ],
)
def test_what_has_no_length_is_refused(arguments: dict[str, Any], name: str) -> None:
    loader = DataLoader(**arguments)
    with refused(UsageError, "DataLoader: ", name, "len()", "__len__"):
        training_data(loader, rank=0, size=1, seed=0)


def test_a_dataset_needs_no_length_with_a_sampler() -> None:
    loader = DataLoader(WithoutLength(), sampler=[2, 1])  # type: ignore[arg-type]
    assert numbers(islice(training_data(loader, rank=0, size=1, seed=0).batches(Position()), 2)) == [[2], [1]]


@pytest.mark.integration
def test_a_timeout_counts_with_workers_only() -> None:
    assert numbers(DataLoader(Records(2), timeout=60)) == [[0], [1]]
    assert numbers(DataLoader(Records(2), timeout=60, num_workers=1)) == [[0], [1]]


@pytest.mark.parametrize(
    ("pin_memory", "gpu", "pinned"),
    [(None, True, True), (None, False, False), (True, True, True), (True, False, False), (False, True, False)],
)
def test_memory_is_pinned_where_there_is_a_gpu(
    pin_memory: bool | None, gpu: bool, pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    loader = DataLoader(Records(2), pin_memory=pin_memory)
    assert loader.get_data_loader().pin_memory == pinned


# --- by itself


@pytest.mark.parametrize(
    ("length", "batch_size", "drop_last", "expected"),
    [(10, 5, False, 2), (11, 5, False, 3), (11, 5, True, 2), (3, 5, False, 1), (0, 5, False, 0)],
)
def test_its_length_is_in_batches(length: int, batch_size: int, drop_last: bool, expected: int) -> None:
    assert len(DataLoader(TensorDataset(torch.arange(length)), batch_size=batch_size, drop_last=drop_last)) == expected


def test_its_length_is_that_of_the_samplers() -> None:
    assert len(DataLoader(Records(10), batch_size=2, sampler=[1, 2, 3])) == 2
    assert len(DataLoader(Records(10), batch_sampler=[[1, 2], [3]])) == 2


@pytest.mark.integration
@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_size": 3},
        {"batch_size": 3, "shuffle": True},
        {"batch_size": 3, "drop_last": True},
        {"batch_size": 3, "sampler": RandomSampler(range(11))},
        {"batch_sampler": BatchSampler(RandomSampler(range(11)), 3, drop_last=True)},
        {"num_workers": 1, "collate_fn": torch.tensor},
        {"num_workers": 1, "persistent_workers": True, "shuffle": True},
    ],
)
def test_a_pass_over_it_is_torchs(arguments: dict[str, Any]) -> None:
    seed_generators(1)
    loader = torch.utils.data.DataLoader(Records(11), **arguments)
    expected = [numbers(loader), numbers(loader)]
    seed_generators(1)
    ours = DataLoader(Records(11), **arguments)
    assert [numbers(ours), numbers(ours)] == expected


def test_its_generator_is_for_that() -> None:
    def shuffled() -> list[list[int]]:
        return numbers(DataLoader(Records(30), shuffle=True, generator=torch.Generator().manual_seed(5)))

    assert shuffled() == shuffled()


# --- get_data_loader


@given(
    length=st.integers(1, 30),
    batch_size=st.integers(1, 4),
    ranks=st.integers(1, 4),
    skip=st.integers(0, 3),
    shuffle=st.booleans(),
)
@settings(max_examples=50)
def test_without_repeat_ranks_take_batches_in_turn(
    length: int, batch_size: int, ranks: int, skip: int, shuffle: bool
) -> None:
    loader = DataLoader(Records(length), batch_size, shuffle)
    whole = numbers(loader.get_data_loader(seed=3))
    assert sorted(record for batch in whole for record in batch) == list(range(length))
    for rank in range(ranks):
        part = loader.get_data_loader(skip=skip, num_replicas=ranks, rank=rank, seed=3)
        expected = whole[rank + skip * ranks :: ranks]
        assert numbers(part) == expected
        assert len(part) == len(expected)


@given(
    batch_size=st.integers(1, 4),
    ranks=st.integers(1, 3),
    skip=st.integers(0, 30),
    rank=st.integers(0, 2),
    sampler=st.booleans(),
)
@settings(max_examples=50)
def test_with_repeat_it_is_the_training_after_the_skipped_global_batches(
    batch_size: int, ranks: int, skip: int, rank: int, sampler: bool
) -> None:
    rank %= ranks
    order = RandomSampler(range(23)) if sampler else None
    loader = DataLoader(Records(23), batch_size, shuffle=not sampler, sampler=order)
    training = training_data(loader, rank=rank, size=ranks, seed=3).batches(Position())
    part = loader.get_data_loader(repeat=True, skip=skip, num_replicas=ranks, rank=rank, seed=3)
    assert numbers(islice(part, 10)) == numbers(islice(training, skip, skip + 10))


def test_with_repeat_its_length_is_one_epoch() -> None:
    assert len(DataLoader(Records(23), 2).get_data_loader(repeat=True, num_replicas=3)) == 4
