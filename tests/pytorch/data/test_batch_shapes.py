from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SubsetRandomSampler

from hpc_det.core.progress import Position
from hpc_det.errors import UsageError
from hpc_det.pytorch.data import DataLoader, training_data
from hpc_det.pytorch.data.batch_shapes import shape_of
from tests.facts import refused, unnamed
from tests.pytorch.data.gang import by_ranks
from tests.pytorch.data.test_data_loader import Records


def batch_sampler(length: int) -> BatchSampler:
    return BatchSampler(RandomSampler(range(length)), 3, drop_last=False)


LOADERS: dict[str, Any] = {
    "plain": lambda: DataLoader(Records(22), 3),
    "shuffled": lambda: DataLoader(Records(22), 3, shuffle=True),
    "drop_last": lambda: DataLoader(Records(22), 3, drop_last=True),
    "sampler": lambda: DataLoader(Records(30), 3, sampler=SubsetRandomSampler(range(22))),
    "batch_sampler": lambda: DataLoader(Records(22), batch_sampler=batch_sampler(22)),
    "own": lambda: [10, 20, 30, 40, 50],
    "own without a length": lambda: iter(range(1000)),
}

# --- ranks without a loader


@pytest.mark.parametrize("kind", LOADERS)
@given(done=st.integers(0, 20), per_batch=st.integers(1, 2))
@settings(max_examples=20)
def test_a_rank_that_loads_nothing_sees_the_same_epochs_and_batches(kind: str, done: int, per_batch: int) -> None:
    first, middle, last = by_ranks(
        training_data, LOADERS[kind](), None, LOADERS[kind](), parts=[0, 0, 0], per_batch=per_batch
    )
    assert middle.batches_per_epoch == first.batches_per_epoch == last.batches_per_epoch
    position = Position()
    for _ in range(done):
        assert middle.whole_batches(position) == first.whole_batches(position)
        assert middle.after(position) == first.after(position)
        position = first.after(position)


def test_the_ranks_of_a_slice_get_the_same_share_and_those_beside_them_the_others() -> None:
    ranks = by_ranks(training_data, *[DataLoader(Records(12), 2)] * 2, None, None, parts=[0, 1, 0, 1])
    shares = [[batch.tolist() for batch in islice(data.batches(Position()), 3)] for data in ranks[:2]]
    assert shares == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 11]]]
    ends = by_ranks(training_data, DataLoader(Records(12), 2), None, DataLoader(Records(12), 2), parts=[0, 0, 0])
    assert next(ends[0].batches(Position())).tolist() == next(ends[2].batches(Position())).tolist() == [0, 1]


def test_a_rank_that_loads_nothing_has_no_workers_and_can_be_closed() -> None:
    _, data = by_ranks(training_data, DataLoader(Records(12), num_workers=1), None, parts=[0, 0])
    assert not data.loads_in_workers
    data.close()


@pytest.mark.parametrize("kind", LOADERS)
def test_a_rank_that_loads_nothing_has_no_batch(kind: str) -> None:
    _, data = by_ranks(training_data, LOADERS[kind](), None, parts=[0, 0])
    with refused(UsageError, "build_training_data_loader", "None"):
        next(data.batches(Position()))


class Shrinking(Sampler[int]):
    """From the second epoch on, it yields one record less than its len()."""

    epoch = 0

    def __len__(self) -> int:
        return 10

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(10 - (self.epoch > 0)))


def test_a_sampler_whose_epochs_nobody_can_foresee_is_refused_where_ranks_load_nothing() -> None:
    def made() -> DataLoader:
        return DataLoader(Records(10), 2, sampler=Shrinking())

    (alone,) = by_ranks(training_data, made())
    assert alone.after(Position(1, 8)) == Position(2)
    loading, _ = by_ranks(training_data, made(), None, parts=[0, 0])
    assert loading.after(Position(0, 8)) == Position(1)
    with refused(UsageError, "DataLoader: ", "9 records", "epoch 1", "len()", 10):
        loading.after(Position(1))


