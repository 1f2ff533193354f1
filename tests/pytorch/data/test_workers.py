from __future__ import annotations

import os
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

from hpc_det.core.loader_workers import ClosableLoader, WorkerInit
from hpc_det.pytorch.data.workers import SeededDataset
from tests.facts import refused

pytestmark = pytest.mark.integration

Capture = pytest.CaptureFixture[str]


def loader(dataset: Dataset[Any], **options: Any) -> ClosableLoader:
    return ClosableLoader(dataset, **{"num_workers": 1, "worker_init_fn": WorkerInit(None), **options})


class Numbers(Dataset[Any]):
    """Each record is the ID of the process that loads it."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        return os.getpid()


# --- the users' worker_init_fn


class Named(Dataset[Any]):
    name = "nobody"

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> str:
        return self.name


def name_dataset(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.name = f"{info.dataset.name} of worker {worker_id}"  # type: ignore[attr-defined]


def test_the_users_worker_init_fn_runs_too_and_reaches_the_dataset() -> None:
    dataset = SeededDataset(Named(), "seed")
    batches = loader(dataset, batch_sampler=[((0, 0), [1, 2])], worker_init_fn=WorkerInit(name_dataset))
    assert list(batches) == [["nobody of worker 0"] * 2]


# --- random numbers


class Noisy(Dataset[Any]):
    """Draws from every global generator for each record, as augmentation does."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, random.random(), float(np.random.random()), float(torch.rand(()))


def noisy_collate(records: list[Any]) -> list[Any]:
    return [records, random.random(), float(np.random.random()), float(torch.rand(()))]


BATCHES = [((epoch, done), [done, done + 1]) for epoch in range(2) for done in range(0, 10, 2)]


def noise(batches: list[Any], workers: int, seed: str = "seed") -> list[Any]:
    return list(
        loader(SeededDataset(Noisy(), seed), batch_sampler=batches, num_workers=workers, collate_fn=noisy_collate)
    )


def test_random_numbers_depend_on_the_batch_alone() -> None:
    undisturbed = noise(BATCHES, workers=1)
    assert noise(BATCHES, workers=2) == undisturbed
    assert noise(BATCHES[4:], workers=2) == undisturbed[4:]


def test_every_batch_and_every_seed_has_its_own() -> None:
    found = noise(BATCHES, workers=1) + noise(BATCHES, workers=1, seed="other")
    for generator in (1, 2, 3):
        drawn = {record[generator] for batch in found for record in batch[0]} | {batch[generator] for batch in found}
        assert len(drawn) == 3 * len(found)


# --- the dataset in a worker


class AtOnce(Named):
    def __getitems__(self, indices: list[int]) -> list[str]:
        assert type(indices) is list
        return [f"{self.name} {index}" for index in indices]


def test_a_dataset_that_fetches_a_batch_at_once_does_so() -> None:
    assert SeededDataset(AtOnce(), "seed").__getitems__(((0, 0), [1, 2])) == ["nobody 1", "nobody 2"]


def test_it_looks_like_the_users_dataset() -> None:
    dataset: Any = SeededDataset(Named(), "seed")
    assert (len(dataset), dataset[0], dataset.name) == (4, "nobody", "nobody")
    with refused(AttributeError, "'Named'", "'color'"):
        dataset.color  # noqa: B018


def test_it_goes_to_processes_that_do_not_fork() -> None:
    dataset: Any = pickle.loads(pickle.dumps(SeededDataset(Named(), "seed")))
    assert dataset.__getitems__(((0, 0), [1, 2])) == ["nobody", "nobody"]
