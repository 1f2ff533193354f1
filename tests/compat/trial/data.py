# ruff: noqa: UP006, UP035
# mypy: ignore-errors
"""The digits that scikit-learn includes, behind the interface of a download."""

import os
from typing import Tuple

import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset


def download(directory: str, every: int) -> Tuple[torch.Tensor, torch.Tensor, int]:
    os.makedirs(directory, exist_ok=True)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return images, torch.tensor(digits.target), every


def dataset(data: Tuple[torch.Tensor, torch.Tensor, int], train: bool) -> TensorDataset:
    images, labels, every = data
    chosen = (torch.arange(len(labels)) % every != 0) == train
    return TensorDataset(images[chosen], labels[chosen])
