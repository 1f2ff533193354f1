"""The statistical tests use fixed seeds, so that their results never change."""

from __future__ import annotations

import math
import random
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise, permutations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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
from hpc_det.pytorch.data.order import SORTED_UP_TO, Drawn, FeistelOrder, Numbers, Order, Records, epoch_order
from hpc_det.pytorch.samplers import ReproducibleShuffleSampler
from tests.facts import refused

LONG = SORTED_UP_TO + 3617
SEEDS = st.integers(0, 2**63)
EPOCHS = st.integers(0, 2**31)


def whole(order: Order, length: int) -> Numbers:
    return order[np.arange(length)]


def is_like_chance(counts: Numbers, expected: float) -> bool:
    """Return whether chi-squared is within six standard deviations of its mean.

    A square array contains counts of records at positions: each row and column adds up to the number of epochs.
    """
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    cells = len(counts) - 1
    if counts.ndim == 2:
        chi_squared *= cells / len(counts)
        cells *= cells
    return abs(chi_squared - cells) < 6 * math.sqrt(2 * cells)


# --- a permutation


@given(seed=SEEDS, epoch=EPOCHS, length=st.integers(0, 100))
def test_an_order_is_a_permutation(seed: int, epoch: int, length: int) -> None:
    assert sorted(whole(epoch_order(seed, epoch, length), length)) == list(range(length))


@given(start=SEEDS, length=st.integers(2, 400))
def test_the_cipher_is_one_of_any_length(start: int, length: int) -> None:
    assert sorted(whole(FeistelOrder(np.uint64(start), length), length)) == list(range(length))


@pytest.mark.parametrize(
    "length", [SORTED_UP_TO, SORTED_UP_TO + 1, 2**15 - 1, 2**15, 2**15 + 1, 2**16 - 1, 2**16, 2**16 + 1, 100_003]
)
def test_long_orders_are_permutations(length: int) -> None:
    assert np.array_equal(np.sort(whole(epoch_order(3, 5, length), length)), np.arange(length))


@pytest.mark.parametrize("length", [10**8, 2**40, 2**40 + 1, 2**62 - 1])
def test_orders_of_any_length_give_records_that_are_there_and_differ(length: int) -> None:
    positions = np.linspace(0, length - 1, 50_000, dtype=np.int64)
    records = epoch_order(3, 5, length)[positions]
    assert records.dtype == np.int64
    assert records.min() >= 0
    assert records.max() < length
    assert len(np.unique(records)) == len(np.unique(positions))


@pytest.mark.parametrize("length", [100, LONG])
def test_records_have_the_shape_of_the_positions(length: int) -> None:
    order = epoch_order(3, 5, length)
    positions = np.arange(60).reshape(3, 20)
    assert np.array_equal(order[positions], whole(order, 60).reshape(3, 20))


# --- a function of its arguments alone


@pytest.mark.integration
@given(seed=SEEDS, epoch=EPOCHS, length=st.sampled_from([50, LONG]))
def test_it_neither_reads_nor_moves_a_global_generator(seed: int, epoch: int, length: int) -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    before = whole(epoch_order(seed, epoch, length), length)
    drawn = random.random(), np.random.random(), torch.rand(())
    random.seed(2), np.random.seed(2), torch.manual_seed(2)
    assert np.array_equal(whole(epoch_order(seed, epoch, length), length), before)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    assert (random.random(), np.random.random(), torch.rand(())) == drawn


def test_it_is_the_same_with_every_version() -> None:
    assert whole(epoch_order(1, 2, 10), 10).tolist() == [0, 1, 5, 8, 7, 4, 3, 6, 2, 9]
    assert whole(epoch_order(1, 2, 10**8), 5).tolist() == [50462345, 66842787, 4496729, 71490669, 52687291]


