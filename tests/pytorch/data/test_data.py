from __future__ import annotations

import os
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, Dataset, RandomSampler, Sampler, TensorDataset, WeightedRandomSampler

from hpc_det.core.progress import Position
from hpc_det.distributed.rng import seed_generators
from hpc_det.errors import UsageError
from hpc_det.pytorch.data import DataLoader, TrainingData, training_data, validation_data
from hpc_det.pytorch.data.order import epoch_order
from hpc_det.pytorch.samplers import ReproducibleShuffleBatchSampler, ReproducibleShuffleSampler
from tests.facts import refused
from tests.pytorch.data.test_data_loader import Records

SIZES = st.integers(1, 5)
SEEDS = st.integers(0, 2**31)

Batch = list[int]
Make = Callable[[int, int], DataLoader]
"""Creates a loader from a number of records and a batch size, as the trial does in every attempt."""


class Stateful(Sampler[int]):
    """The order depends on the number of its complete iterations and on the numbers that they drew."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._state = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        begin = (self._state + random.randrange(100)) % self._length
        yield from [(begin + number) % self._length for number in range(self._length)]
        self._state += 1 + int(np.random.randint(3)) + int(torch.randint(3, ()))


KINDS: dict[str, Make] = {
    "plain": lambda length, batch: DataLoader(Records(length), batch),
    "shuffled": lambda length, batch: DataLoader(Records(length), batch, shuffle=True),
    "RandomSampler": lambda length, batch: DataLoader(Records(length), batch, sampler=RandomSampler(range(length))),
    "own generator": lambda length, batch: DataLoader(
        Records(length),
        batch,
        sampler=RandomSampler(range(length), generator=torch.Generator().manual_seed(4)),
    ),
    "ReproducibleShuffleSampler": lambda length, batch: DataLoader(
        Records(length), batch, sampler=ReproducibleShuffleSampler(range(length), 777)
    ),
    "stateful": lambda length, batch: DataLoader(Records(length), batch, sampler=Stateful(length)),
}
BATCH_SAMPLERS: dict[str, Make] = {
    "BatchSampler": lambda length, batch: DataLoader(
        Records(length), batch_sampler=BatchSampler(RandomSampler(range(length)), batch, drop_last=False)
    ),
    "ReproducibleShuffleBatchSampler": lambda length, batch: DataLoader(
        Records(length),
        batch_sampler=ReproducibleShuffleBatchSampler(BatchSampler(Stateful(length), batch, drop_last=False), 7),
    ),
}


def gang(loader: Callable[[], DataLoader], size: int, seed: int) -> list[TrainingData]:
    return [training_data(loader(), rank=rank, size=size, seed=seed) for rank in range(size)]


def batches(ranks: list[TrainingData], position: Position, count: int) -> tuple[Position, list[list[Batch]]]:
    """Return the next global batches, each split by rank, and the position after them."""
    parts = [[batch.tolist() for batch in islice(data.batches(position), count)] for data in ranks]
    for _ in range(count):
        position = ranks[0].after(position)
    return position, [list(batch) for batch in zip(*parts, strict=True)]


def records(found: list[list[Batch]]) -> list[int]:
    return [record for batch in found for part in batch for record in part]


def undisturbed_records(kind: str, length: int, seed: int) -> Iterator[int]:
    """Yield the records in the order of a single rank that never stops, epoch after epoch."""
    (rank,) = gang(lambda: KINDS[kind](length, length), 1, seed)
    for epoch in rank.batches(Position()):
        yield from epoch.tolist()


# --- every record once


@pytest.mark.integration
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), length=st.integers(5, 40), seed=SEEDS)
@settings(max_examples=30)
def test_over_resumes_on_changing_slots_nothing_comes_twice_and_nothing_is_left_out(
    kind: str, data: st.DataObject, length: int, seed: int
) -> None:
    undisturbed = undisturbed_records(kind, length, seed)
    position, count = Position(), 0
    for _ in range(data.draw(st.integers(1, 4))):
        batch_size = data.draw(st.integers(1, 6))
        ranks = gang(lambda size=batch_size: KINDS[kind](length, size), data.draw(SIZES), seed)  # type: ignore[misc]
        position, found = batches(ranks, position, data.draw(st.integers(0, 12)))
        assert all(part for batch in found for part in batch), "no rank is without records"
        new = records(found)
        assert new == list(islice(undisturbed, len(new)))
        count += len(new)
        assert (position.epoch, position.done) == divmod(count, length)


@given(data=st.data(), length=st.integers(5, 40), seed=SEEDS)
@settings(max_examples=30)
def test_with_drop_last_batches_are_full_and_epochs_end_with_the_last_full_one(
    data: st.DataObject, length: int, seed: int
) -> None:
    position, seen = Position(), dict[int, list[int]]()
    for _ in range(data.draw(st.integers(1, 4))):
        batch_size, size = data.draw(st.integers(1, 6)), data.draw(SIZES)
        assume(batch_size * size <= length)
        ranks = gang(lambda: DataLoader(Records(length), batch_size, True, drop_last=True), size, seed)  # noqa: B023
        for _ in range(data.draw(st.integers(0, 8))):
            before = position
            position, (batch,) = batches(ranks, before, 1)
            assert {len(part) for part in batch} == {batch_size}
            new = seen.setdefault(before.epoch, [])
            new += records([batch])[: length - before.done]
            assert new == epoch_order(seed, before.epoch, length)[np.arange(len(new))].tolist()
            ended = length - len(new) < batch_size * size
            assert (position.epoch > before.epoch) == ended
            if ended and position.done:  # a resume inside the epoch has filled up its last batch
                seen[position.epoch] = records([batch])[length - before.done :]


@pytest.mark.integration
@pytest.mark.parametrize("kind", BATCH_SAMPLERS)
@given(data=st.data(), length=st.integers(5, 40), batch_size=st.integers(1, 6), seed=SEEDS)
@settings(max_examples=30)
def test_batches_of_a_batch_sampler_go_to_one_rank_each_over_resumes_on_changing_slots(
    kind: str, data: st.DataObject, length: int, batch_size: int, seed: int
) -> None:
    def make() -> DataLoader:
        return BATCH_SAMPLERS[kind](length, batch_size)

    per_epoch = len(make())
    _, undisturbed = batches(gang(make, 1, seed), Position(), 60)
    position, stream = Position(), list[Batch]()
    for _ in range(data.draw(st.integers(1, 4))):
        size = data.draw(st.integers(1, min(5, per_epoch)))
        ranks = gang(make, size, seed)
        assert ranks[0].batches_per_epoch == -(-per_epoch // size)
        position, found = batches(ranks, position, data.draw(st.integers(0, 3)))
        stream += [part for batch in found for part in batch]
        assert [[part] for part in stream] == undisturbed[: len(stream)]
        assert (position.epoch, position.done) == divmod(len(stream), per_epoch)


# --- resumes on the same ranks


@pytest.mark.parametrize("kind", [*KINDS, *BATCH_SAMPLERS])
@given(done=st.integers(0, 20), size=st.integers(1, 3), seed=SEEDS)
@settings(max_examples=20)
def test_a_resume_at_any_batch_goes_on_with_the_same_batches(kind: str, done: int, size: int, seed: int) -> None:
    def ranks() -> list[TrainingData]:
        return gang(lambda: {**KINDS, **BATCH_SAMPLERS}[kind](23, 2), size, seed)

    _, undisturbed = batches(ranks(), Position(), done + 10)
    position, _ = batches(ranks(), Position(), done)
    assert batches(ranks(), position, 10)[1] == undisturbed[done:]


class Augmented(Dataset[Any]):
    """Draws from every global generator for each record."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, random.random(), float(np.random.random()), float(torch.rand((), dtype=torch.float64))


