"""A DCGAN with two DeepSpeed engines: it learns to generate images of bright discs, 16 x 16 pixels.

Generator and discriminator train against each other, each with a separate optimizer. TensorBoard shows generated
images.
"""

import deepspeed
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from hpc_det.pytorch import DataLoader
from hpc_det.pytorch.deepspeed import DeepSpeedTrial, DeepSpeedTrialContext, get_ds_config_from_hparams

NOISE = 16
SIDE = 16  # pixels
REAL, FAKE = 1.0, 0.0


def discs(images: int, *, seed: int) -> Dataset:
    """Return images 1 x 16 x 16 with values in -1..1: discs of random position and size, with a soft edge."""
    places = torch.rand(images, 3, generator=torch.Generator().manual_seed(seed))
    x, y, radius = (
        part.view(images, 1, 1, 1) for part in (4 + 8 * places[:, 0], 4 + 8 * places[:, 1], 2 + 2 * places[:, 2])
    )
    pixels = torch.arange(SIDE) + 0.5
    distance = ((pixels - x) ** 2 + (pixels.view(-1, 1) - y) ** 2).sqrt()
    return TensorDataset((2 * (radius - distance)).tanh())


def generator(width: int) -> nn.Module:
    """Return a model from NOISE x 1 x 1 to 1 x 16 x 16."""
    return nn.Sequential(
        nn.ConvTranspose2d(NOISE, 2 * width, 4, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1),
        nn.Tanh(),
    )


def discriminator(width: int) -> nn.Module:
    """Return a model from 1 x 16 x 16 to a score, which is higher for real images."""
    return nn.Sequential(
        nn.Conv2d(1, width, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(width, 2 * width, 4, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.LeakyReLU(0.2),
        nn.Conv2d(2 * width, 1, 4),
        nn.Flatten(0),
    )


def energy_distance(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the distance between two samples of images; 0 for equal distributions (Szekely and Rizzo, 2013)."""

    def mean_distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.cdist(a.flatten(1), b.flatten(1)).mean()

    return 2 * mean_distance(first, second) - mean_distance(first, first) - mean_distance(second, second)


class DcganTrial(DeepSpeedTrial):
    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        context.disable_auto_grad_accumulation()  # train_batch takes all micro batches of a batch
        width = context.get_hparam("width")
        self.generator = self.engine(generator(width))
        self.discriminator = self.engine(discriminator(width))
        self.criterion = nn.BCEWithLogitsLoss()

    def engine(self, model: nn.Module) -> deepspeed.DeepSpeedEngine:
        config = get_ds_config_from_hparams(self.context.get_hparams())
        engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        return self.context.wrap_model_engine(engine)

    def build_training_data_loader(self) -> DataLoader:
        size = self.generator.train_micro_batch_size_per_gpu()
        return DataLoader(discs(2048, seed=1), batch_size=size, shuffle=True, drop_last=True)

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(discs(512, seed=2), batch_size=256)

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        """Train the discriminator, then the generator against the updated discriminator."""
        micro_batches = range(self.generator.gradient_accumulation_steps())
        discriminator_losses = [self.train_discriminator(next(dataloader_iter)) for _ in micro_batches]
        generator_losses = [self.train_generator() for _ in micro_batches]
        return {
            "discriminator_loss": torch.stack(discriminator_losses).mean(),
            "generator_loss": torch.stack(generator_losses).mean(),
        }

    def train_discriminator(self, batch) -> torch.Tensor:
        (real,) = self.context.to_device(batch)
        with torch.no_grad():
            fake = self.paint(len(real))
        loss = self.loss(self.discriminator(real), REAL) + self.loss(self.discriminator(fake), FAKE)
        self.discriminator.backward(loss)
        self.discriminator.step()
        return loss.detach()

    def train_generator(self) -> torch.Tensor:
        fake = self.paint(self.generator.train_micro_batch_size_per_gpu())
        self.discriminator.requires_grad_(False)  # this loss does not train the discriminator
        loss = self.loss(self.discriminator.module(fake), REAL)
        self.generator.backward(loss)
        self.discriminator.requires_grad_(True)
        self.generator.step()
        return loss.detach()

    def loss(self, scores: torch.Tensor, truth: float) -> torch.Tensor:
        return self.criterion(scores, torch.full_like(scores, truth))

    def paint(self, images: int) -> torch.Tensor:
        return self.generator(torch.randn(images, NOISE, 1, 1, device=self.context.device))

    def evaluate_batch(self, dataloader_iter, batch_idx):
        (real,) = self.context.to_device(next(dataloader_iter))
        fake = self.paint(len(real))
        if batch_idx == 0:
            self.show(fake[:64])
        return {"energy_distance": energy_distance(real, fake)}

    def show(self, images: torch.Tensor) -> None:
        grid = images.view(8, 8, SIDE, SIDE).transpose(1, 2).reshape(1, 8 * SIDE, 8 * SIDE)
        self.context.get_tensorboard_writer().add_image("painted", (grid + 1) / 2, self.context.current_train_batch())
