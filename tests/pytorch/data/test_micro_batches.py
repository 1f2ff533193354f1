from __future__ import annotations

import math
from fractions import Fraction
from itertools import islice
from typing import Any

import pytest
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler

from hpc_det.core.progress import Position
from hpc_det.errors import UsageError
from hpc_det.pytorch.data import Counted, DataLoader, TrainingData, training_data
from tests.facts import refused
from tests.pytorch.data.gang import by_ranks
from tests.pytorch.data.test_data_loader import Records

LENGTH = st.integers(6, 40)
SMALL = st.integers(1, 4)
DONE = st.integers(0, 12)
ROUNDS = ["every record", "drop_last", "batch_sampler"]


def loader(rest: str, length: int, batch_size: int) -> DataLoader:
    if rest == "batch_sampler":
        return DataLoader(Records(length), batch_sampler=BatchSampler(RandomSampler(range(length)), 2, drop_last=False))
    return DataLoader(Records(length), batch_size, shuffle=True, drop_last=rest == "drop_last")


def gang(made: DataLoader, size: int, per_batch: int) -> list[TrainingData]:
    try:
        return [training_data(made, rank=rank, size=size, seed=3, per_batch=per_batch) for rank in range(size)]
    except UsageError:  # too few records for the ranks or micro batches, see the tests of refusals below
        reject()


def after(data: TrainingData, position: Position, batches: int) -> Position:
    """Return the position after more batches, counted one by one; reject examples in which an epoch is too small."""
    for _ in range(batches):
        try:
            position = data.after(position)
        except UsageError:
            reject()
    return position


def trained(ranks: list[TrainingData], position: Position, micro_batches: int) -> list[list[int]]:
    """Return the records that all ranks together get in each micro batch."""
    parts = [[batch.tolist() for batch in islice(data.batches(position), micro_batches)] for data in ranks]
    return [[record for part in micro_batch for record in part] for micro_batch in zip(*parts, strict=True)]


@pytest.mark.integration
@pytest.mark.parametrize("rest", ROUNDS)
@given(length=LENGTH, batch_size=SMALL, size=SMALL, per_batch=SMALL, done=DONE)
@settings(max_examples=60)
def test_a_resume_at_any_batch_goes_on_with_the_same_micro_batches(
    rest: str, length: int, batch_size: int, size: int, per_batch: int, done: int
) -> None:
    ranks = gang(loader(rest, length, batch_size), size, per_batch)
    undisturbed = trained(ranks, Position(), (done + 5) * per_batch)
    resumed = gang(loader(rest, length, batch_size), size, per_batch)
    position = after(ranks[0], Position(), done)
    assert trained(resumed, position, 5 * per_batch) == undisturbed[done * per_batch :]


@pytest.mark.integration
@pytest.mark.parametrize("rest", ["every record", "batch_sampler"])
@given(data=st.data(), length=LENGTH)
@settings(max_examples=60)
def test_over_resumes_on_other_ranks_and_accumulations_nothing_comes_twice_and_nothing_is_left_out(
    rest: str, data: st.DataObject, length: int
) -> None:
    (alone,) = gang(loader(rest, length, 1), 1, 1)
    undisturbed = (record for batch in alone.batches(Position()) for record in batch.tolist())
    position = Position()
    for _ in range(data.draw(st.integers(1, 4))):
        per_batch, count = data.draw(SMALL), data.draw(st.integers(0, 5))
        ranks = gang(loader(rest, length, data.draw(SMALL)), data.draw(SMALL), per_batch)
        found = [record for batch in trained(ranks, position, count * per_batch) for record in batch]
        assert found == list(islice(undisturbed, len(found)))
        position = after(ranks[0], position, count)


