from __future__ import annotations

import functools
import io
import multiprocessing
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from hpc_det.core.external_loader import generators_of, set_epoch
from hpc_det.core.loader import ReplayedLoader
from hpc_det.core.loader_indices import SeededIndex
from hpc_det.distributed.rng import restore_rng, rng_state, seed_everything
from tests.core import loaders
from tests.core.loaders import MAP_STYLE, OTHERS, Make, Noisy, Numbers, differing, plain, resumed, undisturbed


@pytest.fixture(autouse=True)
def own_generators() -> Iterator[None]:
    before = rng_state()
    yield
    restore_rng(before)


# --- without workers


@pytest.mark.parametrize("data", [Numbers, Noisy])
@pytest.mark.parametrize("kind", MAP_STYLE)
def test_a_map_style_loader_continues_bit_for_bit(kind: Callable[..., Any], data: type[Numbers]) -> None:
    assert differing(functools.partial(kind, data)) == []


@pytest.mark.parametrize("make", OTHERS)
def test_any_other_iterable_continues_bit_for_bit(make: Make) -> None:
    assert differing(make) == []


def test_a_generator_continues_in_its_only_pass() -> None:
    def noisy() -> Iterator[Any]:
        for number in range(6):
            yield number, random.random()

    assert differing(noisy, passes=1, at=[(0, done) for done in range(1, 6)]) == []


def test_a_seed_changes_nothing_without_workers() -> None:
    make = functools.partial(loaders.shuffled, Noisy)
    assert undisturbed(make, seed=5)[0] == undisturbed(make)[0]
    assert differing(make, seed=5) == []


def test_the_check_sees_a_loader_that_does_not_continue() -> None:
    """A negative control: this generator is not one that a loader shows."""
    hidden = [torch.Generator().manual_seed(3)]

    def noisy() -> Iterator[float]:
        for _ in range(6):
            yield float(torch.rand((), generator=hidden[0]))

    class Hidden:
        def __iter__(self) -> Iterator[float]:
            return noisy()

    assert differing(Hidden) != []


@pytest.mark.parametrize("kind", MAP_STYLE)
def test_no_record_of_a_skipped_batch_is_read(kind: Callable[..., Any]) -> None:
    made: list[Any] = []

    def make() -> Any:
        made.append(kind(Numbers))
        return made[-1]

    steps, all_saved = undisturbed(make, at=[(1, 4)])
    resumed(make, all_saved[0])
    expected = [record for batch, _ in steps[10:] for record in (batch if isinstance(batch, list) else [batch])]
    assert made[1].dataset.read == expected


def test_the_position_of_another_kind_is_read_and_dropped() -> None:
    records: list[int] = []

    class Recorded:
        def __iter__(self) -> Iterator[int]:
            for number in range(6):
                records.append(number)
                yield number

    loader = ReplayedLoader(Recorded())
    assert list(loader.resume(1, 4, None)) == [4, 5]
    assert records == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_continues_with_its_share(rank: int) -> None:
    def make() -> Any:
        records = Noisy(24)
        return DataLoader(records, batch_size=2, sampler=DistributedSampler(records, num_replicas=2, rank=rank))

    assert differing(make) == []
    steps, all_saved = undisturbed(make, at=[(2, 2)])
    own = [index for batch, _ in resumed(make, all_saved[0]) for index in batch[0]]
    order: DistributedSampler[Any] = DistributedSampler(Numbers(24), num_replicas=2, rank=rank)
    order.set_epoch(2)
    assert own == list(order)[4:]
    assert len(steps) == 18


def test_without_a_saved_state_the_position_alone_is_restored() -> None:
    records = Numbers()
    loader = ReplayedLoader(DataLoader(records, batch_size=2))
    before = torch.get_rng_state()
    assert [plain(batch) for batch in loader.resume(0, 4, None)] == [[8, 9], [10, 11]]
    assert torch.equal(torch.get_rng_state(), before)
    assert records.read == [8, 9, 10, 11]


def test_without_generators_to_restore_they_are_left_as_they_are() -> None:
    _, all_saved = undisturbed(functools.partial(loaders.shuffled, Noisy), at=[(0, 3)])
    seed_everything(5)
    expected = loaders.draws()
    seed_everything(5)
    loader = ReplayedLoader(loaders.shuffled(Noisy))
    loader.resume(0, 3, all_saved[0].began)
    assert loaders.draws() == expected


def test_a_pass_that_has_become_shorter_is_over() -> None:
    assert list(ReplayedLoader(DataLoader(Numbers(4), batch_size=2)).resume(0, 5, None)) == []


