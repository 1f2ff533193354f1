from __future__ import annotations

from itertools import islice
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hpc_det.core.progress import Position
from hpc_det.errors import UsageError
from hpc_det.pytorch.data import partition
from hpc_det.pytorch.data.order import Drawn, Items, Records
from hpc_det.pytorch.data.partition import ForTorch, OnePass, Rest, Share, Stretch, TrainingBatches
from tests.facts import refused

SIZES = st.integers(1, 5)
PER_SLOT = st.integers(1, 6)
LENGTHS = st.integers(1, 60)


class Lengths(Records):
    """Epochs with different lengths, which repeat in a cycle."""

    def __init__(self, *lengths: int) -> None:
        super().__init__(lengths[0], None)
        self._lengths = lengths

    def length(self, epoch: int) -> int:
        return self._lengths[epoch % len(self._lengths)]


def share(*lengths: int, per_slot: int = 1, size: int = 1, rest: Rest = Rest.SHORT) -> Share:
    return Share(Lengths(*lengths), per_slot=per_slot, size=size, rest=rest)


@st.composite
def shares(draw: st.DrawFn, rest: Rest | None = None, lengths: st.SearchStrategy[int] = LENGTHS) -> Share:
    found = share(
        draw(lengths),
        per_slot=draw(PER_SLOT),
        size=draw(SIZES),
        rest=rest or draw(st.sampled_from(Rest)),
    )
    assume(found.least <= found.items.nominal_length)
    return found


@st.composite
def lives(draw: st.DrawFn, rest: Rest | None = None) -> list[tuple[Share, int]]:
    """Generate the attempts of a trial as (cut, number of batches), each with a different number of slots and batch
    size.
    """
    length = draw(LENGTHS)
    rest = rest or draw(st.sampled_from(Rest))
    cuts = draw(st.lists(shares(rest, st.just(length)), min_size=1, max_size=5))
    return [(cut, draw(st.integers(0, 30))) for cut in cuts]


def trained(life: list[tuple[Share, int]]) -> list[tuple[Share, Position, list[Stretch], Position]]:
    """Return every batch of the attempts as (cut, position before, items, position after)."""
    position, batches = Position(), []
    for cut, count in life:
        for _ in range(count):
            before, position = position, cut.after(position)
            batches.append((cut, before, cut.stretches(before), position))
    return batches


def items(stretches: list[Stretch]) -> list[tuple[int, int]]:
    return [(epoch, item) for epoch, first, end in stretches for item in range(first, end)]


def stream(life: list[tuple[Share, int]]) -> list[tuple[int, int]]:
    return [item for _, _, stretches, _ in trained(life) for item in items(stretches)]


@pytest.mark.integration
@pytest.mark.parametrize("rest", [Rest.SHORT, Rest.FILLED])
@given(data=st.data())
def test_on_changing_slots_nothing_comes_twice_and_nothing_is_left_out(rest: Rest, data: st.DataObject) -> None:
    life = data.draw(lives(rest))
    length = life[0][0].items.nominal_length
    found = stream(life)
    assert found == [divmod(number, length) for number in range(len(found))]


@given(life=lives(Rest.DROPPED))
def test_with_drop_last_nothing_comes_twice_and_less_than_a_batch_is_left_out(life: list[tuple[Share, int]]) -> None:
    found = stream(life)
    assert found == sorted(set(found))
    for cut, before, stretches, after in trained(life):
        if after.epoch > before.epoch:
            _, _, end = [stretch for stretch in stretches if stretch[0] == before.epoch][-1]
            assert cut.items.nominal_length - end < cut.whole


@given(life=lives())
def test_an_epoch_ends_with_the_batch_of_its_last_items_and_no_batch_ends_two(life: list[tuple[Share, int]]) -> None:
    for cut, before, stretches, after in trained(life):
        assert {epoch for epoch, _, _ in stretches} <= {before.epoch, before.epoch + 1}
        assert after.epoch - before.epoch in (0, 1)
        length = cut.items.nominal_length
        (left,) = (length - end for epoch, _, end in stretches if epoch == before.epoch)
        ended = left < cut.whole if cut.rest is Rest.DROPPED else left == 0
        assert (after.epoch > before.epoch) == ended


@given(life=lives())
def test_no_batch_is_too_small_for_the_ranks_or_far_too_large(life: list[tuple[Share, int]]) -> None:
    for cut, _, stretches, _ in trained(life):
        assert cut.size <= len(items(stretches)) < cut.whole + cut.size
        if cut.rest is not Rest.SHORT:
            assert len(items(stretches)) == cut.whole


