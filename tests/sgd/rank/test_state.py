from __future__ import annotations

import pickle

import pytest
import torch

from hpc_det.sgd.rank.state import pickled

TENSORS = {
    "a number": torch.tensor(3.0),
    "no number": torch.empty(0, 3),
    "a transposed one": torch.arange(12.0).view(3, 4).t(),
    "a type that numpy has not": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "a conjugated one": torch.tensor([1 + 2j]).conj(),
    "a sparse one": torch.eye(3).to_sparse(),
    "one with a gradient": torch.ones(2, requires_grad=True),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_ranks_own_part_comes_back_as_it_was(name: str) -> None:
    tensor = TENSORS[name]

    back = pickle.loads(pickled({"nested": [tensor]}))["nested"][0]

    assert (back.dtype, back.layout, back.requires_grad) == (tensor.dtype, tensor.layout, tensor.requires_grad)
    assert torch.equal(back.to_dense(), tensor.to_dense())


def test_what_comes_back_can_be_written_to() -> None:
    back = pickle.loads(pickled(torch.zeros(2)))

    back += 1

    assert back.tolist() == [1, 1]
