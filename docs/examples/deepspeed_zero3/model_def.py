"""Train a language model from random weights with DeepSpeed's ZeRO-3: each rank holds a part of every weight.

The trial defines model and data. ds_config.json configures optimizer, schedule, batch sizes, precision and ZeRO;
`overwrite_deepspeed_args` of the experiment overrides it.
"""

from pathlib import Path

import deepspeed
import numpy as np
import torch
from gpt import GPT
from torch import nn
from torch.utils.data import Dataset, Subset

from hpc_det.pytorch import DataLoader
from hpc_det.pytorch.deepspeed import DeepSpeedTrial, DeepSpeedTrialContext, get_ds_config_from_hparams


class Tokens(Dataset):
    """Blocks of `length` + 1 tokens of a file: the bytes of a text, or 16-bit numbers for larger vocabularies."""

    def __init__(self, file: Path, vocabulary: int, length: int) -> None:
        self.tokens = np.memmap(file, np.uint8 if vocabulary <= 256 else np.uint16, mode="r")
        self.length = length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        start = index * self.length
        return torch.from_numpy(self.tokens[start : start + self.length + 1].astype(np.int64))


class GptTrial(DeepSpeedTrial):
    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        hparams = context.get_hparams()
        config = get_ds_config_from_hparams(hparams)
        file = Path(context.get_data_config()["tokens"]).expanduser()
        self.blocks = Tokens(file, hparams["vocabulary"], hparams["length"])
        # divides each weight as soon as it exists, so that no rank ever holds the whole model
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = GPT(*(hparams[name] for name in ("vocabulary", "length", "width", "heads", "blocks")))
        engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        self.engine = context.wrap_model_engine(engine)

    def build_training_data_loader(self) -> DataLoader:
        size = self.engine.train_micro_batch_size_per_gpu()
        blocks = Subset(self.blocks, range(len(self.blocks) * 9 // 10))
        return DataLoader(blocks, size, shuffle=True, drop_last=True)

    def build_validation_data_loader(self) -> DataLoader:
        blocks = Subset(self.blocks, range(len(self.blocks) * 9 // 10, len(self.blocks)))
        return DataLoader(blocks, self.engine.train_micro_batch_size_per_gpu())

    def loss(self, dataloader_iter) -> torch.Tensor:
        tokens = self.context.to_device(next(dataloader_iter))
        scores = self.engine(tokens[:, :-1])
        return nn.functional.cross_entropy(scores.float().flatten(0, 1), tokens[:, 1:].flatten())

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        loss = self.loss(dataloader_iter)
        self.engine.backward(loss)
        self.engine.step()  # changes the weights after the last micro batch of a batch
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter, batch_idx):
        return {"validation_loss": self.loss(dataloader_iter)}
