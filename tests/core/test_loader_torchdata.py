"""torchdata's StatefulDataLoader, which saves and restores its position itself."""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler

from hpc_det.core.loader import ReplayedLoader
from hpc_det.distributed.rng import restore_rng, rng_state
from tests.core.loaders import Noisy, Numbers, differing, resumed, undisturbed

torchdata = pytest.importorskip("torchdata.stateful_dataloader")
torchdata_sampler = pytest.importorskip("torchdata.stateful_dataloader.sampler")

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13

SOME = [(0, 1), (0, 6), (1, 4)]


@pytest.fixture(autouse=True)
def own_generators() -> Iterator[None]:
    before = rng_state()
    yield
    restore_rng(before)


def stateful(data: type[Any], **options: Any) -> Any:
    return torchdata.StatefulDataLoader(data(), batch_size=2, **options)


def shuffled(data: type[Any], **options: Any) -> Any:
    return stateful(data, shuffle=True, **options)


def with_a_generator(data: type[Any], **options: Any) -> Any:
    return stateful(data, shuffle=True, generator=torch.Generator().manual_seed(3), **options)


def with_torchs_sampler(data: type[Any], **options: Any) -> Any:
    return stateful(data, sampler=RandomSampler(data()), **options)


class Place(IterableDataset[Any]):
    """A stream with a state of its own, which counts what it reads."""

    def __init__(self) -> None:
        self._next = 0
        self.read: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        while self._next < 12:
            number, self._next = self._next, self._next + 1
            self.read.append(number)
            yield number, float(torch.rand(()))
        self._next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]


class Remembering(Numbers):
    """A map-style data set with a state: the number of records that it has read."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def __getitem__(self, index: int) -> Any:
        self._count += 1
        return super().__getitem__(index), self._count

    def state_dict(self) -> dict[str, int]:
        return {"count": self._count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._count = state["count"]


def with_a_batch_sampler(data: type[Any], **options: Any) -> Any:
    records = data()
    return torchdata.StatefulDataLoader(
        records, batch_sampler=BatchSampler(RandomSampler(records), 2, False), **options
    )


KINDS = [shuffled, with_a_generator, with_torchs_sampler, with_a_batch_sampler]


@pytest.mark.parametrize("data", [Numbers, Noisy])
@pytest.mark.parametrize("kind", KINDS)
def test_a_map_style_data_set_continues_bit_for_bit(kind: Any, data: type[Any]) -> None:
    assert differing(functools.partial(kind, data)) == []


@pytest.mark.parametrize("data", [Place, Remembering])
def test_data_with_a_state_continues_and_reads_nothing_again(data: type[Any]) -> None:
    made: list[Any] = []

    def make() -> Any:
        made.append(stateful(data))
        return made[-1]

    steps, all_saved = undisturbed(make, passes=2, at=[(0, 4)])
    assert resumed(make, all_saved[0], passes=2) == steps[4:]
    assert made[1].dataset.read == [8, 9, 10, 11, *range(12)]


def test_a_stream_with_a_state_continues_bit_for_bit() -> None:
    assert differing(functools.partial(stateful, Place)) == []


def test_a_sampler_with_a_state_continues_bit_for_bit() -> None:
    def make() -> Any:
        records = Noisy(24)
        sampler = torchdata_sampler.StatefulDistributedSampler(records, num_replicas=2, rank=1)
        return torchdata.StatefulDataLoader(records, batch_size=2, sampler=sampler)

    assert differing(make) == []


def test_the_state_at_the_border_of_a_pass_is_not_asked_for() -> None:
    loader = ReplayedLoader(stateful(Remembering))
    states = [loader.state()]
    for _ in loader.begin(0):
        states.append(loader.state())
    states.append(loader.state())
    assert [state is None for state in states] == [True] + [False] * 5 + [True] * 2


def test_the_state_loads_without_pickle() -> None:
    _, all_saved = undisturbed(functools.partial(stateful, Place), at=[(1, 3)])
    file = io.BytesIO()
    torch.save(all_saved[0].began, file)
    file.seek(0)
    assert "loader" in torch.load(file, weights_only=True)


def test_without_its_state_it_is_read_from_the_beginning() -> None:
    loader = ReplayedLoader(stateful(Remembering))
    assert [batch[0].tolist() for batch in loader.resume(0, 4, None)] == [[8, 9], [10, 11]]


@pytest.mark.integration
@pytest.mark.parametrize("persistent", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", KINDS)
def test_with_workers_records_without_random_numbers_continue(kind: Any, persistent: bool) -> None:
    make = functools.partial(kind, Numbers, num_workers=2, persistent_workers=persistent)
    assert differing(make, passes=2, at=SOME) == []


@pytest.mark.integration
@pytest.mark.parametrize("persistent", [False, True])
def test_with_a_seed_random_records_of_workers_continue_too(persistent: bool) -> None:
    make = functools.partial(shuffled, Noisy, num_workers=2, persistent_workers=persistent)
    assert differing(make, passes=2, at=SOME, seed=5) == []


@pytest.mark.integration
def test_without_a_seed_random_records_of_workers_differ_in_the_middle_of_a_pass() -> None:
    """The state of the loader does not contain the generators of its workers."""
    make = functools.partial(shuffled, Noisy, num_workers=2)
    steps, all_saved = undisturbed(make, passes=2, at=[(0, 3), (0, 6)])
    middle, *border = (resumed(make, saved, passes=2) for saved in all_saved)
    assert border == [steps[6:]] * 2
    assert middle != steps[3:]
    assert without_noise(middle) == without_noise(steps[3:])


def without_noise(steps: list[Any]) -> list[Any]:
    return [(batch[0], drawn) for batch, drawn in steps]