@given(cut=shares(), epoch=st.integers(0, 3))
def test_batches_per_epoch_counts_the_batches_of_an_epoch(cut: Share, epoch: int) -> None:
    if cut.rest is Rest.FILLED:  # later epochs begin inside a batch
        epoch = 0
    position, batches = Position(epoch), 0
    while position.epoch == epoch:
        position, batches = cut.after(position), batches + 1
    assert batches == cut.batches_per_epoch(cut.items.nominal_length)


@given(cut=shares(), epoch=st.integers(0, 3), data=st.data())
def test_whole_batches_can_be_taken_at_once(cut: Share, epoch: int, data: st.DataObject) -> None:
    position = Position(epoch, data.draw(st.integers(0, cut.items.nominal_length - 1)))
    count = cut.whole_batches(position)
    one_by_one = position
    for batch in range(count):
        assert cut.after_whole(position, batch) == one_by_one
        first = position.done + batch * cut.whole
        assert cut.stretches(one_by_one) == [(epoch, first, first + cut.whole)]
        one_by_one = cut.after(one_by_one)
    assert not count or cut.after_whole(position, count) == one_by_one
    [(begun, first, end), *others] = cut.stretches(one_by_one)
    assert begun > epoch or others or end - first != cut.whole, "it was the last whole one of the epoch"


@given(life=lives())
@settings(max_examples=50)
def test_ranks_get_contiguous_parts_that_differ_by_one_at_most(life: list[tuple[Share, int]]) -> None:
    for cut, _, stretches, _ in trained(life):
        parts = [items(cut.part(rank, stretches)) for rank in range(cut.size)]
        assert [item for part in parts for item in part] == items(stretches)
        sizes = [len(part) for part in parts]
        assert min(sizes) >= 1
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[-1] <= 1