def noisy_collate(batch: list[Any]) -> torch.Tensor:
    noise = (random.random(), float(np.random.random()), float(torch.rand((), dtype=torch.float64)))
    return torch.tensor([*batch, (-1, *noise)], dtype=torch.float64)


def augmented(rank: int = 0, size: int = 2, workers: int = 2, seed: int = 5, **options: Any) -> TrainingData:
    loader = DataLoader(Augmented(), 3, shuffle=True, num_workers=workers, collate_fn=noisy_collate, **options)
    return training_data(loader, rank=rank, size=size, seed=seed)


def taken(data: TrainingData, position: Position, count: int) -> list[Any]:
    found = [batch.tolist() for batch in islice(data.batches(position), count)]
    data.close()
    return found


def moved(data: TrainingData, count: int) -> Position:
    position = Position()
    for _ in range(count):
        position = data.after(position)
    return position


@pytest.mark.integration
@pytest.mark.parametrize("done", [1, 3, 4, 6, *(pytest.param(done, marks=pytest.mark.long) for done in (2, 5, 7, 8))])
def test_augmentation_in_workers_is_exact_after_a_resume_at_any_batch(done: int) -> None:
    undisturbed = taken(augmented(), Position(), done + 4)
    assert taken(augmented(), moved(augmented(), done), 4) == undisturbed[done:]


@pytest.mark.integration
def test_the_loader_that_upstreams_callers_get_augments_as_training_does() -> None:
    loader = DataLoader(Augmented(), 3, num_workers=1, collate_fn=noisy_collate)
    part = loader.get_data_loader(repeat=True, skip=2, num_replicas=2, rank=1, seed=5)
    found = [batch.tolist() for batch in islice(part, 6)]
    assert found == taken(training_data(loader, rank=1, size=2, seed=5), Position(), 8)[2:]


