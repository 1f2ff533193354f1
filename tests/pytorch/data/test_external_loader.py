from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from hpc_det.core.external_loader import length_of
from hpc_det.core.progress import Position
from hpc_det.distributed.rng import seed_generators
from hpc_det.errors import UsageError
from hpc_det.pytorch.data import TrainingData, ValidationData, training_data, validation_data
from tests.facts import refused, unnamed
from tests.pytorch.data.gang import by_ranks
from tests.pytorch.data.test_data_loader import Records


def training(loader: Any) -> TrainingData:
    return training_data(loader, rank=1, size=4, seed=0)


def validation(loader: Any, size: int = 1) -> ValidationData:
    return validation_data(loader, rank=0, size=size, seed=0)


class Stream(IterableDataset[int]):
    def __init__(self, length: int = 6) -> None:
        self._length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._length))


class SizedStream(Stream):
    def __len__(self) -> int:
        return 6


class Once:
    """An iterable with more batches in the first iteration than in later ones, which counts its iterations."""

    def __init__(self, *batches: list[int]) -> None:
        self._batches = list(batches)
        self.asked = 0

    def __iter__(self) -> Iterator[int]:
        self.asked += 1
        return iter(self._batches.pop(0) if self._batches else [])


# --- length


def test_a_length_is_what_it_says_or_none() -> None:
    assert length_of([1, 2]) == 2
    assert length_of(iter([1, 2])) is None
    assert length_of(torch.utils.data.DataLoader(Stream(), batch_size=2)) is None
    assert length_of(torch.utils.data.DataLoader(SizedStream(), batch_size=2)) == 3


def test_to_ask_for_the_length_makes_torch_warn_of_nothing_later() -> None:
    longer_than_it_says = torch.utils.data.DataLoader(SizedStream(40), batch_size=2)
    data = training(longer_than_it_says)
    assert data.batches_per_epoch == 3
    assert len(list(islice(data.batches(Position()), 30))) == 30


# --- training


def test_it_is_taken_as_it_is_and_iterated_again_at_its_end() -> None:
    batches = training([10, 20, 30]).batches(Position(5, 2))
    assert list(islice(batches, 7)) == [10, 20, 30, 10, 20, 30, 10]


def test_batches_are_counted() -> None:
    data = training([10, 20, 30])
    assert data.batches_per_epoch == 3
    assert [data.after(position) for position in (Position(), Position(0, 1), Position(0, 2), Position(4, 2))] == [
        Position(0, 1),
        Position(0, 2),
        Position(1),
        Position(5),
    ]


def test_the_batches_of_an_epoch_can_be_counted_at_once() -> None:
    data = training([10, 20, 30])
    assert [data.whole_batches(Position(4, done)) for done in range(3)] == [3, 2, 1]
    assert data.after(Position(4), 2) == Position(4, 2)
    assert data.after(Position(4, 1), 2) == Position(5)


def test_the_shortest_of_all_ranks_ends_the_epoch() -> None:
    data = by_ranks(training_data, [10, 20, 30], [10, 20], Stream())
    assert [rank.batches_per_epoch for rank in data] == [2, 2, 2]
    assert data[0].after(Position(0, 1)) == Position(1)
    assert data[0].after(Position(0, 5)) == Position(1), "the epochs were longer before the resume"


def test_without_a_length_an_epoch_never_ends() -> None:
    data = training(Stream())
    assert data.batches_per_epoch is None
    assert data.after(Position(0, 10**9)) == Position(0, 10**9 + 1)
    assert data.whole_batches(Position(0, 10**9)) > 10**12


def test_its_iterator_is_made_with_the_batches_and_not_at_the_first_of_them() -> None:
    loader = Once([1], [2])
    batches = training(loader).batches(Position())
    assert loader.asked == 1
    assert next(batches) == 1
    seed_generators(1)
    drawn = torch.rand(())
    seed_generators(1)
    batches = training(torch.utils.data.DataLoader(Records(3))).batches(Position())
    assert torch.rand(()) != drawn, "torch draws from the global generator for an iterator"
    seed_generators(1)
    next(batches)
    assert torch.rand(()) == drawn


