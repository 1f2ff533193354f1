from __future__ import annotations

import os
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import pytest
import torch

from hpc_det.checkpoint.torch_layout import is_supported
from hpc_det.sgd.rank.worker import Buffers


@pytest.fixture
def descriptors() -> Iterator[list[int]]:
    made = [os.memfd_create(f"snapshot-{number}") for number in range(2)]
    yield made
    for descriptor in made:
        os.close(descriptor)


@pytest.fixture
def buffers(descriptors: list[int]) -> Buffers:
    return Buffers(descriptors)


def read(buffers: Buffers, number: int) -> Any:
    return torch.load(buffers.path(number), weights_only=False)


def test_torch_reads_what_was_written_last(buffers: Buffers) -> None:
    weights = torch.arange(1000.0)
    content = {"weights": weights, "its end": weights[900:], "calls": 1}
    buffers.write(0, content)
    weights += 1
    buffers.write(1, {**content, "calls": 2})
    first, second = read(buffers, 0), read(buffers, 1)
    assert (first["calls"], second["calls"]) == (1, 2)
    assert torch.equal(first["weights"] + 1, weights)
    assert torch.equal(second["weights"], weights)
    assert second["its end"].untyped_storage().data_ptr() == second["weights"].untyped_storage().data_ptr()


@pytest.mark.integration
@pytest.mark.parametrize("sizes", [(10, 4_000_000), (4_000_000, 10), (4_000_000, 10, 3_000_000, 4_000_100, 5_000_000)])
def test_a_state_may_grow_and_shrink(buffers: Buffers, sizes: tuple[int, ...]) -> None:
    for size in sizes:
        weights, log, expected = torch.rand(size), "x" * size, BytesIO()
        buffers.write(0, {"weights": weights, "log": log})
        torch.save({"weights": weights, "log": log}, expected)
        found = read(buffers, 0)
        assert torch.equal(found["weights"], weights)
        assert found["log"] == log
        assert os.stat(buffers.path(0)).st_size == len(expected.getbuffer())


def test_another_process_that_writes_to_the_same_memory_goes_on_with_it(descriptors: list[int]) -> None:
    """The ranks of the next gang use the same memory in this way."""
    first, next_one = Buffers(descriptors), Buffers(descriptors)
    for turn, buffers in enumerate((first, next_one, first)):
        content = torch.full((2_000_000,), turn)
        buffers.write(0, content)
        assert torch.equal(read(first, 0), content)
    assert torch.equal(read(next_one, 0), torch.full((2_000_000,), 2))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_cannot_be_laid_out_is_saved_all_the_same(buffers: Buffers) -> None:
    quantized = torch.quantize_per_tensor(torch.arange(1000.0), scale=4.0, zero_point=0, dtype=torch.quint8)
    for content in (torch.ones(5000), quantized, torch.zeros(5000)):
        buffers.write(0, content)
        assert torch.equal(read(buffers, 0), content)


def test_with_a_torch_of_another_layout_snapshots_are_saved_by_torch_itself(
    buffers: Buffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.serialization, "skip_data")
    is_supported.cache_clear()
    try:
        for weights in (torch.arange(5000.0), torch.arange(10.0)):
            buffers.write(0, {"weights": weights})
            assert torch.equal(read(buffers, 0)["weights"], weights)
    finally:
        is_supported.cache_clear()
