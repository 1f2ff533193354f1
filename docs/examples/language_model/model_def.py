"""A recurrent network that learns to predict the next character of Shakespeare's sonnets (text.txt, 13 kB)."""

import math
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

from hpc_det.pytorch import DataLoader, LRScheduler, PyTorchTrial, PyTorchTrialContext

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


def perplexity(batches: list[tuple[torch.Tensor, int]]) -> float:
    """Return the perplexity over all pairs (loss, number of sequences) of a validation."""
    loss = sum(loss * sequences for loss, sequences in batches) / sum(sequences for _, sequences in batches)
    return math.exp(loss)


class SonnetTrial(PyTorchTrial):
    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        model = LanguageModel(context.get_hparam("width"), context.get_hparam("dropout"))
        self.model = context.wrap_model(model)
        self.optimizer = context.wrap_optimizer(
            torch.optim.AdamW(model.parameters(), lr=context.get_hparam("learning_rate"))
        )
        warmup = context.get_hparam("warmup_batches")
        context.wrap_lr_scheduler(
            torch.optim.lr_scheduler.LambdaLR(
                self.optimizer, lambda batch: min((batch + 1) / warmup, math.sqrt(warmup / (batch + 1)))
            ),
            LRScheduler.StepMode.STEP_EVERY_BATCH,
        )
        self.criterion = nn.CrossEntropyLoss()
        # a reducer, since the mean of the perplexities of batches is larger
        self.perplexity = context.wrap_reducer(perplexity, "perplexity", for_training=False)

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(
            Stretches(TEXT[:TRAINING], self.context.get_hparam("sequence_length"), stride=1),
            batch_size=self.context.get_per_slot_batch_size(),
            shuffle=True,
        )

    def build_validation_data_loader(self) -> DataLoader:
        length = self.context.get_hparam("sequence_length")
        return DataLoader(
            Stretches(TEXT[TRAINING:], length, stride=length), batch_size=self.context.get_per_slot_batch_size()
        )

    def train_batch(self, batch, epoch_idx, batch_idx):
        characters, following = batch
        loss = self.criterion(self.model(characters), following)
        self.context.backward(loss)
        self.context.step_optimizer(
            self.optimizer, clip_grads=lambda parameters: nn.utils.clip_grad_norm_(parameters, 1.0)
        )
        return {"loss": loss}

    def evaluate_batch(self, batch):
        characters, following = batch
        loss = self.criterion(self.model(characters), following)
        self.perplexity.update((loss, len(characters)))
        return {"validation_loss": loss}
