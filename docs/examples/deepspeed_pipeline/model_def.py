"""Pipeline parallelism: one rank holds the first half of a network, another rank the second half.

The engine splits a batch of handwritten digits (shipped with scikit-learn) into micro batches. While the second stage
processes one, the first processes the next. On 4 slots there are two such pipelines, each with half of the data.
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
    """Return pairs (64 brightnesses in 0..1, digit). Every fifth image is for validation."""
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
        # different numbers on each stage; all copies of a stage start with the weights of the first copy
        torch.manual_seed(context.get_trial_seed() + context.distributed.get_rank())
        # specs instead of layers: each rank builds only the layers of its stage
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
        """Return a loader of micro batches of equal size, since the stages fix the shapes of their messages once."""
        size = self.engine.train_micro_batch_size_per_gpu()
        return DataLoader(digits(training=training), batch_size=size, shuffle=training, drop_last=True)

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        return {"loss": self.engine.train_batch(dataloader_iter)}

    def evaluate_batch(self, dataloader_iter, batch_idx):
        return {"validation_loss": self.engine.eval_batch(dataloader_iter)}
