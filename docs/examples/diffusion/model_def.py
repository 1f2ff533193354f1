"""A diffusion model of images (DDPM; Ho et al., 2020), by default of the handwritten digits of scikit-learn.

The validation uses a moving average of the weights: its loss, and images that it generates, in TensorBoard.
"""

import copy
import math

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from unet import UNet

from hpc_det.pytorch import DataLoader, PyTorchCallback, PyTorchTrial, PyTorchTrialContext


def load(file: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images, N x channels x height x width in -1..1, and their classes.

    `file`: an .npz file with `images`, N x channels x height x width as uint8, and `classes`; None: digits, 8 x 8.
    """
    if file is None:
        digits = load_digits()
        return torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1, torch.tensor(digits.target)
    arrays = np.load(file)
    return torch.from_numpy(arrays["images"]).float() / 127.5 - 1, torch.from_numpy(arrays["classes"]).long()


def remaining(times: torch.Tensor) -> torch.Tensor:
    """Return the share of the image's variance at times in 0..1: 1 at 0, about 0 at 1 (Nichol and Dhariwal, 2021)."""
    return torch.cos((times + 0.008) / 1.008 * math.pi / 2).square().clamp(1e-4, 0.9999)


def noisy(images: torch.Tensor, times: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    left = remaining(times)[:, None, None, None]
    return left.sqrt() * images + (1 - left).sqrt() * noise


@torch.no_grad()
def generate(model: nn.Module, classes: torch.Tensor, shape: torch.Size, steps: int) -> torch.Tensor:
    """Return an image for each class, in -1..1; always from the same noise, and without torch's global generator."""
    draws = torch.Generator(classes.device).manual_seed(0)
    images = torch.randn(len(classes), *shape, generator=draws, device=classes.device)
    for step in range(steps, 0, -1):
        now, before = remaining(torch.tensor([step, step - 1], device=classes.device) / steps)
        noise = model(images, torch.full_like(images[:, 0, 0, 0], step / steps), classes).float()
        clean = ((images - (1 - now).sqrt() * noise) / now.sqrt()).clamp(-1, 1)
        kept = now / before
        mean = (before.sqrt() * (1 - kept) * clean + kept.sqrt() * (1 - before) * images) / (1 - now)
        fresh = torch.randn(images.shape, generator=draws, device=classes.device) if step > 1 else 0
        images = mean + ((1 - kept) * (1 - before) / (1 - now)).sqrt() * fresh
    return images.clamp(-1, 1)


class Samples(PyTorchCallback):
    """Writes generated images of all classes to TensorBoard after each validation."""

    def __init__(self, trial: "DiffusionTrial") -> None:
        self.trial = trial

    def on_validation_end(self, metrics):
        context = self.trial.context
        if context.distributed.get_rank() == 0:
            classes = torch.arange(self.trial.classes, device=context.device)
            images = generate(self.trial.average, classes, self.trial.shape, context.get_hparam("steps"))
            context.get_tensorboard_writer().add_images("samples", (images + 1) / 2, context.current_train_batch() + 1)


class DiffusionTrial(PyTorchTrial):
    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        if context.device.type == "cuda":
            context.experimental.use_amp(torch.bfloat16)
        self.images, self.labels = load(context.get_data_config()["file"])
        self.shape, self.classes = self.images.shape[1:], int(self.labels.max()) + 1
        model = UNet(self.shape[0], self.classes, context.get_hparam("widths"))
        # wrapped, too, so that checkpoints contain it
        self.average = context.wrap_model(copy.deepcopy(model).requires_grad_(False))
        self.model = context.wrap_model(model)
        self.optimizer = context.wrap_optimizer(
            torch.optim.AdamW(self.model.parameters(), lr=context.get_hparam("learning_rate"))
        )

    def data(self, *, training: bool) -> Dataset:
        """Return every tenth image for validation, and the others for training."""
        chosen = (torch.arange(len(self.images)) % 10 != 0) == training
        return TensorDataset(self.images[chosen], self.labels[chosen])

    def build_training_data_loader(self) -> DataLoader:
        size = self.context.get_per_slot_batch_size()
        return DataLoader(self.data(training=True), size, shuffle=True, drop_last=True)

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(self.data(training=False), self.context.get_per_slot_batch_size())

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {"samples": Samples(self)}

    def train_batch(self, batch, epoch_idx, batch_idx):
        images, classes = batch
        times, noise = torch.rand(len(images), device=images.device), torch.randn_like(images)
        loss = nn.functional.mse_loss(self.model(noisy(images, times, noise), times, classes), noise)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer, clip_grads=lambda weights: nn.utils.clip_grad_norm_(weights, 1.0))
        decay = min(self.context.get_hparam("average_decay"), (batch_idx + 1) / (batch_idx + 10))
        for average, weight in zip(self.average.parameters(), self.model.parameters(), strict=True):
            average.lerp_(weight.detach(), 1 - decay)
        return {"loss": loss}

    def evaluate_batch(self, batch):
        images, classes = batch
        draws = torch.Generator(images.device).manual_seed(0)  # the same times and noise in every validation
        times = torch.rand(len(images), generator=draws, device=images.device)
        noise = torch.randn(images.shape, generator=draws, device=images.device)
        found = self.average(noisy(images, times, noise), times, classes)
        return {"validation_loss": nn.functional.mse_loss(found.float(), noise)}
