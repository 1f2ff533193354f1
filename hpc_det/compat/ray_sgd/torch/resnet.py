"""`ray.util.sgd.torch.resnet`: residual networks for images of 32 x 32 pixels in ten classes, such as CIFAR-10.

He et al., "Deep Residual Learning for Image Recognition" (2015), with the four stages of the networks for ImageNet
(table 1 of the paper) behind a stem that keeps the resolution: one 3 x 3 convolution of stride 1, no pooling. Names of
parameters and the order of constructor arguments are those of RaySGD, so checkpoints of its networks load.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

STEM_CHANNELS = 64
STAGES = ((64, 1), (128, 2), (256, 2), (512, 2))
"""Width and stride of each of the four stages."""


def _convolution(channels: int, width: int, size: int, stride: int = 1) -> nn.Conv2d:
    """Return a convolution that keeps the resolution, apart from its stride; batch normalisation adds the bias."""
    return nn.Conv2d(channels, width, size, stride=stride, padding=size // 2, bias=False)


def _shortcut(channels: int, width: int, stride: int) -> nn.Sequential:
    """Return the identity, or a projection where the shape changes (option B of the paper)."""
    if stride == 1 and channels == width:
        return nn.Sequential()
    return nn.Sequential(_convolution(channels, width, 1, stride), nn.BatchNorm2d(width))


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut, the block of ResNet18 and ResNet34."""

    expansion: ClassVar[int] = 1
    """Channels of the output per channel of `planes`."""

    def __init__(self, in_planes: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = _convolution(in_planes, planes, 3, stride)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = _convolution(planes, planes, 3)
        self.bn2 = nn.BatchNorm2d(planes)
        self.shortcut = _shortcut(in_planes, planes, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        return functional.relu(residual + self.shortcut(x))


class Bottleneck(nn.Module):
    """A 3 x 3 convolution between two of 1 x 1, and a shortcut: the block of ResNet50 and deeper networks."""

    expansion: ClassVar[int] = 4
    """Channels of the output per channel of `planes`."""

    def __init__(self, in_planes: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        width = self.expansion * planes
        self.conv1 = _convolution(in_planes, planes, 1)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = _convolution(planes, planes, 3, stride)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = _convolution(planes, width, 1)
        self.bn3 = nn.BatchNorm2d(width)
        self.shortcut = _shortcut(in_planes, width, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        narrow = functional.relu(self.bn1(self.conv1(x)))
        residual = self.bn3(self.conv3(functional.relu(self.bn2(self.conv2(narrow)))))
        return functional.relu(residual + self.shortcut(x))


class ResNet(nn.Module):
    """A residual network.

    Args:
        block: The class of its blocks.
        num_blocks: The number of blocks in each of the four stages.
        num_classes: The size of the output.
    """

    def __init__(self, block: type[BasicBlock | Bottleneck], num_blocks: list[int], num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = _convolution(3, STEM_CHANNELS, 3)
        self.bn1 = nn.BatchNorm2d(STEM_CHANNELS)
        channels = STEM_CHANNELS
        for number, ((planes, stride), count) in enumerate(zip(STAGES, num_blocks, strict=True), start=1):
            first = block(channels, planes, stride)
            channels = block.expansion * planes
            others = (block(channels, planes) for _ in range(count - 1))
            self.add_module(f"layer{number}", nn.Sequential(first, *others))
        self.linear = nn.Linear(channels, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of a batch of images, of shape (images, num_classes)."""
        out = functional.relu(self.bn1(self.conv1(x)))
        for number in range(1, len(STAGES) + 1):
            out = self.get_submodule(f"layer{number}")(out)
        out = functional.avg_pool2d(out, 4).flatten(1)
        logits: torch.Tensor = self.linear(out)
        return logits


def ResNet18(config: Any) -> ResNet:
    """Return a network of 18 layers. `config` is ignored: it makes the function a `model_creator`."""
    return ResNet(BasicBlock, [2, 2, 2, 2])


def ResNet34(config: Any) -> ResNet:
    """Return a network of 34 layers; see ResNet18."""
    return ResNet(BasicBlock, [3, 4, 6, 3])


def ResNet50(config: Any) -> ResNet:
    """Return a network of 50 layers; see ResNet18."""
    return ResNet(Bottleneck, [3, 4, 6, 3])


def ResNet101(config: Any) -> ResNet:
    """Return a network of 101 layers; see ResNet18."""
    return ResNet(Bottleneck, [3, 4, 23, 3])


def ResNet152(config: Any) -> ResNet:
    """Return a network of 152 layers; see ResNet18."""
    return ResNet(Bottleneck, [3, 8, 36, 3])
