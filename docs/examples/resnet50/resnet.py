"""ResNet-50 (He et al., 2015), with the stride in the 3 x 3 convolutions, as in torchvision."""

import torch
from torch import nn


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False), nn.BatchNorm2d(outputs)
    )


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.inner = nn.Sequential(
            convolution(inputs, width, 1),
            nn.ReLU(),
            convolution(width, width, 3, stride),
            nn.ReLU(),
            convolution(width, outputs, 1),
        )
        nn.init.zeros_(self.inner[-1][1].weight)  # the block starts as its shortcut (Goyal et al., 2017)
        is_same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if is_same else convolution(inputs, outputs, 1, stride)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(self.inner(images) + self.shortcut(images))


class ResNet(nn.Module):
    """Returns scores, batch x classes, for images, batch x 3 x height x width, as uint8."""

    def __init__(self, classes: int, blocks: list[int], width: int = 64) -> None:
        super().__init__()
        self.register_buffer("mean", 255 * torch.tensor([0.485, 0.456, 0.406]).reshape(3, 1, 1), persistent=False)
        self.register_buffer("std", 255 * torch.tensor([0.229, 0.224, 0.225]).reshape(3, 1, 1), persistent=False)
        layers = [convolution(3, width, 7, stride=2), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)]
        channels = width
        for stage, number in enumerate(blocks):
            for block in range(number):
                layers.append(Bottleneck(channels, width * 2**stage, stride=2 if stage and not block else 1))
                channels = 4 * width * 2**stage
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        images = (images - self.mean) / self.std
        return self.layers(images.to(memory_format=torch.channels_last))