def test_the_state_loads_without_pickle() -> None:
    _, all_saved = undisturbed(functools.partial(loaders.with_a_generator, Noisy), at=[(1, 3)])
    file = io.BytesIO()
    torch.save(all_saved[0].began, file)
    file.seek(0)
    assert torch.load(file, weights_only=True).keys() == {"rng", "generators", "now"}


def test_two_loaders_may_have_a_generator_in_common() -> None:
    def both() -> list[ReplayedLoader]:
        generator = torch.Generator().manual_seed(3)
        return [ReplayedLoader(DataLoader(Numbers(8), shuffle=True, generator=generator)) for _ in range(2)]

    before, after = both(), both()
    open_passes = [loader.begin(0) for loader in before]
    for batches, done in zip(open_passes, (5, 3), strict=True):
        for _ in range(done):
            next(batches)
    saved = [loader.began() for loader in before]
    continued = [loader.resume(0, done, own) for loader, done, own in zip(after, (5, 3), saved, strict=True)]
    for old, new in zip(open_passes, continued, strict=True):
        assert [int(batch) for batch in new] == [int(batch) for batch in old]
    assert [*map(int, after[0].begin(1))] == [*map(int, before[0].begin(1))]


def test_an_iterable_with_more_batches_than_its_length_loses_none() -> None:
    class Longer:
        def __init__(self) -> None:
            self._numbers = iter(range(100))

        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Iterator[int]:
            return self._numbers

    loader = ReplayedLoader(Longer())
    taken: list[int] = []
    for epoch in range(2):
        taken += islice(loader.begin(epoch), 3)
        loader.generator_states()
    assert taken == [0, 1, 2, 3, 4, 5]