@pytest.mark.integration
def test_augmentation_does_not_depend_on_the_number_of_workers_or_what_they_prefetch() -> None:
    undisturbed = taken(augmented(workers=2), Position(), 9)
    assert taken(augmented(workers=1), Position(), 9) == undisturbed
    assert taken(augmented(workers=2, prefetch_factor=5, persistent_workers=True), Position(), 9) == undisturbed


@pytest.mark.integration
def test_augmentation_is_another_one_for_every_rank_batch_epoch_and_seed() -> None:
    found = [taken(augmented(rank, seed=seed), Position(), 9) for rank in range(2) for seed in (5, 6)]
    noise = [tuple(record[1:]) for batches in found for batch in batches for record in batch]
    assert len(set(noise)) == len(noise)


def test_without_workers_the_generators_of_the_rank_are_used_and_nothing_is_seeded() -> None:
    seed_generators(1)
    batch = next(augmented(workers=0).batches(Position())).tolist()
    following = random.random()
    seed_generators(1)
    assert [record[1] for record in batch] == [random.random() for _ in batch]
    assert following == random.random()


@pytest.mark.integration
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["shuffle", "sampler", "batch_sampler"])
def test_making_iterators_and_drawing_orders_moves_no_global_generator(workers: int, kind: str) -> None:
    order: dict[str, Any] = {
        "shuffle": True,
        "sampler": WeightedRandomSampler([1.0] * 22, 22),
        "batch_sampler": BatchSampler(RandomSampler(range(22)), 3, False),
    }
    loader = DataLoader(Records(22), num_workers=workers, **{kind: order[kind]})
    seed_generators(1)
    expected = random.random(), np.random.random(), torch.rand(())
    seed_generators(1)
    training = training_data(loader, rank=1, size=2, seed=1)
    validation = validation_data(loader, rank=1, size=2, seed=1)
    iterators = training.batches(Position(2)), validation.batches(), iter(validation.whole())
    assert all(len(next(iterator)) for iterator in iterators)
    assert (random.random(), np.random.random(), torch.rand(())) == expected
    training.close()
    validation.close()


# --- validation


@given(
    length=st.integers(1, 40),
    batch_size=st.integers(1, 6),
    size=SIZES,
    drop_last=st.booleans(),
    shuffle=st.booleans(),
)
@settings(max_examples=50)
def test_validation_has_each_record_once_over_all_ranks(
    length: int, batch_size: int, size: int, drop_last: bool, shuffle: bool
) -> None:
    loader = DataLoader(TensorDataset(torch.arange(length)), batch_size, shuffle, drop_last=drop_last)
    ranks = [validation_data(loader, rank=rank, size=size, seed=3) for rank in range(size)]
    shares = [[batch.tolist() for (batch,) in data.batches()] for data in ranks]
    whole = [batch.tolist() for (batch,) in ranks[0].whole()]
    assert sorted(record for batch in whole for record in batch) == list(range(length))
    assert shares == [whole[rank::size] for rank in range(size)]
    assert shares == [[batch.tolist() for (batch,) in data.batches()] for data in ranks], "in every validation"


def test_validation_with_a_sampler_has_the_same_items_every_time() -> None:
    loader = DataLoader(Records(40), 4, sampler=ReproducibleShuffleSampler(range(5, 20), 777))
    data = validation_data(loader, rank=0, size=1, seed=0)
    first = [batch.tolist() for batch in data.batches()]
    assert sorted(record for batch in first for record in batch) == list(range(5, 20))
    assert [batch.tolist() for batch in data.batches()] == first


def test_validation_with_a_batch_sampler_gives_each_batch_to_one_rank() -> None:
    loader = DataLoader(Records(9), batch_sampler=[[0, 1, 2], [3], [4, 5], [6, 7, 8]])
    shares = [validation_data(loader, rank=rank, size=3, seed=0).batches() for rank in range(3)]
    assert [[batch.tolist() for batch in share] for share in shares] == [[[0, 1, 2], [6, 7, 8]], [[3]], [[4, 5]]]


@pytest.mark.integration
@pytest.mark.parametrize("persistent", [False, True])
def test_noise_of_validation_is_the_same_every_time_and_on_any_slots(persistent: bool) -> None:
    loader = DataLoader(Augmented(), 3, num_workers=1, collate_fn=noisy_collate, persistent_workers=persistent)
    alone, one, other = (
        validation_data(loader, rank=rank, size=size, seed=5) for rank, size in ((0, 1), (0, 2), (1, 2))
    )
    first = [batch.tolist() for batch in alone.batches()]
    assert [batch.tolist() for batch in alone.batches()] == first
    assert [batch.tolist() for batch in one.batches()] == first[::2]
    assert [batch.tolist() for batch in other.batches()] == first[1::2]
    assert [batch.tolist() for batch in other.whole()] == first
    for data in (alone, one, other):
        data.close()