@given(lengths=st.lists(st.integers(8, 30), min_size=2, max_size=4), size=SIZES, rest=st.sampled_from(Rest))
def test_epochs_may_differ_in_length(lengths: list[int], size: int, rest: Rest) -> None:
    cut = share(*lengths, size=size, rest=rest)
    found = stream([(cut, 40)])
    everything = [(epoch, item) for epoch in range(200) for item in range(cut.items.length(epoch))]
    if rest is Rest.DROPPED:
        everything = [(epoch, item) for epoch, item in everything if item < cut.items.length(epoch) // size * size]
    assert found == everything[: len(found)]


# --- by example


def test_a_short_batch_ends_an_epoch() -> None:
    cut = share(22, per_slot=2, size=2)
    assert cut.stretches(Position(0, 20)) == [(0, 20, 22)]
    assert cut.after(Position(0, 16)) == Position(0, 20)
    assert cut.after(Position(0, 20)) == Position(1)


def test_records_too_few_for_the_ranks_go_with_the_batch_before() -> None:
    cut = share(21, per_slot=2, size=2)
    assert cut.stretches(Position(0, 16)) == [(0, 16, 21)]
    assert cut.after(Position(0, 16)) == Position(1)


def test_records_too_few_for_the_new_ranks_go_with_the_next_epoch() -> None:
    cut = share(20, per_slot=2, size=4)
    assert cut.stretches(Position(0, 18)) == [(0, 18, 20), (1, 0, 6)]
    assert cut.after(Position(0, 18)) == Position(1, 6)


def test_drop_last_ends_an_epoch_with_its_last_full_batch() -> None:
    cut = share(22, per_slot=2, size=2, rest=Rest.DROPPED)
    assert cut.after(Position(0, 12)) == Position(0, 16)
    assert cut.after(Position(0, 16)) == Position(1)


def test_drop_last_fills_up_what_a_resume_finds_too_little_for_a_batch() -> None:
    cut = share(20, per_slot=2, size=4, rest=Rest.DROPPED)
    assert cut.stretches(Position(0, 16)) == [(0, 16, 20), (1, 0, 4)]
    assert cut.after(Position(0, 16)) == Position(1, 4)
    assert cut.after(Position(1, 4)) == Position(1, 12)
    assert cut.after(Position(1, 12)) == Position(2)


def test_batches_of_a_batch_sampler_are_filled_up_from_the_next_epoch() -> None:
    cut = share(5, size=3, rest=Rest.FILLED)
    assert cut.stretches(Position(0, 3)) == [(0, 3, 5), (1, 0, 1)]
    assert cut.after(Position(0, 3)) == Position(1, 1)
    assert cut.after(Position(1, 1)) == Position(1, 4)
    assert cut.batches_per_epoch(5) == 2


@pytest.mark.parametrize(
    ("length", "rest", "facts"),
    [
        (2, Rest.SHORT, ["2 records", 4, "3 slots"]),
        (11, Rest.DROPPED, ["11 records", 4, "3 slots", "drop_last=False"]),
        (2, Rest.DROPPED, ["2 records", 4, "3 slots"]),
        (0, Rest.SHORT, ["records"]),
    ],
)
def test_too_few_records_for_the_slots_are_refused(length: int, rest: Rest, facts: list[object]) -> None:
    with refused(UsageError, "build_training_data_loader: ", *facts) as error:
        share(length, per_slot=4, size=3, rest=rest).check(length)
    assert ("drop_last" in str(error.value)) is ("drop_last=False" in facts), "only where it would help"


def test_also_in_a_later_epoch() -> None:
    with refused(UsageError, "2 records"):
        stream([(share(9, 2, size=3), 5)])


BLOCKS = st.sampled_from([1, 7, 8192])
"""Number of items that are looked up at once; it must not change the batches."""


@given(cut=shares(), done=st.integers(0, 12), block=BLOCKS, shuffled=st.booleans())
def test_ranks_get_their_parts_of_the_global_batches(cut: Share, done: int, block: int, shuffled: bool) -> None:
    items: Items = Records(cut.items.nominal_length, 5 if shuffled else None)
    cut = Share(items, per_slot=cut.per_slot, size=cut.size, rest=cut.rest)
    position = Position()
    for _ in range(done):
        position = cut.after(position)
    with patch.object(partition, "BLOCK", block):
        ranks = [islice(TrainingBatches(cut, rank=rank, position=position), 30) for rank in range(cut.size)]
        for parts in zip(*ranks, strict=True):
            assert {key for key, _ in parts} == {(position.epoch, position.done)}
            expected = [
                items.rows(epoch, np.array([[place]]))[0][0]
                for epoch, first, end in cut.stretches(position)
                for place in range(first, end)
            ]
            assert [item for _, part in parts for item in part] == expected
            position = cut.after(position)


@given(
    length=st.integers(0, 60),
    per_slot=PER_SLOT,
    size=SIZES,
    skip=st.integers(0, 4),
    drop_last=st.booleans(),
    block=BLOCKS,
    shuffled=st.booleans(),
)
def test_one_pass_shares_out_batches_in_turn(
    length: int, per_slot: int, size: int, skip: int, drop_last: bool, block: int, shuffled: bool
) -> None:
    items = Records(length, 5 if shuffled else None)
    (order,) = items.rows(0, np.arange(length)[None])
    batches = [order[first : first + per_slot] for first in range(0, length, per_slot)]
    if drop_last:
        batches = [batch for batch in batches if len(batch) == per_slot]
    with patch.object(partition, "BLOCK", block):
        for rank in range(size):
            part = OnePass(items, per_slot=per_slot, rank=rank, size=size, skip=skip, drop_last=drop_last)
            numbers = range(rank + skip * size, len(batches), size)
            assert list(part) == [((0, number), batches[number]) for number in numbers]
            assert len(part) == len(numbers)


@given(length=LENGTHS, size=SIZES)
def test_one_pass_can_be_taken_again_and_again(length: int, size: int) -> None:
    part = OnePass(Records(length, 3), per_slot=2, rank=0, size=size)
    assert list(part) == list(part)


@pytest.mark.parametrize("keyed", [True, False])
def test_torch_gets_the_indices_with_or_without_their_keys(keyed: bool) -> None:
    batches = ForTorch(OnePass(Records(5, None), per_slot=2, rank=0, size=1), keyed=keyed, items_are_batches=False)
    indices = [[0, 1], [2, 3], [4]]
    expected: list[Any] = [((0, number), batch) for number, batch in enumerate(indices)] if keyed else indices
    assert list(batches) == expected
    assert len(batches) == 3


def test_torch_gets_the_batches_of_a_batch_sampler_as_they_are() -> None:
    items = Drawn("batches", [(0, 1), "abc", [4]], seed=0)
    share = Share(items, per_slot=1, size=1, rest=Rest.FILLED)
    training = TrainingBatches(share, rank=0, position=Position())
    assert list(islice(ForTorch(training, keyed=False, items_are_batches=True), 4)) == [(0, 1), "abc", [4], (0, 1)]
    assert len(training) == 3
