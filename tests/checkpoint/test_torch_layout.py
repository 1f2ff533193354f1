from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import nullcontext
from io import BytesIO
from typing import Any

import pytest
import torch
from torch import nn

from hpc_det.checkpoint.torch_layout import is_supported, layout_of


def written(content: Any) -> bytes:
    file = layout_of(content)
    memory = torch.zeros(file.size, dtype=torch.uint8)
    file.fill(memory)
    return memory.numpy().tobytes()


def saved(content: Any) -> bytes:
    file = BytesIO()
    torch.save(content, file)
    return file.getvalue()


WEIGHTS = torch.arange(700.0).reshape(100, 7)


@pytest.mark.parametrize(
    "tensor",
    [
        WEIGHTS,
        WEIGHTS.t(),
        WEIGHTS[3:5],
        torch.tensor(3),
        torch.empty(0),
        torch.tensor([True, False]),
        WEIGHTS.bfloat16(),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.eye(3).to_sparse(),
        torch.ones(3, requires_grad=True),
        nn.Parameter(torch.ones(3)),
    ],
)
def test_each_kind_of_tensor_is_read_as_it_was(tensor: torch.Tensor) -> None:
    for weights_only in (True, False):
        found = torch.load(BytesIO(written({"tensor": tensor})), weights_only=weights_only)["tensor"]
        assert (type(found), found.dtype, found.layout) == (type(tensor), tensor.dtype, tensor.layout)
        assert found.requires_grad == tensor.requires_grad
        assert torch.equal(found.to_dense(), tensor.to_dense())


def test_tensors_that_share_memory_go_on_to_share_it() -> None:
    found = torch.load(BytesIO(written([WEIGHTS, WEIGHTS[1:], WEIGHTS.t()])), weights_only=True)
    assert {tensor.untyped_storage().data_ptr() for tensor in found} == {found[0].untyped_storage().data_ptr()}
    assert found[1].data_ptr() > found[0].data_ptr()


def test_no_byte_more_is_written_than_by_torch() -> None:
    layers = nn.Sequential(*(nn.Linear(30, 30) for _ in range(20)))
    content = {"models": [layers.state_dict()], "calls": 12}
    assert len(written(content)) == len(saved(content))


def test_hooks_of_one_loaded_tensor_are_not_anothers() -> None:
    first, second = torch.load(BytesIO(written([torch.ones(3), torch.ones(3)])), weights_only=True)
    first.requires_grad_().register_hook(lambda gradient: 2 * gradient)
    second.requires_grad_().sum().backward()
    assert torch.equal(second.grad, torch.ones(3))


def test_what_torch_refuses_is_refused() -> None:
    with pytest.raises((AttributeError, pickle.PicklingError)):
        layout_of(lambda: None)


# --- another torch


def has_no_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.serialization, "skip_data", nullcontext)


def has_no_skip_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.serialization, "skip_data")


def rebuilds_tensors_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._utils, "_rebuild_tensor_v2")


def writes_other_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each storage starts elsewhere than the gap that was left for it."""
    real = torch.save

    def save(content: Any, file: Any, **options: Any) -> None:
        write = file.write
        file.write = lambda data: write(bytes(bytes(data).swapcase()))
        real(content, file, **options)

    monkeypatch.setattr(torch, "save", save)


ANOTHER_TORCH = [has_no_gaps, has_no_skip_data, rebuilds_tensors_in_another_way, writes_other_bytes]


@pytest.fixture
def fresh_answer() -> Any:
    """Remove the process's answer about its torch before and after the test."""
    is_supported.cache_clear()
    yield
    is_supported.cache_clear()


@pytest.mark.parametrize("changed", ANOTHER_TORCH)
def test_another_layout_is_noticed_before_anything_is_written_in_it(
    changed: Callable[[pytest.MonkeyPatch], None], fresh_answer: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed(monkeypatch)
    assert not is_supported()


def test_the_layout_of_this_torch_is_known(fresh_answer: None) -> None:
    assert is_supported()