# --- ranks that do not go together


@pytest.mark.parametrize(
    ("loaders", "parts", "facts"),
    [
        ([None, None], [0, 0], ["None"]),
        (
            [DataLoader(Records(9)), None, None],
            [0, 1, 2],
            ["None", "data-parallel rank 1, 2"],
        ),
        (
            [None, DataLoader(Records(9)), DataLoader(Records(8), 2, drop_last=True)],
            [0, 0, 0],
            [
                "rank 1",
                "9 records with batch_size=1 and drop_last=False",
                "rank 2",
                "8 records with batch_size=2 and drop_last=True",
            ],
        ),
        (
            [DataLoader(Records(9), batch_sampler=batch_sampler(9)), [1, 2]],
            [0, 1],
            ["rank 0", "3 batches", "rank 1", "2 batches of its own loader"],
        ),
        (
            [DataLoader(Records(9)), iter([1, 2])],
            [0, 1],
            ["rank 0", "rank 1", "batches of its own loader"],
        ),
    ],
)
def test_loaders_that_do_not_go_together_are_refused(loaders: list[Any], parts: list[int], facts: list[str]) -> None:
    with refused(UsageError, "build_training_data_loader: ", *facts):
        by_ranks(training_data, *loaders, parts=parts)


def test_every_problem_is_told_at_once() -> None:
    with refused(UsageError, "data-parallel rank 2", "9 records", "rank 1", "8 records"):
        by_ranks(training_data, DataLoader(Records(9)), DataLoader(Records(8)), None, parts=[0, 1, 2])


def test_the_shortest_loader_of_the_users_own_ends_the_epoch_also_where_others_do_not_say() -> None:
    ranks = by_ranks(training_data, [1, 2, 3], iter([1]), [1, 2], None, parts=[0, 1, 2, 2])
    assert [data.batches_per_epoch for data in ranks] == [2, 2, 2, 2]


def test_a_hundred_million_records_are_no_more_to_tell_than_ten() -> None:
    shape = shape_of(DataLoader(Records(10**8), 32, shuffle=True))
    assert unnamed(str(shape), "100000000 records", "batch_size=32", "drop_last=False") == []
    _, data = by_ranks(training_data, *[DataLoader(Records(10**8), 32), None], parts=[0, 0])
    assert data.after(Position(3, 64), 2) == Position(3, 128)


# --- micro batches of one size


def test_micro_batches_of_one_size_need_epochs_that_come_out_even_or_drop_last() -> None:
    with refused(UsageError, "build_training_data_loader: ", "22 records", 3, "2 slots", 4, "drop_last=True"):
        by_ranks(training_data, *[DataLoader(Records(22), 3)] * 2, same_size=True)


@given(
    done=st.integers(0, 23),
    size=st.integers(1, 3),
    batch_size=st.integers(1, 4),
    drop_last=st.booleans(),
    sampled=st.booleans(),
)
@settings(max_examples=60)
def test_micro_batches_of_one_size_stay_so_after_a_resume_on_other_ranks(
    done: int, size: int, batch_size: int, drop_last: bool, sampled: bool
) -> None:
    made = DataLoader(Records(24), batch_size, drop_last=drop_last)
    if sampled:
        made = DataLoader(Records(24), batch_sampler=BatchSampler(range(24), batch_size, drop_last=True))
        done //= batch_size
    if not drop_last and 24 % (batch_size * size):
        return
    for data in by_ranks(training_data, *[made] * size, same_size=True):
        for batch in islice(data.batches(Position(1, min(done, 24 // batch_size - 1) if sampled else done)), 30):
            assert len(batch) == batch_size


def test_a_batch_sampler_of_several_sizes_is_refused_when_it_gives_them() -> None:
    (data,) = by_ranks(training_data, DataLoader(Records(8), batch_sampler=[[0, 1], [2], [3, 4]]), same_size=True)
    with refused(UsageError, "batch sampler", "of 2", "of 1", "drop_last=True"):
        list(islice(data.batches(Position()), 3))
