"""Loaders that accelerate has prepared: a DataLoader inside, and a generator that reads one batch ahead."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader

from hpc_det.core.external_loader import torch_loader_of
from hpc_det.core.loader import ReplayedLoader
from hpc_det.core.loader_workers import WorkerInit
from hpc_det.distributed.rng import restore_rng, rng_state
from tests.core import loaders
from tests.core.loaders import Noisy, Numbers, differing, resumed, undisturbed

accelerate = pytest.importorskip("accelerate")
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402


@pytest.fixture(autouse=True)
def own_generators() -> Iterator[None]:
    before = rng_state()
    yield
    restore_rng(before)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def prepared(data: type[Numbers], *, seedable: bool = False, kind: Any = loaders.shuffled, **options: Any) -> Any:
    configuration = accelerate.DataLoaderConfiguration(use_seedable_sampler=seedable, data_seed=4)
    return accelerate.Accelerator(cpu=True, dataloader_config=configuration).prepare(kind(data, **options))


def stateful(data: type[Numbers], **options: Any) -> Any:
    pytest.importorskip("torchdata.stateful_dataloader")
    configuration = accelerate.DataLoaderConfiguration(use_stateful_dataloader=True)
    return accelerate.Accelerator(cpu=True, dataloader_config=configuration).prepare(loaders.shuffled(data, **options))


def of_rank_1(data: type[Numbers]) -> Any:
    """Return what accelerate makes of a loader on rank 1 of 2."""
    inner = DataLoader(data(24), batch_size=2)
    return DataLoaderShard(inner.dataset, batch_sampler=BatchSamplerShard(inner.batch_sampler, 2, 1))


@pytest.mark.parametrize("seedable", [False, True])
@pytest.mark.parametrize("kind", [loaders.shuffled, loaders.with_a_generator, loaders.with_a_batch_sampler])
def test_it_continues_bit_for_bit(kind: Any, seedable: bool) -> None:
    assert differing(functools.partial(prepared, Numbers, kind=kind, seedable=seedable)) == []


def test_so_does_the_share_of_a_rank() -> None:
    assert differing(functools.partial(of_rank_1, Numbers)) == []


def test_random_records_of_the_first_batch_alone_differ() -> None:
    """Accelerate draws them a step earlier, from a state that is not saved. All later numbers are the same."""
    make = functools.partial(prepared, Noisy)
    steps, all_saved = undisturbed(make)
    for saved in (saved for saved in all_saved if saved.done < loaders.BATCHES):
        first, *later = resumed(make, saved)
        index = saved.epoch * 6 + saved.done
        assert first[0] != steps[index][0]
        assert (first[0][0], first[1]) == (steps[index][0][0], steps[index][1])
        assert later == steps[index + 1 :]


def test_no_record_of_a_skipped_batch_is_read() -> None:
    made: list[Any] = []

    def make() -> Any:
        made.append(prepared(Numbers))
        return made[-1]

    _, all_saved = undisturbed(make, at=[(2, 4)])
    resumed(make, all_saved[0])
    assert len(made[1].dataset.read) == 4


def test_the_end_of_a_pass_is_still_known_to_accelerate() -> None:
    loader = prepared(Numbers)
    ends = [loader.end_of_dataloader for _ in ReplayedLoader(loader).resume(1, 3, None)]
    assert ends == [False, False, True]


def test_its_workers_ignore_the_stop_signals() -> None:
    loader = prepared(Numbers, num_workers=1)
    ReplayedLoader(loader)
    inner = torch_loader_of(loader)
    assert inner is not None
    assert isinstance(inner.worker_init_fn, WorkerInit)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13
def test_a_stateful_loader_inside_continues_bit_for_bit() -> None:
    assert differing(functools.partial(stateful, Numbers)) == []


@pytest.mark.integration
@pytest.mark.parametrize("persistent", [False, True])
def test_random_records_of_workers_continue_bit_for_bit(persistent: bool) -> None:
    make = functools.partial(prepared, Noisy, num_workers=2, persistent_workers=persistent)
    assert differing(make, passes=2, at=[(0, 1), (0, 6), (1, 4)], seed=5) == []


@pytest.mark.integration
def test_without_a_seed_they_are_read_again() -> None:
    make = functools.partial(prepared, Noisy, num_workers=2)
    assert differing(make, passes=2, at=[(0, 1), (0, 6), (1, 4)]) == []
