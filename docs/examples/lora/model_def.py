"""Fine-tune a causal language model with LoRA on a text file; the last tenth of the file is for validation."""

from pathlib import Path

import torch
from lora import adapt, merge
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from hpc_det.pytorch import DataLoader, LRScheduler, PyTorchTrial, PyTorchTrialContext


class LoraTrial(PyTorchTrial):
    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        hparams = context.get_hparams()
        self.tokenizer = AutoTokenizer.from_pretrained(hparams["model"])
        model = AutoModelForCausalLM.from_pretrained(hparams["model"], dtype=hparams["dtype"])
        adapt(model, hparams["layers"], hparams["rank"], hparams["alpha"] / hparams["rank"])
        self.model = context.wrap_model(model)
        trained = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.optimizer = context.wrap_optimizer(torch.optim.AdamW(trained, lr=hparams["learning_rate"]))
        context.wrap_lr_scheduler(
            torch.optim.lr_scheduler.LinearLR(self.optimizer, start_factor=0.01, total_iters=hparams["warmup_batches"]),
            LRScheduler.StepMode.STEP_EVERY_OPTIMIZER_STEP,
        )

    def save_merged(self, folder: str) -> None:
        """Write the model with its adapters merged, for `AutoModelForCausalLM.from_pretrained(folder)`."""
        merge(self.model)
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def blocks(self, *, training: bool) -> Dataset:
        """Return consecutive blocks of `length` tokens of the text."""
        text = Path(self.context.get_data_config()["text"]).expanduser().read_text(encoding="utf-8")
        tokens = self.tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][0]
        begin, end = (0, len(tokens) * 9 // 10) if training else (len(tokens) * 9 // 10, len(tokens))
        length = self.context.get_hparam("length")
        return TensorDataset(tokens[begin : begin + (end - begin) // length * length].reshape(-1, length))

    def build_training_data_loader(self) -> DataLoader:
        size = self.context.get_per_slot_batch_size()
        return DataLoader(self.blocks(training=True), size, shuffle=True, drop_last=True)

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(self.blocks(training=False), self.context.get_per_slot_batch_size())

    def loss(self, batch):
        (tokens,) = batch
        return self.model(input_ids=tokens, labels=tokens).loss  # the model shifts the labels

    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = self.loss(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer, clip_grads=lambda weights: nn.utils.clip_grad_norm_(weights, 1.0))
        return {"loss": loss}

    def evaluate_batch(self, batch):
        return {"validation_loss": self.loss(batch)}
