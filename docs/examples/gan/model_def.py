"""A small GAN that learns to generate points from a ring of eight Gaussians.

It has two models, two optimizers, and two learning-rate schedulers that step at different times.
"""

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from hpc_det.pytorch import DataLoader, LRScheduler, PyTorchTrial, PyTorchTrialContext

NOISE = 8


def ring(records: int, *, seed: int) -> Dataset:
    """Return points (x, y) around eight centres on the unit circle."""
    generator = torch.Generator().manual_seed(seed)
    angles = torch.randint(8, (records,), generator=generator) * (torch.pi / 4)
    centres = torch.stack([angles.cos(), angles.sin()], dim=1)
    return TensorDataset(centres + 0.05 * torch.randn(records, 2, generator=generator))


def network(inputs: int, outputs: int, width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs)
    )


def blurred(points: torch.Tensor) -> torch.Tensor:
    """Return points with noise, which makes real and fake harder to distinguish (Sonderby et al., 2017)."""
    return points + 0.2 * torch.randn_like(points)


def energy_distance(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the distance between two samples of points; 0 for equal distributions (Szekely and Rizzo, 2013)."""

    def mean_distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.cdist(a, b).mean()

    return 2 * mean_distance(first, second) - mean_distance(first, first) - mean_distance(second, second)


class GanTrial(PyTorchTrial):
    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        width = context.get_hparam("width")
        self.generator = context.wrap_model(network(NOISE, 2, width))
        self.discriminator = context.wrap_model(network(2, 1, width))
        self.generator_optimizer = context.wrap_optimizer(
            torch.optim.Adam(self.generator.parameters(), lr=context.get_hparam("generator_rate"), betas=(0.5, 0.9))
        )
        self.discriminator_optimizer = context.wrap_optimizer(
            torch.optim.Adam(
                self.discriminator.parameters(), lr=context.get_hparam("discriminator_rate"), betas=(0.5, 0.9)
            )
        )
        # the rate of the discriminator decreases first, so that the generator converges
        context.wrap_lr_scheduler(
            torch.optim.lr_scheduler.ExponentialLR(self.generator_optimizer, gamma=0.99),
            LRScheduler.StepMode.STEP_EVERY_EPOCH,
        )
        context.wrap_lr_scheduler(
            torch.optim.lr_scheduler.ExponentialLR(self.discriminator_optimizer, gamma=0.9),
            LRScheduler.StepMode.STEP_EVERY_BATCH,
            frequency=100,
        )
        self.criterion = nn.BCEWithLogitsLoss()

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(ring(4096, seed=1), batch_size=self.context.get_per_slot_batch_size(), shuffle=True)

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(ring(1024, seed=2), batch_size=512)

    def train_batch(self, batch, epoch_idx, batch_idx):
        (real,) = batch
        fake = self.generate(len(real))
        verdict = self.discriminator(blurred(fake))
        generator_loss = self.criterion(verdict, torch.ones_like(verdict))
        self.context.backward(generator_loss)
        self.context.step_optimizer(self.generator_optimizer)

        self.discriminator_optimizer.zero_grad()  # also deletes the gradients of the generator's loss
        verdict = self.discriminator(blurred(torch.cat([real, fake.detach()])))
        truth = torch.cat([torch.ones(len(real), 1), torch.zeros(len(fake), 1)]).to(verdict)
        discriminator_loss = self.criterion(verdict, truth)
        self.context.backward(discriminator_loss)
        self.context.step_optimizer(self.discriminator_optimizer)
        return {"generator_loss": generator_loss, "discriminator_loss": discriminator_loss}

    def evaluate_batch(self, batch):
        (real,) = batch
        return {"energy_distance": energy_distance(real, self.generate(len(real)))}

    def generate(self, records: int) -> torch.Tensor:
        return self.generator(torch.randn(records, NOISE, device=self.context.device))
