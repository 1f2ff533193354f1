from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from hpc_det.errors import UsageError
from hpc_det.launch.signals import STOP_SIGNALS
from hpc_det.pytorch.data import DataLoader, Position, Share, TrainingBatches, epoch_order

SIZES = st.integers(1, 5)
EITHER = st.booleans()


@st.composite
def shares(draw: st.DrawFn, *, drop_last: st.SearchStrategy[bool] = EITHER) -> Share:
    share = Share(
        length=draw(st.integers(1, 40)),
        per_slot_batch=draw(st.integers(1, 6)),
        size=draw(SIZES),
        drop_last=draw(drop_last),
    )
    assume(share.batches_per_epoch() >= 1)
    return share


Stretch = tuple[int, int, int]
"""(epoch, first, end) of records in an epoch's order."""


def walked(share: Share, position: Position, batches: int) -> tuple[Position, list[Stretch]]:
    """Where `batches` global batches from `position` end, and the records on the way."""
    way: list[Stretch] = []
    for _ in range(batches):
        position, stretches = share.span(position)
        way += stretches
    return position, way


def ranks_batches(share: Share, position: Position, count: int, seed: int | None) -> list[list[list[int]]]:
    """By global batch and rank: the numbers of the records."""
    samplers = [TrainingBatches(share, rank, position, seed) for rank in range(share.size)]
    return [list(batch) for batch in islice(zip(*samplers, strict=True), count)]


@given(share=shares(drop_last=st.just(False)), seed=st.none() | st.integers(0, 2**31))
def test_an_epoch_has_each_record_once_over_all_ranks(share: Share, seed: int | None) -> None:
    for epoch in range(2):
        batches = ranks_batches(share, Position(epoch), share.batches_per_epoch(), seed)
        records = [record for batch in batches for part in batch for record in part]
        assert sorted(records) == list(range(share.length))
        expected = list(range(share.length)) if seed is None else epoch_order(seed, epoch, share.length).tolist()
        assert records == expected


@given(share=shares())
def test_no_rank_is_ever_without_records_and_shares_differ_by_one_at_most(share: Share) -> None:
    for batch in ranks_batches(share, Position(), 3 * share.batches_per_epoch(), seed=1):
        sizes = [len(part) for part in batch]
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1


@given(share=shares(drop_last=st.just(True)))
def test_with_drop_last_every_batch_is_full(share: Share) -> None:
    batches = ranks_batches(share, Position(), 2 * share.batches_per_epoch(), seed=1)
    assert {len(part) for batch in batches for part in batch} == {share.per_slot_batch}
    records = [record for batch in batches[: share.batches_per_epoch()] for part in batch for record in part]
    assert len(set(records)) == share.batches_per_epoch() * share.global_batch


@given(share=shares())
def test_batches_per_epoch_counts_the_spans_of_an_epoch(share: Share) -> None:
    epochs = [walked(share, Position(3), batches)[0].epoch for batches in range(share.batches_per_epoch() + 1)]
    assert epochs == [3] * share.batches_per_epoch() + [4]
    assert walked(share, Position(3), share.batches_per_epoch())[0] == Position(4)


@given(data=st.data(), share=shares(drop_last=st.just(False)), done=st.integers(0, 40), size=SIZES)
def test_a_resume_on_other_ranks_leaves_nothing_out_and_takes_nothing_twice(
    data: st.DataObject, share: Share, done: int, size: int
) -> None:
    resumed = Share(length=share.length, per_slot_batch=data.draw(st.integers(1, 6)), size=size)
    assume(resumed.batches_per_epoch() >= 1)
    position, before = walked(share, Position(), done)
    _, after = walked(resumed, position, 20)
    for batch in ranks_batches(resumed, position, 20, seed=None):
        assert min(len(part) for part in batch) >= 1
    stream = before + after
    records = [(epoch, record) for epoch, first, end in stream for record in range(first, end)]
    everything = ((epoch, record) for epoch in range(len(records)) for record in range(share.length))
    assert records == list(islice(everything, len(records)))


@given(share=shares(), done=st.integers(0, 40), seed=st.integers(0, 2**31))
def test_a_resume_on_the_same_ranks_goes_on_with_the_same_batches(share: Share, done: int, seed: int) -> None:
    undisturbed = ranks_batches(share, Position(), done + 10, seed)
    position, _ = walked(share, Position(), done)
    assert ranks_batches(share, position, 10, seed) == undisturbed[done:]


@given(seed=st.integers(0, 2**31 - 1), epoch=st.integers(0, 1000), length=st.integers(0, 100))
def test_the_order_of_an_epoch_is_a_permutation(seed: int, epoch: int, length: int) -> None:
    order = epoch_order(seed, epoch, length).tolist()
    assert sorted(order) == list(range(length))
    assert epoch_order(seed, epoch, length).tolist() == order


