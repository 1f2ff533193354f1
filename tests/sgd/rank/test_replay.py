from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from hpc_det.distributed.rng import restore_rng, rng_state, seed_everything
from hpc_det.sgd.rank.passes import Passes
from tests.sgd.rank.loaders import Noisy, Stream, handed_over, passes


@pytest.fixture(autouse=True)
def own_generators() -> Iterator[None]:
    before = rng_state()
    yield
    restore_rng(before)


class NoisyStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        for number in range(12):
            yield number, info.id if info else -1, float(torch.rand(()))


def shuffled() -> DataLoader[Any]:
    return DataLoader(Noisy(11), batch_size=2, shuffle=True)


def shuffled_by_workers() -> DataLoader[Any]:
    return DataLoader(Noisy(11), batch_size=2, shuffle=True, num_workers=2)


def with_a_generator() -> DataLoader[Any]:
    return DataLoader(Noisy(11), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3))


def with_a_sampler_that_draws_as_it_goes() -> DataLoader[Any]:
    dataset = Noisy(200)
    sampler = RandomSampler(dataset, replacement=True, generator=torch.Generator().manual_seed(3))
    return DataLoader(dataset, batch_size=10, sampler=sampler)


def streamed_by_workers() -> DataLoader[Any]:
    return DataLoader(NoisyStream(), batch_size=2, num_workers=2)


def a_list() -> list[list[int]]:
    return [[number] for number in range(5)]


def an_endless_generator() -> Iterator[list[int]]:
    number = 0
    while True:
        yield [number]
        number += 1


LOADERS: list[Callable[[], Any]] = [
    shuffled,
    shuffled_by_workers,
    with_a_generator,
    with_a_sampler_that_draws_as_it_goes,
    streamed_by_workers,
    a_list,
    an_endless_generator,
]


def training(data: Passes, steps: int) -> list[Any]:
    """Return the batches with random numbers that each step draws, as dropout does."""
    return [(plain(batch), random.random(), np.random.random(), float(torch.rand(()))) for batch in data.batches(steps)]


def plain(batch: Any) -> list[Any]:
    return [part.tolist() if isinstance(part, torch.Tensor) else part for part in batch]


@pytest.mark.integration
@pytest.mark.parametrize("before", [0, 3, 6, 8])
@pytest.mark.parametrize("loader", LOADERS)
def test_the_open_pass_is_replayed_bit_for_bit(loader: Callable[[], Any], before: int) -> None:
    with closing(passes(loader())) as undisturbed, closing(passes(loader())) as after:
        seed_everything(7)
        expected = training(undisturbed, before)
        own, generators, position = undisturbed.own(), rng_state(), undisturbed.position()
        expected += training(undisturbed, 9)
        seed_everything(8)
        after.restore(position, own)
        after.restore_generators(own)
        restore_rng(generators)
        assert training(after, 9) == expected[before:]
        assert after.position() == undisturbed.position()


def test_a_snapshot_after_the_last_batch_of_a_whole_pass_is_exact() -> None:
    before, after = passes(with_a_generator()), passes(with_a_generator())
    for _ in before.batches(None):
        own, position = before.own(), before.position()
    after.restore(position, own)
    after.restore_generators(own)
    assert [batch[0].tolist() for batch in after.batches(None)] == [batch[0].tolist() for batch in before.batches(None)]


def test_loaders_may_have_a_generator_in_common() -> None:
    def both() -> list[Passes]:
        generator = torch.Generator().manual_seed(3)
        return [passes(DataLoader(Noisy(8), shuffle=True, generator=generator)) for _ in range(2)]

    def numbers(data: Passes, steps: int) -> list[int]:
        return [int(batch[0]) for batch in data.batches(steps)]

    before, after = both(), both()
    for data, steps in zip(before, (5, 3), strict=True):
        numbers(data, steps)
    handed_over_each(before, after)
    assert [numbers(data, 20) for data in after] == [numbers(data, 20) for data in before]


def handed_over_each(before: list[Passes], after: list[Passes]) -> None:
    owns = [data.own() for data in before]
    for old, new, own in zip(before, after, owns, strict=True):
        new.restore(old.position(), own)
    for new, own in zip(after, owns, strict=True):
        new.restore_generators(own)


def test_a_rank_that_is_new_skips_as_many_batches_as_rank_0_has_done() -> None:
    before = [passes(a_list(), 0, 1, 2)]
    assert len([*before[0].batches(2)]) == 2
    after = [passes(a_list(), rank, 2, 2) for rank in range(2)]
    handed_over(before, after)
    assert [[*rank.batches(None)] for rank in after] == [[[2], [3], [4]]] * 2


def test_data_that_has_become_shorter_ends_the_pass() -> None:
    before, after = passes(DataLoader(Stream(9))), passes(DataLoader(Stream(3)))
    assert len([*before.batches(6)]) == 6
    handed_over([before], [after])
    assert [int(batch) for batch in after.batches(None)] == [0, 1, 2]
    assert (after.begun, after.finished) == (2, 2)
