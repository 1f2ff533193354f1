from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, Dataset, Sampler, SequentialSampler

from hpc_det.core.progress import Position
from hpc_det.pytorch import samplers
from hpc_det.pytorch.data import training_data
from tests.facts import refused

RANGE_10_BY_2 = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


def batches(records: int) -> BatchSampler:
    return BatchSampler(range(records), batch_size=2, drop_last=False)


# --- upstream's golden values


def test_repeat_begins_anew_without_end() -> None:
    repeated = samplers.RepeatSampler(range(3))
    assert list(islice(repeated, 8)) == [0, 1, 2, 0, 1, 2, 0, 1]
    assert len(repeated) == 3
    of_batches = samplers.RepeatBatchSampler(batches(10))
    assert list(islice(of_batches, 7)) == [*RANGE_10_BY_2, [0, 1], [2, 3]]
    assert len(of_batches) == 5


def test_a_batch_sampler_is_repeated_then_sharded_then_skipped() -> None:
    assert samplers.adapt_batch_sampler(own := batches(10)) is own
    adapted = samplers.adapt_batch_sampler(batches(10), repeat=True, skip=1, num_replicas=2, rank=1)
    assert list(islice(adapted, 3)) == [[6, 7], [0, 1], [4, 5]]


def test_to_repeat_nothing_gives_nothing() -> None:
    assert list(samplers.RepeatSampler([])) == []


def test_each_rank_takes_every_so_manieth() -> None:
    shares = [samplers.DistributedSampler(range(19), num_workers=4, rank=rank) for rank in range(4)]
    expected = [[0, 4, 8, 12, 16], [1, 5, 9, 13, 17], [2, 6, 10, 14, 18], [3, 7, 11, 15]]
    assert [list(share) for share in shares] == expected
    assert [len(share) for share in shares] == [5, 5, 5, 4]


def test_each_rank_takes_every_so_manieth_batch() -> None:
    shares = [samplers.DistributedBatchSampler(batches(19), num_workers=4, rank=rank) for rank in range(4)]
    assert [list(share) for share in shares] == [
        [[0, 1], [8, 9], [16, 17]],
        [[2, 3], [10, 11], [18]],
        [[4, 5], [12, 13]],
        [[6, 7], [14, 15]],
    ]
    assert [len(share) for share in shares] == [3, 3, 2, 2]


def test_the_shuffle_is_upstreams_and_another_one_each_time() -> None:
    shuffled = samplers.ReproducibleShuffleSampler(range(5), 777)
    assert [list(shuffled), list(shuffled)] == [[0, 4, 1, 2, 3], [2, 0, 1, 3, 4]]
    assert len(shuffled) == 5


def test_the_shuffle_of_batches_is_upstreams_and_another_one_each_time() -> None:
    shuffled = samplers.ReproducibleShuffleBatchSampler(batches(10), 777)
    assert list(shuffled) == [[0, 1], [8, 9], [2, 3], [4, 5], [6, 7]]
    assert list(shuffled) == [[4, 5], [0, 1], [2, 3], [6, 7], [8, 9]]
    assert len(shuffled) == 5


@given(length=st.integers(0, 200), seed=st.integers(0, 2**32 - 1))
def test_the_shuffle_is_the_one_of_numpy_on_a_list(length: int, seed: int) -> None:
    expected, generator = [], np.random.RandomState(seed)
    for _ in range(3):
        order = list(range(length))
        generator.shuffle(order)
        expected.append(order)
    shuffled = samplers.ReproducibleShuffleSampler(range(length), seed)
    assert [list(shuffled) for _ in range(3)] == expected


@pytest.mark.parametrize("skip", [0, 2, 4, 5, 6, 1000])
def test_skip_leaves_out_the_first_each_time(skip: int) -> None:
    skipping = samplers.SkipSampler(range(5), skip)
    of_batches = samplers.SkipBatchSampler(batches(10), skip)
    for _ in range(2):
        assert list(skipping) == list(range(5))[skip:]
        assert list(of_batches) == RANGE_10_BY_2[skip:]
    assert (len(skipping), len(of_batches)) == (5, 5)


# --- bad arguments


@pytest.mark.parametrize(
    ("num_workers", "rank", "facts"),
    [
        (0, 0, ["num_workers", 0, 1]),
        (-1, 0, ["num_workers", -1]),
        (3, 3, ["rank is 3", "num_workers 3"]),
        (3, -1, ["rank is -1", "num_workers 3"]),
    ],
)
@pytest.mark.parametrize("sampler", [samplers.DistributedSampler, samplers.DistributedBatchSampler])
def test_a_rank_that_cannot_be_is_refused(sampler: Any, num_workers: int, rank: int, facts: list[object]) -> None:
    with refused(ValueError, *facts):
        sampler(batches(4), num_workers=num_workers, rank=rank)


