"""torchdata's StatefulDataLoader, which saves and restores its position itself."""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, RandomSampler

from hpc_det.core.loader import ReplayedLoader
from hpc_det.distributed.rng import restore_rng, rng_state
from tests.core.loaders import Noisy, Numbers, differing, resumed, undisturbed

torchdata = pytest.importorskip("torchdata.stateful_dataloader")

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


KINDS = [shuffled, with_a_generator, with_torchs_sampler]


@pytest.mark.parametrize("data", [Numbers, Noisy])
@pytest.mark.parametrize("kind", KINDS)
def test_it_continues_bit_for_bit(kind: Any, data: type[Any]) -> None:
    assert differing(functools.partial(kind, data)) == []


def test_so_does_a_stream_with_a_state_and_reads_nothing_again() -> None:
    made: list[Any] = []

    def make() -> Any:
        made.append(stateful(Place))
        return made[-1]

    steps, all_saved = undisturbed(make, at=[(1, 4)])
    assert resumed(make, all_saved[0]) == steps[10:]
    assert made[1].dataset.read == [8, 9, 10, 11, *range(12)]
    assert differing(functools.partial(stateful, Place)) == []


def test_the_state_at_the_border_of_a_pass_is_not_asked_for() -> None:
    torch_loader = shuffled(Numbers)
    loader = ReplayedLoader(torch_loader)
    states = [loader.state()]
    for _ in loader.begin(0):
        states.append(loader.state())
    states.append(loader.state())
    assert [state is None for state in states] == [True] + [False] * 5 + [True] * 2


def test_the_state_loads_without_pickle() -> None:
    _, all_saved = undisturbed(functools.partial(shuffled, Numbers), at=[(1, 3)])
    file = io.BytesIO()
    torch.save(all_saved[0].began, file)
    file.seek(0)
    assert "loader" in torch.load(file, weights_only=True)


def test_without_its_state_it_is_read_from_the_beginning() -> None:
    loader = ReplayedLoader(stateful(Numbers))
    assert [batch.tolist() for batch in loader.resume(0, 4, None)] == [[8, 9], [10, 11]]


@pytest.mark.integration
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_with_workers_records_without_random_numbers_continue(kind: Any, persistent: bool) -> None:
    make = functools.partial(kind, Numbers, num_workers=2, persistent_workers=persistent)
    assert differing(make, passes=2, at=SOME) == []


@pytest.mark.integration
@pytest.mark.parametrize("seed", [None, 5])
def test_random_records_of_its_workers_differ_in_the_middle_of_a_pass(seed: int | None) -> None:
    """Its state does not contain the generators of its workers, and its indices cannot carry seeds."""
    make = functools.partial(shuffled, Noisy, num_workers=2)
    steps, all_saved = undisturbed(make, passes=2, at=[(0, 3), (0, 6)], seed=seed)
    middle, border = (resumed(make, saved, passes=2, seed=seed) for saved in all_saved)
    assert border == steps[6:]
    assert middle != steps[3:]
    assert without_noise(middle) == without_noise(steps[3:])


def without_noise(steps: list[Any]) -> list[Any]:
    return [(batch[0], drawn) for batch, drawn in steps]
