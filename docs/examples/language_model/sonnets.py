"""Shakespeare's sonnets (text.txt, 13 kB), and a recurrent network that learns to predict their next character.

model_def.py trains it as a PyTorchTrial, plain_loop.py in a plain loop.
"""

import math
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

TEXT = Path(__file__).with_name("text.txt").read_text(encoding="utf-8")
CHARACTERS = sorted(set(TEXT))
TRAINING = len(TEXT) * 9 // 10  # the last tenth is for validation


class Stretches(Dataset):
    """Pairs (`length` characters, the character after each of them), one for every `stride`-th position of a text."""

    def __init__(self, text: str, length: int, stride: int) -> None:
        self.numbers = torch.tensor([CHARACTERS.index(character) for character in text])
        self.length = length
        self.starts = range(0, len(text) - length, stride)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = self.starts[index]
        return self.numbers[start : start + self.length], self.numbers[start + 1 : start + self.length + 1]


class LanguageModel(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(CHARACTERS), width // 2)
        self.recurrent = nn.GRU(width // 2, width, batch_first=True)
        self.output = nn.Linear(width, len(CHARACTERS))
        self.dropout = nn.Dropout(dropout)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """Return scores, batch x characters x length, for character numbers, batch x length."""
        states, _ = self.recurrent(self.dropout(self.embedding(characters)))
        return self.output(self.dropout(states)).transpose(1, 2)


def warmed_up(optimizer: torch.optim.Optimizer, warmup: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Return a scheduler to step at every batch: linear for `warmup` batches, then by the inverse square root."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda batch: min((batch + 1) / warmup, math.sqrt(warmup / (batch + 1)))
    )