@pytest.mark.parametrize("rest", ROUNDS)
@given(length=LENGTH, batch_size=SMALL, size=SMALL, per_batch=SMALL, done=st.integers(0, 40))
@settings(max_examples=60)
def test_whole_batches_can_be_taken_at_once(
    rest: str, length: int, batch_size: int, size: int, per_batch: int, done: int
) -> None:
    data = gang(loader(rest, length, batch_size), size, per_batch)[0]
    assume(done < (length + 1) // 2 if rest == "batch_sampler" else done < length)
    start = position = Position(2, done)
    count = data.whole_batches(start)
    for number in range(count):
        assert position.epoch == start.epoch, "no earlier batch may end the epoch"
        position = after(data, position, 1)
        assert data.after(start, number + 1) == position
    if count and position.epoch == start.epoch:
        assert data.whole_batches(position) == 0


@pytest.mark.parametrize("rest", ROUNDS)
@given(length=LENGTH, batch_size=SMALL, size=SMALL, per_batch=SMALL)
@settings(max_examples=60)
def test_no_batch_ends_two_epochs_and_an_epoch_has_as_many_as_it_says(
    rest: str, length: int, batch_size: int, size: int, per_batch: int
) -> None:
    data = gang(loader(rest, length, batch_size), size, per_batch)[0]
    position, ends = Position(), list[int]()
    for batch in range(1, 30):
        before, position = position, after(data, position, 1)
        assert position.epoch - before.epoch in (0, 1)
        ends += [batch] * (position.epoch - before.epoch)
    assert data.batches_per_epoch is not None
    # With a batch sampler the last batch of a rank may contain records of the next epoch and then counts as a whole
    # batch.
    comparable = ends[:1] if rest == "batch_sampler" else ends
    assert comparable == [math.ceil(data.batches_per_epoch * epochs) for epochs in range(1, len(comparable) + 1)]


# --- by example


def test_the_last_micro_batches_of_a_batch_may_be_of_the_next_epoch() -> None:
    (data,) = gang(DataLoader(Records(10), 2), 1, per_batch=3)
    assert (data.whole_batches(Position()), data.batches_per_epoch) == (1, Fraction(5, 3))
    assert data.after(Position()) == Position(0, 6)
    assert data.after(Position(0, 6)) == Position(1, 2)
    assert data.after(Position(1, 2)) == Position(1, 8)
    assert trained([data], Position(0, 6), 3) == [[6, 7], [8, 9], [0, 1]]


def test_a_batch_of_a_loader_of_the_users_own_may_end_in_the_next_epoch_too() -> None:
    data = training_data([10, 20, 30, 40], rank=0, size=1, seed=0, per_batch=3)
    assert [data.whole_batches(Position()), data.batches_per_epoch] == [1, Fraction(4, 3)]
    assert data.after(Position(0, 3)) == Position(1, 2)
    assert list(islice(data.batches(Position()), 6)) == [10, 20, 30, 40, 10, 20]


def test_without_a_length_an_epoch_never_ends() -> None:
    data = training_data((number for number in range(9)), rank=0, size=1, seed=0, per_batch=3)
    assert data.batches_per_epoch is None
    assert data.whole_batches(Position(0, 10**9)) > 10**12
    assert data.after(Position(0, 10**9), 2) == Position(0, 10**9 + 6)


@pytest.mark.parametrize("made", [DataLoader(Records(20), 4), [1, 2, 3, 4, 5]])
def test_epochs_with_too_few_micro_batches_are_refused(made: Any) -> None:
    with refused(UsageError, "build_training_data_loader: ", "5 micro batches", 6, "gradient_accumulation_steps"):
        training_data(made, rank=0, size=1, seed=0, per_batch=6)


def test_epochs_that_are_too_small_after_a_resume_on_more_ranks_are_refused() -> None:
    ranks = by_ranks(training_data, *[DataLoader(Records(8))] * 4, per_batch=2)
    assert ranks[0].after(Position()) == Position(1)
    with refused(UsageError, "epoch 3", "epoch 4", "2 micro batches"):
        ranks[0].after(Position(3, 5))


@pytest.mark.integration
def test_closing_closes_what_loads() -> None:
    data = training_data(DataLoader(Records(8), num_workers=1), rank=0, size=1, seed=0, per_batch=2)
    assert data.loads_in_workers
    iterator: Any = data.batches(Position())
    (worker,) = iterator._workers
    assert worker.is_alive()
    data.close()
    assert not worker.is_alive()


# --- counted


def test_each_batch_has_to_take_its_micro_batches() -> None:
    batches = Counted(iter(range(9)), per_batch=3)
    for number in range(2):
        assert len([*islice(batches, 3)]) == 3
        batches.end_batch(number)
    assert next(iter(batches)) == 6
    with refused(UsageError, "train_batch", "batch 2", "1 micro batches", 3, "dataloader_iter"):
        batches.end_batch(2)


def test_from_a_loader_of_the_users_own_a_batch_may_take_what_it_likes() -> None:
    batches = Counted(iter(range(9)), per_batch=None)
    batches.end_batch(0)
    assert list(batches) == [*range(9)]
    batches.end_batch(1)


def test_training_data_says_whether_we_share_it_out() -> None:
    for per_batch in (1, 2):
        assert training_data(DataLoader(Records(8)), rank=0, size=1, seed=0, per_batch=per_batch).is_shared_out
        assert not training_data([1, 2], rank=0, size=1, seed=0, per_batch=per_batch).is_shared_out
