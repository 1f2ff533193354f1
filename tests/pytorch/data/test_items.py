from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from hpc_det.distributed.rng import seed_generators
from hpc_det.errors import UsageError
from hpc_det.pytorch.data.items import Drawn, Records
from hpc_det.pytorch.data.order import epoch_order
from hpc_det.pytorch.samplers import ReproducibleShuffleSampler


def epoch_of(items: Drawn | Records, epoch: int) -> list[Any]:
    (row,) = items.rows(epoch, np.arange(items.length(epoch))[None])
    return row


def drawn(sampler: Any, seed: int = 1) -> Drawn:
    return Drawn("records", sampler, seed)


class Noisy(Sampler[int]):
    """Draws from every global generator while it is iterated, a number at a time, and keeps nothing."""

    def __len__(self) -> int:
        return 30

    def __iter__(self) -> Iterator[int]:
        for _ in range(30):
            yield random.randrange(1000) + int(np.random.randint(1000)) + int(torch.randint(1000, ()))


class Counting(Sampler[int]):
    """Counts its iterations when they are over, and yields what the count says."""

    def __init__(self) -> None:
        self.iterations = 0

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[int]:
        yield from [self.iterations] * 3
        self.iterations += 1


# --- records


def test_records_come_in_their_own_order_or_shuffled() -> None:
    assert epoch_of(Records(5, None), 3) == [0, 1, 2, 3, 4]
    items = Records(50, seed=7)
    for epoch in (0, 1, 0):
        assert epoch_of(items, epoch) == epoch_order(7, epoch, 50)[np.arange(50)].tolist()


def test_records_come_in_rows_of_python_numbers() -> None:
    rows = Records(50, None).rows(0, np.array([[4, 5], [10, 11]]))
    assert rows == [[4, 5], [10, 11]]
    assert type(rows[0][0]) is int


# --- samplers


def random_samplers() -> list[Any]:
    return [
        RandomSampler(range(30)),
        RandomSampler(range(30), replacement=True, num_samples=30),
        WeightedRandomSampler([1.0] * 30, 30),
        SubsetRandomSampler(range(30)),
        BatchSampler(RandomSampler(range(30)), 4, drop_last=False),
        DistributedSampler(TensorDataset(torch.arange(30)), num_replicas=1, rank=0),
        Noisy(),
        RandomSampler(range(30), generator=torch.Generator().manual_seed(5)),
        ReproducibleShuffleSampler(range(30), 777),
    ]


@pytest.mark.parametrize("which", range(len(random_samplers())))
def test_a_sampler_is_a_function_of_seed_and_epoch(which: int) -> None:
    seed_generators(1)
    undisturbed = drawn(random_samplers()[which])
    epochs = [epoch_of(undisturbed, epoch) for epoch in range(4)]
    assert len({str(epoch) for epoch in epochs}) == 4
    seed_generators(2)
    for epoch in (3, 2, 0):
        assert epoch_of(drawn(random_samplers()[which]), epoch) == epochs[epoch]


@pytest.mark.parametrize("which", range(7))
def test_another_seed_gives_another_order(which: int) -> None:
    one, other = (epoch_of(drawn(random_samplers()[which], seed), 1) for seed in (1, 2))
    assert (one != other) == (not isinstance(random_samplers()[which], DistributedSampler))


@pytest.mark.parametrize("which", range(len(random_samplers())))
def test_the_global_generators_are_where_they_were(which: int) -> None:
    seed_generators(3)
    expected = random.random(), np.random.random(), torch.rand(())
    seed_generators(3)
    epoch_of(drawn(random_samplers()[which]), 2)
    assert (random.random(), np.random.random(), torch.rand(())) == expected


def test_the_state_that_a_sampler_keeps_comes_out_right() -> None:
    items = drawn(Counting())
    assert [epoch_of(items, epoch) for epoch in range(3)] == [[0] * 3, [1] * 3, [2] * 3]
    assert epoch_of(drawn(Counting()), 7) == [7] * 3


def test_epochs_that_were_only_measured_are_kept_until_a_later_one_is_looked_at() -> None:
    items = drawn(Counting())
    assert [items.length(epoch) for epoch in range(3)] == [3, 3, 3]
    assert [epoch_of(items, epoch) for epoch in range(3)] == [[0] * 3, [1] * 3, [2] * 3]
    assert [items.length(epoch) for epoch in range(3)] == [3, 3, 3]


def test_a_sampler_with_state_cannot_go_back() -> None:
    items = drawn(Counting())
    epoch_of(items, 4)
    with pytest.raises(UsageError, match=r"Counting has given the records of epoch 4 already .* back to epoch 2"):
        epoch_of(items, 2)


def test_a_sampler_without_state_can() -> None:
    sampler = WeightedRandomSampler([1.0] * 30, 30)
    items = drawn(sampler)
    first, _ = epoch_of(items, 0), epoch_of(items, 5)
    assert epoch_of(items, 0) == first


class WithEpochs(SequentialSampler):
    def __init__(self) -> None:
        super().__init__(range(3))
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter([self.epochs[-1]] * 3)


@pytest.mark.parametrize("wrap", [lambda sampler: sampler, lambda sampler: BatchSampler(sampler, 3, False)])
def test_set_epoch_is_called_on_the_sampler_or_inside_the_batch_sampler(wrap: Any) -> None:
    sampler = WithEpochs()
    items = drawn(wrap(sampler))
    found = epoch_of(items, 2), epoch_of(items, 3)
    assert found in [([2] * 3, [3] * 3), ([[2] * 3], [[3] * 3])]
    assert sampler.epochs == [0, 1, 2, 3]


class Endless(Sampler[int]):
    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1


def test_an_epoch_of_an_endless_sampler_is_as_long_as_it_says() -> None:
    assert epoch_of(drawn(Endless()), 1) == [0, 1, 2, 3]


class Growing(Sampler[int]):
    def __init__(self) -> None:
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return self._epoch + 1

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._epoch + 1))


def test_epochs_may_differ_in_length() -> None:
    items = drawn(Growing())
    assert [items.length(epoch) for epoch in (0, 1, 5)] == [1, 2, 6]


def test_keys_may_be_anything() -> None:
    keys = ["a", ("b", 1), 2.5, None]
    assert epoch_of(drawn(keys), 0) == keys
    assert epoch_of(drawn([True, False]), 0) == [True, False]


def test_numbers_are_kept_as_an_array() -> None:
    items = drawn(list(range(10)))
    assert items.rows(0, np.array([[4, 5], [8, 9]])) == [[4, 5], [8, 9]]
    assert isinstance(items._drawn[0], np.ndarray)
    assert type(epoch_of(items, 0)[0]) is int