def test_every_seed_and_epoch_has_its_own_order() -> None:
    orders = {tuple(epoch_order(seed, epoch, 50).tolist()) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400


@given(
    length=st.integers(0, 40),
    batch_size=st.integers(1, 6),
    size=SIZES,
    drop_last=st.booleans(),
)
@settings(max_examples=50)
def test_validation_has_each_record_once_over_all_ranks(
    length: int, batch_size: int, size: int, drop_last: bool
) -> None:
    loader = DataLoader(TensorDataset(torch.arange(length)), batch_size=batch_size, drop_last=drop_last)
    of_ranks = [
        [batch[0].tolist() for batch in loader.validation_batches(rank=rank, size=size, seed=0)] for rank in range(size)
    ]
    assert sorted(record for batches in of_ranks for batch in batches for record in batch) == list(range(length))
    assert all(1 <= len(batch) <= batch_size for batches in of_ranks for batch in batches)


# --- generators


class Noisy(Dataset[Any]):
    """Draws from every global generator for each record, as augmentation does."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, random.random() + float(np.random.random()) + float(torch.rand(()))


def generators() -> tuple[Any, ...]:
    _, keys, position, *_ = np.random.get_state(legacy=True)
    return random.getstate(), list(keys), position, torch.get_rng_state().tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_making_iterators_moves_no_global_generator(workers: int) -> None:
    loader = DataLoader(Noisy(), batch_size=2, shuffle=True, num_workers=workers)
    before = generators()
    training = loader.training_batches(rank=0, size=1, position=Position(), seed=1)
    validation = iter(loader.validation_batches(rank=0, size=1, seed=1))
    assert generators() == before
    if workers:
        next(training), next(validation)
        assert generators() == before


def test_ranks_do_not_share_the_noise_of_their_workers() -> None:
    loader = DataLoader(Noisy(), batch_size=2, num_workers=1)

    def noise(rank: int) -> Any:
        return next(loader.training_batches(rank=rank, size=2, position=Position(), seed=1))[1].tolist()

    assert noise(0) != noise(1)
    assert noise(0) == noise(0), "the same seed gives the same noise"


# --- workers and options


class Immortal(Dataset[Any]):
    """Sends its own worker process every stop signal before it gives a record."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        for number in STOP_SIGNALS:
            os.kill(os.getpid(), number)
        return os.getpid()


def test_workers_ignore_the_stop_signals() -> None:
    initialized: list[int] = []
    loader = DataLoader(Immortal(), batch_size=2, num_workers=1, worker_init_fn=initialized.append)
    (first, again) = (pids.tolist() for pids in loader.validation_batches(rank=0, size=1, seed=0))
    assert {*first} == {*again}
    assert os.getpid() not in first
    assert initialized == []  # it ran in the worker


class Named(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> str:
        return os.environ.get("WORKER", "nobody")


def name_worker(number: int) -> None:
    os.environ["WORKER"] = f"worker {number}"


def test_the_users_worker_init_fn_runs_too() -> None:
    loader = DataLoader(Named(), num_workers=1, worker_init_fn=name_worker)
    assert next(iter(loader.validation_batches(rank=0, size=1, seed=0))) == ["worker 0"]


def test_collate_fn_is_used() -> None:
    loader = DataLoader(TensorDataset(torch.arange(4)), batch_size=2, collate_fn=len)
    assert list(loader.validation_batches(rank=0, size=1, seed=0)) == [2, 2]


@pytest.mark.parametrize(
    ("length", "batch_size", "drop_last", "expected"),
    [(10, 5, False, 2), (11, 5, False, 3), (11, 5, True, 2), (3, 5, False, 1)],
)
def test_its_length_is_in_batches(length: int, batch_size: int, drop_last: bool, expected: int) -> None:
    assert len(DataLoader(TensorDataset(torch.arange(length)), batch_size=batch_size, drop_last=drop_last)) == expected


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def test_an_iterable_dataset_is_refused() -> None:
    with pytest.raises(UsageError, match="IterableDataset has no records to count"):
        DataLoader(Endless())


def test_a_batch_size_of_zero_is_refused() -> None:
    with pytest.raises(UsageError, match="batch_size is 0; use at least 1"):
        DataLoader(TensorDataset(torch.arange(3)), batch_size=0)


@pytest.mark.parametrize(
    ("length", "drop_last", "message"),
    [
        (2, False, "2 records do not make one batch of 4 per slot on 3 slots; use fewer slots$"),
        (11, True, "11 records do not make one batch of 4 per slot on 3 slots; use fewer slots or drop_last=False"),
        (0, False, "0 records do not make one batch"),
    ],
)
def test_too_few_records_are_refused(length: int, drop_last: bool, message: str) -> None:
    loader = DataLoader(TensorDataset(torch.arange(length)), batch_size=4, drop_last=drop_last)
    with pytest.raises(UsageError, match=message):
        loader.training_batches(rank=0, size=3, position=Position(), seed=0)


def test_stop_signals_are_those_that_schedulers_send() -> None:
    assert {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2} <= set(STOP_SIGNALS)
