"""ResNet (He et al., 2015, arXiv:1512.03385) with bottlenecks: 50 layers as `ResNet((3, 4, 6, 3))`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

EXPANSION = 4


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions; the shortcut is the identity, or 1x1 if the shape changes. The 3x3 has
    the stride.
    """

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = EXPANSION * width
        self.body = nn.Sequential(
            *_convolution(channels, width, 1),
            nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_convolution(width, out, 1),
        )
        is_same = stride == 1 and channels == out
        self.shortcut = nn.Identity() if is_same else nn.Sequential(*_convolution(channels, out, 1, stride))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.relu(self.body(images) + self.shortcut(images))
        return result


class ResNet(nn.Sequential):
    """`blocks`: number in each of the four stages, the first of which has `width` channels."""

    def __init__(self, blocks: Sequence[int], width: int = 64, classes: int = 1000) -> None:
        stem = [*_convolution(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
        body: list[nn.Module] = []
        channels = width
        for stage, count in enumerate(blocks):
            for number in range(count):
                body.append(Bottleneck(channels, width << stage, 2 if stage and not number else 1))
                channels = EXPANSION * (width << stage)
        super().__init__(*stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def _convolution(channels: int, out: int, size: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(channels, out, size, stride, size // 2, bias=False), nn.BatchNorm2d(out)]
