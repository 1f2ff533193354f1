"""Validations in which all ranks take part together, and iterators from which the trial takes batches itself."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Sampler

from hpc_det.errors import UsageError
from hpc_det.pytorch.data import DataLoader, Evaluation, ValidationData, validation_data
from tests.facts import refused, unnamed
from tests.pytorch.data.gang import by_ranks
from tests.pytorch.data.test_data_loader import Records
from tests.pytorch.data.test_external_loader import Stream

TOGETHER, PIPELINED = Evaluation.TOGETHER, Evaluation.PIPELINED
SMALL = st.integers(1, 5)


def evaluated(data: ValidationData, per_round: int = 1) -> list[tuple[list[Any], bool]]:
    """Return, by round, the batches of a trial that takes `per_round` batches, and whether they count."""
    found = []
    for batches, counts in data.rounds(data.batches()):
        taken = list(islice(batches, per_round))
        found.append(([batch.tolist() if hasattr(batch, "tolist") else batch for batch in taken], counts))
    return found


# --- apart


@pytest.mark.parametrize("made", [[10, 20, 30], (10, 20, 30)])
def test_each_rank_evaluates_until_its_batches_end(made: Any) -> None:
    (data,) = by_ranks(validation_data, made)
    assert evaluated(data) == [([10], True), ([20], True), ([30], True)]


def test_a_rank_evaluates_the_batches_of_a_torch_loader_without_a_length() -> None:
    (data,) = by_ranks(validation_data, torch.utils.data.DataLoader(Stream(3), batch_size=2))
    assert evaluated(data) == [([[0, 1]], True), ([[2]], True)]


def test_a_rank_evaluates_until_the_end_where_a_call_takes_several_batches() -> None:
    (data,) = by_ranks(validation_data, DataLoader(Records(5)))
    assert evaluated(data, per_round=2) == [([[0], [1]], True), ([[2], [3]], True), ([[4]], True)]


def test_a_trial_may_ask_for_the_batch_itself_and_finds_the_next_one_loaded_only_when_it_is_due() -> None:
    loaded: list[int] = []

    class Loader:
        def __iter__(self) -> Iterator[int]:
            for number in range(4):
                loaded.append(number)
                yield number

    (data,) = by_ranks(validation_data, Loader())
    for number, (batches, _) in enumerate(data.rounds(data.batches())):
        assert next(batches) == number
        assert loaded == [*range(number + 1)]


def test_an_evaluation_that_takes_no_batch_would_be_repeated_without_end() -> None:
    (data,) = by_ranks(validation_data, [10, 20])
    with refused(UsageError, "evaluate_batch", "dataloader_iter"):
        evaluated(data, per_round=0)


# --- together


@given(length=st.integers(1, 40), batch_size=SMALL, size=SMALL)
@settings(max_examples=60)
def test_together_all_ranks_evaluate_equally_often_and_each_record_counts_once(
    length: int, batch_size: int, size: int
) -> None:
    made = DataLoader(Records(length), batch_size, shuffle=True)
    ranks = by_ranks(validation_data, *[made] * size, evaluation=TOGETHER)
    for _ in range(2):
        rounds = [evaluated(data) for data in ranks]
        assert {len(found) for found in rounds} == {data.length for data in ranks} == {-(-len(made) // size)}
        assert all(len(batches) == 1 for found in rounds for batches, _ in found)
        counted = [record for found in rounds for (batch,), counts in found if counts for record in batch]
        assert sorted(counted) == [*range(length)]


@pytest.mark.integration
def test_a_rank_whose_share_is_over_gets_the_first_batch_again() -> None:
    ranks = by_ranks(validation_data, *[DataLoader(Records(4), num_workers=1)] * 3, evaluation=TOGETHER)
    assert [evaluated(data) for data in ranks] == [
        [([[0]], True), ([[3]], True)],
        [([[1]], True), ([[0]], False)],
        [([[2]], True), ([[0]], False)],
    ]
    for data in ranks:
        data.close()


def test_a_rank_whose_own_loader_is_over_gets_its_first_batches_again() -> None:
    ranks = by_ranks(validation_data, [1, 2, 3, 4, 5], [6, 7], evaluation=TOGETHER)
    assert evaluated(ranks[1]) == [([6], True), ([7], True), ([6], False), ([7], False), ([6], False)]
    assert [data.length for data in ranks] == [5, 5]


def test_where_a_rank_loads_nothing_all_evaluate_together() -> None:
    ranks = by_ranks(validation_data, *[DataLoader(Records(3))] * 2, None, None, parts=[0, 1, 0, 1])
    assert [data.length for data in ranks] == [2, 2, 2, 2]
    assert [*ranks[2].rounds(None)] == [(None, True), (None, True)]
    assert [*ranks[3].rounds(None)] == [(None, True), (None, False)]
    own = by_ranks(validation_data, [1, 2], [3], None, None, parts=[0, 1, 0, 1])
    assert [*own[2].rounds(None)] == [(None, True), (None, True)]
    assert [*own[3].rounds(None)] == [(None, True), (None, False)]


# --- pipelines


@given(length=st.integers(1, 60), batch_size=st.integers(1, 3), size=st.integers(1, 3), per_batch=st.integers(1, 3))
@settings(max_examples=60)
def test_pipelines_evaluate_whole_micro_batches_only_and_equally_often(
    length: int, batch_size: int, size: int, per_batch: int
) -> None:
    made = DataLoader(Records(length), batch_size)
    at_once = batch_size * size * per_batch
    if length < at_once:
        with refused(UsageError, "build_validation_data_loader: ", per_batch, "gradient_accumulation_steps"):
            by_ranks(validation_data, *[made] * size, evaluation=PIPELINED, per_batch=per_batch)
        return
    ranks = by_ranks(validation_data, *[made] * size, evaluation=PIPELINED, per_batch=per_batch)
    rounds = [evaluated(data, per_batch) for data in ranks]
    assert {len(found) for found in rounds} == {length // at_once}
    records = [
        record for found in rounds for batches, counts in found if counts for batch in batches for record in batch
    ]
    assert sorted(records) == [*range(length // at_once * at_once)]
    assert {len(batch) for found in rounds for batches, _ in found for batch in batches} == {batch_size}


def test_the_first_rank_says_once_what_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    by_ranks(validation_data, *[DataLoader(Records(23), 2)] * 2, evaluation=PIPELINED, per_batch=2)
    said = capsys.readouterr().out
    assert unnamed(said, "hpc-det", "validation", "7 of 23 records", "2 data-parallel ranks") == []
    assert said.count("\n") == 1
    by_ranks(validation_data, *[DataLoader(Records(16), 2)] * 2, evaluation=PIPELINED, per_batch=2)
    assert capsys.readouterr().out == ""


def test_stages_that_load_nothing_evaluate_as_often() -> None:
    made = DataLoader(Records(23), 2)
    ranks = by_ranks(validation_data, None, made, made, parts=[0, 0, 0], evaluation=PIPELINED, per_batch=2)
    assert [*ranks[0].rounds(None)] == [(None, True)] * 5
    assert evaluated(ranks[1], 2) == evaluated(ranks[2], 2)
    own = by_ranks(validation_data, [1, 2, 3, 4, 5], None, parts=[0, 0], evaluation=PIPELINED, per_batch=2)
    assert evaluated(own[0], 2) == [([1, 2], True), ([3, 4], True)]
    assert [*own[1].rounds(None)] == [(None, True)] * 2


# --- bad input


@pytest.mark.parametrize(
    ("loaders", "options", "facts"),
    [
        (
            [[1], iter([1])],
            {"evaluation": TOGETHER},
            ["len()"],
        ),
        ([iter([1]), None], {"parts": [0, 0]}, ["len()"]),
        ([[1], []], {"evaluation": TOGETHER}, ["list", "batches"]),
        ([None, None], {}, ["None"]),
        (
            [[1, 2, 3], [1, 2]],
            {"evaluation": PIPELINED, "per_batch": 3},
            [2, 3, "gradient_accumulation_steps"],
        ),
        (
            [DataLoader(Records(9)), DataLoader(Records(8))],
            {"evaluation": TOGETHER},
            ["rank 0", "9 records with batch_size=1 and drop_last=False", "rank 1", "8 records"],
        ),
    ],
)
def test_what_cannot_be_evaluated_together_is_refused(loaders: list[Any], options: Any, facts: list[object]) -> None:
    with refused(UsageError, "build_validation_data_loader: ", *facts):
        by_ranks(validation_data, *loaders, **options)


def test_apart_ranks_may_validate_with_different_data() -> None:
    ranks = by_ranks(validation_data, DataLoader(Records(9)), DataLoader(Records(1)))
    assert [len(evaluated(data)) for data in ranks] == [5, 0]


class Short(Sampler[int]):
    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


def test_a_sampler_that_gives_fewer_than_it_says_cannot_be_evaluated_together() -> None:
    made = DataLoader(Records(10), sampler=Short())
    (apart,) = by_ranks(validation_data, made)
    assert len(evaluated(apart)) == 9
    (together,) = by_ranks(validation_data, made, evaluation=TOGETHER)
    with refused(UsageError, "9 records", "epoch 0"):
        evaluated(together)