def test_the_whole_has_a_length_and_the_users_dataset() -> None:
    dataset = Records(9)
    for workers in (0, 1):
        whole: Any = validation_data(DataLoader(dataset, 2, num_workers=workers), rank=0, size=3, seed=0).whole()
        assert (len(whole), len(whole.dataset)) == (5, 9)


class Pids(Records):
    def __getitem__(self, index: int) -> int:
        return os.getpid()


@pytest.mark.integration
@pytest.mark.parametrize("persistent", [False, True])
def test_closing_ends_workers_also_of_passes_that_were_abandoned(persistent: bool) -> None:
    loader = DataLoader(Pids(100), num_workers=1, persistent_workers=persistent)
    training = training_data(loader, rank=0, size=1, seed=0)
    validation = validation_data(loader, rank=0, size=1, seed=0)
    for _ in range(2):
        abandoned = [training.batches(Position()), validation.batches(), iter(validation.whole())]
        pids = {int(next(iterator)) for iterator in abandoned}
        assert len(pids) == 3
        assert all(os.path.exists(f"/proc/{pid}") for pid in pids)
        training.close()
        validation.close()
        assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
        training.close()
        validation.close()


@pytest.mark.integration
def test_persistent_workers_serve_every_validation() -> None:
    loader = DataLoader(Pids(10), num_workers=1, persistent_workers=True)
    data = validation_data(loader, rank=0, size=1, seed=0)
    assert len({int(pid) for _ in range(3) for pid in data.batches()}) == 1
    data.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_whether_workers_load_is_told(workers: int) -> None:
    loader = DataLoader(Records(10), num_workers=workers)
    assert training_data(loader, rank=0, size=1, seed=0).loads_in_workers == bool(workers)
    assert validation_data(loader, rank=0, size=1, seed=0).loads_in_workers == bool(workers)


# --- options


def test_collate_fn_is_used() -> None:
    loader = DataLoader(Records(4), 2, collate_fn=sum)
    assert list(validation_data(loader, rank=0, size=1, seed=0).batches()) == [1, 5]


# --- bad input


@pytest.mark.parametrize(
    ("loader", "facts"),
    [
        (DataLoader(Records(0), 4), ["records"]),
        (DataLoader(Records(9), 4, sampler=[]), ["records"]),
        (DataLoader(Records(9), batch_sampler=[]), ["batches"]),
        (DataLoader(Records(2), 4), ["2 records", 4, "3 slots"]),
        (DataLoader(Records(11), 4, drop_last=True), ["11 records", 4, "3 slots", "drop_last=False"]),
        (DataLoader(Records(9), batch_sampler=[[1, 2]]), ["1 batch", 1, "3 slots"]),
    ],
)
def test_too_few_records_for_training_are_refused(loader: DataLoader, facts: list[object]) -> None:
    with refused(UsageError, "build_training_data_loader: ", *facts) as error:
        training_data(loader, rank=0, size=3, seed=0)
    assert ("drop_last" in str(error.value)) is ("drop_last=False" in facts), "only where it would help"


@pytest.mark.parametrize(
    ("loader", "name"),
    [
        (DataLoader(Records(0)), "records"),
        (DataLoader(Records(3), sampler=[]), "records"),
        (DataLoader(Records(3), batch_sampler=[]), "batches"),
    ],
)
def test_a_validation_of_nothing_is_refused(loader: DataLoader, name: str) -> None:
    with refused(UsageError, "build_validation_data_loader: ", name):
        validation_data(loader, rank=0, size=3, seed=0)


def test_a_position_that_the_data_does_not_have_is_refused() -> None:
    data = training_data(DataLoader(Records(20)), rank=0, size=1, seed=0)
    with refused(UsageError, "epoch 3", "20 records", "trained 20"):
        data.batches(Position(3, 20))


# --- at once, in no memory


@pytest.mark.parametrize("position", [Position(), Position(7, 57_000_064)])
def test_a_hundred_million_records_begin_and_resume_at_once_in_no_memory(position: Position) -> None:
    loader = DataLoader(Records(10**8), 32, shuffle=True)
    tracemalloc.start()
    try:
        begin = time.process_time()
        data = training_data(loader, rank=3, size=4, seed=5)
        found = list(islice(data.batches(position), 1000))
        took_s = time.process_time() - begin
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    expected = epoch_order(5, position.epoch, 10**8)[position.done + 3 * 32 + np.arange(32)]
    assert found[0].tolist() == expected.tolist()
    assert took_s < 1
    assert peak < 4 * 2**20