@pytest.mark.parametrize(
    ("loader", "given", "name"),
    [
        (Once(), 0, "Once"),
        (Once([1, 2]), 2, "Once"),
        (iter([1, 2]), 2, "list_iterator"),
        (torch.utils.data.DataLoader(Stream(0)), 0, "DataLoader"),
    ],
)
def test_an_iterator_that_is_empty_at_once_is_refused(loader: Any, given: int, name: str) -> None:
    batches = training(loader).batches(Position())
    assert len([next(batches) for _ in range(given)]) == given
    with refused(UsageError, "build_training_data_loader: ", name) as error:
        next(batches)
    assert ("again" in str(error.value)) is (given > 0)


def test_a_loader_without_batches_is_refused() -> None:
    with refused(UsageError, "build_training_data_loader", "list"):
        training([])


# --- validation


def test_each_rank_validates_with_all_that_its_loader_gives() -> None:
    data = validation([10, 20, 30], size=4)
    assert list(data.batches()) == [10, 20, 30]
    assert list(data.batches()) == [10, 20, 30]
    assert list(data.whole()) == [10, 20, 30]


class Repeating:
    """An iterator without an end, as DeepSpeed's RepeatingLoader is."""

    def __init__(self, *batches: int) -> None:
        self._batches = cycle(batches)
        self.name = "repeating"

    def __iter__(self) -> Repeating:
        return self

    def __next__(self) -> int:
        return next(self._batches)


class SizedRepeating(Repeating):
    def __len__(self) -> int:
        return 3


def test_a_validation_takes_as_many_batches_of_an_iterator_as_its_length_says(
    capfd: pytest.CaptureFixture[str],
) -> None:
    data = validation(SizedRepeating(10, 20, 30))
    assert unnamed(capfd.readouterr().out, "build_validation_data_loader", "SizedRepeating", "3") == []
    for _ in range(2):
        assert list(data.batches()) == [10, 20, 30]
        assert list(data.whole()) == [10, 20, 30]
    whole: Any = data.whole()
    assert (len(whole), whole.name) == (3, "repeating")


@pytest.mark.parametrize("loader", [Repeating(1), iter([1, 2]), (batch for batch in (1, 2))])
def test_an_iterator_without_a_length_is_no_loader_of_a_validation(loader: Any) -> None:
    with refused(UsageError, "build_validation_data_loader", type(loader).__name__, "__len__"):
        validation(loader)


def test_a_torch_loader_of_a_validation_ends_later_than_its_data_set_says() -> None:
    assert len(list(validation(torch.utils.data.DataLoader(SizedStream(40), batch_size=2)).batches())) == 20


def test_a_validation_without_batches_is_refused() -> None:
    with refused(UsageError, "build_validation_data_loader", "list"):
        validation([])


def test_one_rank_of_several_may_have_no_batches() -> None:
    assert list(validation([], size=4).batches()) == []


# --- workers


def pids(workers: int = 1, persistent: bool = False) -> torch.utils.data.DataLoader[Any]:
    def pid(_: Any) -> int:
        return os.getpid()

    return torch.utils.data.DataLoader(Records(20), num_workers=workers, collate_fn=pid, persistent_workers=persistent)


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.integration
@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("persistent", [False, True])
def test_closing_ends_the_workers_of_training(persistent: bool, epochs: int) -> None:
    data = training(pids(persistent=persistent))
    assert data.loads_in_workers
    batches = data.batches(Position())
    seen = {next(batches) for _ in range(20 * epochs - 15)}
    assert len(seen) == (1 if persistent else epochs)
    data.close()
    assert not any(is_running(pid) for pid in seen)
    data.close()


@pytest.mark.integration
@pytest.mark.parametrize("persistent", [False, True])
def test_closing_ends_the_workers_of_a_validation_that_was_abandoned(persistent: bool) -> None:
    data = validation(pids(persistent=persistent))
    assert data.loads_in_workers
    first = data.batches()
    pid = next(first)
    second = data.batches()
    assert is_running(pid) == persistent, "else the next pass ends it"
    pid = next(second)
    data.close()
    assert not is_running(pid)
    data.close()


def test_other_loaders_have_no_workers() -> None:
    for data in (training([1]), validation([1])):
        assert not data.loads_in_workers
        data.close()