def test_keyword_arguments_have_upstreams_names() -> None:
    for batch_sampler in (
        samplers.RepeatBatchSampler(batch_sampler=batches(4)),
        samplers.DistributedBatchSampler(batch_sampler=batches(4), num_workers=1, rank=0),
        samplers.SkipBatchSampler(batch_sampler=batches(4), skip=0),
        samplers.ReproducibleShuffleBatchSampler(batch_sampler=batches(4), seed=1),
    ):
        assert isinstance(batch_sampler, Sampler)
        assert next(iter(batch_sampler)) in ([0, 1], [2, 3])
    for sampler in (
        samplers.RepeatSampler(sampler=range(4)),
        samplers.DistributedSampler(sampler=range(4), num_workers=1, rank=0),
        samplers.SkipSampler(sampler=range(4), skip=0),
        samplers.ReproducibleShuffleSampler(sampler=range(4), seed=1),
    ):
        assert isinstance(sampler, Sampler)
        assert next(iter(sampler)) in range(4)


# --- the guide's recipe


class Squares(Dataset[int]):
    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> int:
        return index * index


def make_batch_sampler(
    sampler_or_dataset: Any,
    mode: str,  # mode="training" or mode="validation"
    shuffle_seed: int,
    num_workers: int,
    rank: int,
    batch_size: int,
    skip: int,
) -> Any:
    """Copied from the PyTorch API guide, "Customize a Reproducible Dataset"."""
    if isinstance(sampler_or_dataset, torch.utils.data.Sampler):
        sampler = sampler_or_dataset
    else:
        # Create a SequentialSampler if we started with a Dataset.
        sampler = torch.utils.data.SequentialSampler(sampler_or_dataset)

    if mode == "training":
        # Shuffle first.
        sampler = samplers.ReproducibleShuffleSampler(sampler, shuffle_seed)

        # Repeat when training.
        sampler = samplers.RepeatSampler(sampler)

    # Always shard, and not before a repeat.
    sampler = samplers.DistributedSampler(sampler, num_workers=num_workers, rank=rank)

    # Batch before skip, because Determined counts batches, not records.
    batch_sampler: Any = torch.utils.data.BatchSampler(sampler, batch_size, drop_last=False)

    if mode == "training":
        # Skip when training, and always last.
        batch_sampler = samplers.SkipBatchSampler(batch_sampler, skip)

    return batch_sampler


def recipe(mode: str, num_workers: int, rank: int, skip: int = 0) -> torch.utils.data.DataLoader[Any]:
    batch_sampler = make_batch_sampler(SequentialSampler(Squares()), mode, 777, num_workers, rank, 2, skip)
    return torch.utils.data.DataLoader(Squares(), batch_sampler=batch_sampler)


def trained(ranks: int, skip: int, count: int) -> list[list[list[int]]]:
    """Return the records by global batch and rank."""

    def of_rank(rank: int) -> Iterator[Any]:
        data = training_data(recipe("training", ranks, rank, skip), rank=rank, size=ranks, seed=0)
        return islice(data.batches(Position(done=skip)), count)

    return [[part.tolist() for part in batch] for batch in zip(*map(of_rank, range(ranks)), strict=True)]


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_guides_recipe_trains_every_record_once_an_epoch(ranks: int) -> None:
    batches = trained(ranks, skip=0, count=33 // ranks)
    records = [part[place] for batch in batches for place in range(2) for part in batch]
    assert len(records) == 66, "three epochs of 22 records"
    epochs = [records[:22], records[22:44], records[44:]]
    for epoch in epochs:
        assert sorted(epoch) == [number * number for number in range(22)]
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("skip", [1, 4, 13])
def test_the_guides_recipe_goes_on_where_it_stopped(ranks: int, skip: int) -> None:
    assert trained(ranks, skip, count=10) == trained(ranks, skip=0, count=skip + 10)[skip:]


@pytest.mark.parametrize(("ranks", "batches"), [(1, 11), (3, 4)])
def test_the_guides_recipe_counts_its_epochs(ranks: int, batches: int) -> None:
    data = training_data(recipe("training", ranks, 0), rank=0, size=ranks, seed=0)
    assert data.batches_per_epoch == batches
    assert data.after(Position(2, batches - 1)) == Position(3)


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_guides_recipe_validates_every_record_once(ranks: int) -> None:
    shares = [recipe("validation", ranks, rank) for rank in range(ranks)]
    assert sorted(int(record) for share in shares for batch in share for record in batch) == [
        number * number for number in range(22)
    ]
