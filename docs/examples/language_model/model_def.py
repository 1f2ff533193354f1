"""A recurrent network that learns to predict the next character of Shakespeare's sonnets, as a PyTorchTrial."""

import math

import torch
from sonnets import TEXT, TRAINING, LanguageModel, Stretches, warmed_up
from torch import nn

from hpc_det.pytorch import DataLoader, LRScheduler, PyTorchTrial, PyTorchTrialContext


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
        context.wrap_lr_scheduler(
            warmed_up(self.optimizer, context.get_hparam("warmup_batches")), LRScheduler.StepMode.STEP_EVERY_BATCH
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
