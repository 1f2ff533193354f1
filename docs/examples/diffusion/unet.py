"""A U-Net that predicts the noise in an image, given the time and the class."""

import math

import torch
from torch import nn


def norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(math.gcd(channels, 8), channels)


class Block(nn.Module):
    """Two convolutions; the condition (time and class) scales and shifts between them."""

    def __init__(self, inputs: int, outputs: int, conditions: int) -> None:
        super().__init__()
        self.first = nn.Sequential(norm(inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1))
        self.condition = nn.Linear(conditions, 2 * outputs)
        self.norm = norm(outputs)
        self.second = nn.Sequential(nn.SiLU(), nn.Conv2d(outputs, outputs, 3, padding=1))
        self.shortcut = nn.Conv2d(inputs, outputs, 1)

    def forward(self, images: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        scale, shift = self.condition(condition)[:, :, None, None].chunk(2, dim=1)
        states = self.norm(self.first(images)) * (1 + scale) + shift
        return self.second(states) + self.shortcut(images)


class UNet(nn.Module):
    """`widths`: channels of each level; each level halves height and width, which 2 ** (levels - 1) has to divide."""

    def __init__(self, channels: int, classes: int, widths: list[int]) -> None:
        super().__init__()
        conditions = 4 * widths[0]
        self.frequencies = 16
        self.time = nn.Sequential(nn.Linear(2 * self.frequencies, conditions), nn.SiLU())
        self.kind = nn.Embedding(classes, conditions)
        self.enter = nn.Conv2d(channels, widths[0], 3, padding=1)
        self.down = nn.ModuleList(
            Block(above, width, conditions) for above, width in zip([widths[0], *widths], widths, strict=False)
        )
        self.up = nn.ModuleList(
            Block(below + width, width, conditions) for below, width in zip(widths[:0:-1], widths[-2::-1], strict=True)
        )
        self.leave = nn.Sequential(norm(widths[0]), nn.SiLU(), nn.Conv2d(widths[0], channels, 3, padding=1))

    def forward(self, images: torch.Tensor, times: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        """Return the noise, for noisy images, batch x channels x height x width; times in 0..1, and classes: batch."""
        angles = times[:, None] * torch.logspace(0, 3, self.frequencies, device=times.device)
        condition = self.time(torch.cat([angles.sin(), angles.cos()], dim=1)) + self.kind(classes)
        states, skipped = self.enter(images), []
        for level, block in enumerate(self.down):
            states = block(nn.functional.avg_pool2d(states, 2) if level else states, condition)
            skipped.append(states)
        skipped.pop()
        for block in self.up:
            larger = nn.functional.interpolate(states, scale_factor=2)
            states = block(torch.cat([larger, skipped.pop()], dim=1), condition)
        return self.leave(states)