class Short(Sampler[int]):
    """A sampler with more indices than its length says."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(6))

    def __len__(self) -> int:
        return 4


def test_a_sampler_with_more_indices_than_its_length_loses_none() -> None:
    loader = ReplayedLoader(DataLoader(Numbers(), batch_size=None, sampler=Short()))
    taken = []
    for number in loader.begin(0):
        taken.append(number)
        loader.finish()
    assert taken == [0, 1, 2, 3, 4, 5]


class Unsized(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(6).tolist())


def test_a_sampler_may_have_no_length() -> None:
    def make() -> Any:
        return DataLoader(Noisy(), batch_size=None, sampler=Unsized())

    assert differing(make) == []


def test_a_loader_may_be_empty() -> None:
    loader = ReplayedLoader(DataLoader(Numbers(0)))
    assert [len(list(loader.begin(epoch))) for epoch in range(2)] == [0, 0]
    assert list(loader.resume(1, 0, loader.began())) == []


# --- the loader is left as it was


class Fails(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        raise ZeroDivisionError

    def __len__(self) -> int:
        return 4


def test_the_index_sampler_is_put_back_also_after_an_error() -> None:
    sampler = Fails()
    torch_loader = DataLoader(Numbers(4), batch_size=None, sampler=sampler)
    loader = ReplayedLoader(torch_loader)
    with pytest.raises(ZeroDivisionError):
        loader.resume(0, 2, None)
    assert torch_loader.sampler is sampler


def test_the_user_can_iterate_the_loader_meanwhile() -> None:
    torch_loader = loaders.in_order(Numbers)
    batches = ReplayedLoader(torch_loader).resume(1, 4, None)
    assert len(list(torch_loader)) == 6
    assert len(list(batches)) == 2


# --- samplers


class WithEpoch(Sampler[int]):
    def __init__(self, inner: Any = None, batch_sampler: Any = None) -> None:
        self.sampler = inner
        self.batch_sampler = batch_sampler
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def test_the_epoch_is_set_once_in_every_sampler_inside() -> None:
    innermost = WithEpoch()
    middle = WithEpoch(batch_sampler=innermost)
    outer = WithEpoch(inner=middle, batch_sampler=innermost)
    set_epoch(outer, 4)
    assert [outer.epochs, middle.epochs, innermost.epochs] == [[4]] * 3


def test_a_sampler_that_contains_itself_is_no_endless_loop() -> None:
    sampler = WithEpoch()
    sampler.sampler = sampler
    set_epoch(sampler, 1)
    assert 1 in sampler.epochs
    assert generators_of(DataLoader(Numbers(), sampler=sampler)) == []


# --- with workers


def test_an_index_for_a_worker_seeds_its_generators_when_it_arrives() -> None:
    sent = pickle.dumps(SeededIndex([3, 4], 11))
    random.seed(1)
    assert pickle.loads(sent) == [3, 4]
    first = loaders.draws()
    assert pickle.loads(pickle.dumps(SeededIndex(("a", 5), 11))) == ("a", 5)
    assert loaders.draws() == first
    pickle.loads(pickle.dumps(SeededIndex([3, 4], 12)))
    assert loaders.draws() != first


SOME = [(0, 1), (0, 6), (1, 4)]
"""Positions for loaders with workers, whose starts take time."""


@pytest.mark.integration
@pytest.mark.parametrize("persistent", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("seed", [pytest.param(None, marks=pytest.mark.long), 5])
@pytest.mark.parametrize("kind", [loaders.shuffled, loaders.with_a_generator, loaders.without_batches])
def test_random_records_of_workers_continue_bit_for_bit(
    kind: Callable[..., Any], seed: int | None, persistent: bool
) -> None:
    make = functools.partial(kind, Noisy, num_workers=2, persistent_workers=persistent)
    # Without a seed, the generators of persistent workers continue from pass to pass, and cannot be restored.
    impossible = [] if seed or not persistent else [(0, 6), (1, 4)]
    assert differing(make, at=SOME, seed=seed) == impossible


@pytest.mark.integration
def test_with_a_seed_the_number_of_workers_does_not_matter() -> None:
    makes = [functools.partial(loaders.shuffled, Noisy, num_workers=number) for number in (1, 2)]
    steps, all_saved = undisturbed(makes[0], passes=2, at=[(0, 4), (1, 2)], seed=5)
    assert undisturbed(makes[1], passes=2, seed=5)[0] == steps
    for saved in all_saved:
        assert resumed(makes[1], saved, passes=2, seed=5) == steps[saved.epoch * 6 + saved.done :]


@pytest.mark.integration
def test_every_batch_every_pass_and_every_seed_has_its_own_random_numbers() -> None:
    make = functools.partial(loaders.in_order, Noisy, num_workers=2)
    batches = [batch for seed in (5, 6) for batch, _ in undisturbed(make, passes=2, seed=seed)[0]]
    for generator in (1, 2, 3):
        assert len({number for batch in batches for number in batch[generator]}) == len(batches) * 2


class Counting(Numbers):
    """Counts the records that are read in any process."""

    def __init__(self, length: int = 12) -> None:
        super().__init__(length)
        self.reads = multiprocessing.get_context("fork").Value("i", 0)

    def __getitem__(self, index: int) -> int:
        with self.reads.get_lock():
            self.reads.value += 1
        return index


@pytest.mark.integration
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_read_no_record_of_a_skipped_batch(persistent: bool) -> None:
    made: list[Any] = []

    def make() -> Any:
        made.append(loaders.shuffled(Counting, num_workers=2, persistent_workers=persistent))
        return made[-1]

    _, all_saved = undisturbed(make, passes=2, at=[(1, 4)], seed=5)
    assert len(resumed(make, all_saved[0], passes=2, seed=5)) == 2
    assert made[1].dataset.reads.value == 4


@pytest.mark.integration
@pytest.mark.parametrize("seed", [None, 5])
def test_records_without_random_numbers_continue_with_persistent_workers(seed: int | None) -> None:
    make = functools.partial(loaders.shuffled, Numbers, num_workers=2, persistent_workers=True)
    assert differing(make, at=SOME, seed=seed) == []


@pytest.mark.integration
@pytest.mark.parametrize("persistent", [False, True])
def test_streams_of_workers_continue_bit_for_bit(persistent: bool) -> None:
    def make() -> Any:
        return DataLoader(loaders.Stream(6), batch_size=2, num_workers=2, persistent_workers=persistent)

    assert differing(make, at=SOME) == ([(0, 6), (1, 4)] if persistent else [])


@pytest.mark.integration
def test_a_loader_with_persistent_workers_can_be_iterated_again_after_its_end() -> None:
    torch_loader = loaders.in_order(Numbers, num_workers=1, persistent_workers=True)
    for _ in range(2):
        with closing(ReplayedLoader(torch_loader, seed=1)) as loader:
            assert [len(list(loader.begin(epoch))) for epoch in range(2)] == [6, 6]


@pytest.mark.integration
def test_the_user_can_iterate_a_loader_with_persistent_workers_meanwhile() -> None:
    torch_loader = loaders.in_order(Numbers, num_workers=1, persistent_workers=True)
    with closing(ReplayedLoader(torch_loader, seed=1)) as loader:
        assert len(list(loader.resume(0, 4, None))) == 2
        assert len(list(torch_loader)) == 6