def test_every_seed_and_epoch_has_its_own() -> None:
    orders = {tuple(whole(epoch_order(seed, epoch, 50), 50)) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400


# --- a good shuffle


@pytest.mark.parametrize("over", ["epochs", "seeds"])
def test_all_orders_of_four_records_are_equally_frequent(over: str) -> None:
    count = 24 * 200
    orders = [epoch_order(7, k, 4) if over == "epochs" else epoch_order(k, 7, 4) for k in range(count)]
    found = Counter(tuple(whole(order, 4).tolist()) for order in orders)
    assert found.keys() == set(permutations(range(4)))
    assert is_like_chance(np.array(list(found.values())), count / 24)


@pytest.mark.parametrize("length", [2, 3, 10, 33])
def test_every_record_comes_equally_often_at_every_position(length: int) -> None:
    epochs = 200 * length
    counts = np.zeros((length, length), dtype=np.int64)
    for epoch in range(epochs):
        counts[np.arange(length), whole(epoch_order(11, epoch, length), length)] += 1
    assert is_like_chance(counts, epochs / length)


@pytest.mark.integration
def test_the_cipher_puts_every_record_equally_often_at_every_position_too() -> None:
    length, epochs = 40, 8000
    counts = np.zeros((length, length), dtype=np.int64)
    for epoch in range(epochs):
        counts[np.arange(length), whole(FeistelOrder(np.uint64(epoch), length), length)] += 1
    assert is_like_chance(counts, epochs / length)


@pytest.mark.integration
def test_every_two_records_of_the_cipher_come_equally_often_after_each_other() -> None:
    length, epochs = 16, 8000
    counts = np.zeros((length, length), dtype=np.int64)
    for epoch in range(epochs):
        first, second = whole(FeistelOrder(np.uint64(epoch), length), length)[:2]
        counts[first, second] += 1
    assert not counts.diagonal().any()
    different = counts[~np.eye(length, dtype=bool)]
    assert is_like_chance(different, epochs / len(different))


def test_no_stretch_of_a_long_epoch_prefers_any_records() -> None:
    stretches = 50
    counts = np.zeros((stretches, stretches), dtype=np.int64)
    for epoch in range(20):
        order = whole(epoch_order(13, epoch, LONG), LONG)
        counts += np.histogram2d(np.arange(LONG), order, bins=stretches)[0].astype(np.int64)
    assert is_like_chance(counts, 20 * LONG / stretches**2)


@pytest.mark.parametrize("length", [5000, LONG])
def test_epochs_and_neighbours_are_uncorrelated(length: int) -> None:
    noise = 5 / math.sqrt(length)
    orders = [whole(epoch_order(17, epoch, length), length) for epoch in range(5)]
    for one, next_one in pairwise(orders):
        assert abs(np.corrcoef(one, next_one)[0, 1]) < noise
    for order in orders:
        assert abs(np.corrcoef(np.arange(length), order)[0, 1]) < noise
        assert all(abs(np.corrcoef(order[:-step], order[step:])[0, 1]) < noise for step in (1, 2, 32, 128))
        assert abs((order[1:] > order[:-1]).mean() - 0.5) < noise


def test_about_one_record_an_epoch_keeps_its_place() -> None:
    kept = [(whole(epoch_order(19, epoch, LONG), LONG) == np.arange(LONG)).sum() for epoch in range(200)]
    assert abs(np.mean(kept) - 1) < 5 / math.sqrt(200)


# --- at once, in no memory


def test_a_hundred_million_records_start_at_once_and_take_no_memory() -> None:
    positions = np.arange(57_000_000, 57_008_192)
    tracemalloc.start()
    try:
        begin = time.process_time()
        epoch_order(3, 5, 10**8)[positions]
        took_s = time.process_time() - begin
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert took_s < 0.1
    assert peak < 2 * 2**20


def epoch_of(items: Drawn | Records, epoch: int) -> list[Any]:
    (row,) = items.rows(epoch, np.arange(items.length(epoch))[None])
    return row


def drawn(sampler: Any, seed: int = 1) -> Drawn:
    return Drawn("records", sampler, seed)


class Noisy(Sampler[int]):
    """Draws from every global generator for each item, and keeps no state."""

    def __len__(self) -> int:
        return 30

    def __iter__(self) -> Iterator[int]:
        for _ in range(30):
            yield random.randrange(1000) + int(np.random.randint(1000)) + int(torch.randint(1000, ()))


class Counting(Sampler[int]):
    """Counts its complete iterations, and yields items that depend on the count."""

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
    with refused(UsageError, "Counting", "epoch 4", "epoch 2"):
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
