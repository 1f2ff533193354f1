"""Pipeline parallelism: the first half of a network lies on one rank, the second half on another.

The engine cuts a batch of handwritten digits (shipped inside scikit-learn) into micro batches, and while the second
stage works on one of them the first is at the next. On 4 slots there are two such pipelines, each with half the data.
"""

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from hpc_det.pytorch import DataLoader
from hpc_det.pytorch.deepspeed import DeepSpeedTrial, DeepSpeedTrialContext, get_ds_config_from_hparams


def digits(*, training: bool) -> Dataset:
    """(64 brightnesses in 0..1, digit): every fifth image is for validation."""
    data = load_digits()
    images = torch.tensor(data.data, dtype=torch.float32) / 16
    labels = torch.tensor(data.target)
    chosen = (torch.arange(len(labels)) % 5 != 0) == training
    return TensorDataset(images[chosen], labels[chosen])


class Block(nn.Module):
    """A residual block of two layers."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(2 * width, width),
        )

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states + self.inner(states)


class PipelineTrial(DeepSpeedTrial):
    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        width, dropout = context.get_hparam("width"), context.get_hparam("dropout")
        # Both stages would draw the same numbers. Copies of one stage begin with the weights of the first of them.
        torch.manual_seed(context.get_trial_seed() + context.distributed.get_rank())
        # Specs and not layers: each rank builds those of its own stage only.
        layers = [
            LayerSpec(nn.Linear, 64, width),
            *[LayerSpec(Block, width, dropout) for _ in range(context.get_hparam("blocks"))],
            LayerSpec(nn.LayerNorm, width),
            LayerSpec(nn.Linear, width, 10),
        ]
        model = PipelineModule(
            layers,
            num_stages=context.get_hparam("stages"),
            loss_fn=nn.CrossEntropyLoss(),
            partition_method="parameters",
        )
        engine, _, _, _ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            config=get_ds_config_from_hparams(context.get_hparams()),
        )
        self.engine = context.wrap_model_engine(engine)

    def build_training_data_loader(self) -> DataLoader:
        return self.loader(training=True)

    def build_validation_data_loader(self) -> DataLoader:
        return self.loader(training=False)

    def loader(self, *, training: bool) -> DataLoader:
        """Of micro batches, all of one size: the stages settle once what they send each other."""
        size = self.engine.train_micro_batch_size_per_gpu()
        return DataLoader(digits(training=training), batch_size=size, shuffle=training, drop_last=True)

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        return {"loss": self.engine.train_batch(dataloader_iter)}

    def evaluate_batch(self, dataloader_iter, batch_idx):
        return {"validation_loss": self.engine.eval_batch(dataloader_iter)}
