from __future__ import annotations

from itertools import islice
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_det.pytorch.data import index_batches
from hpc_det.pytorch.data.index_batches import ForTorch, OnePass, TrainingBatches
from hpc_det.pytorch.data.order import Drawn, Items, Records
from hpc_det.pytorch.data.partition import Position, Rest, Share
from tests.pytorch.data.test_partition import LENGTHS, PER_SLOT, SIZES, shares

BLOCKS = st.sampled_from([1, 7, 8192])
"""Items looked up at once: the batches are the same for any number."""


@given(cut=shares(), done=st.integers(0, 12), block=BLOCKS, shuffled=st.booleans())
def test_ranks_get_their_parts_of_the_global_batches(cut: Share, done: int, block: int, shuffled: bool) -> None:
    items: Items = Records(cut.items.nominal_length, 5 if shuffled else None)
    cut = Share(items, per_slot=cut.per_slot, size=cut.size, rest=cut.rest)
    position = Position()
    for _ in range(done):
        position = cut.after(position)
    with patch.object(index_batches, "BLOCK", block):
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
    with patch.object(index_batches, "BLOCK", block):
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
