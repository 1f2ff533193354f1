"""Images in folders: FOLDER/train/CLASS/*.jpg and FOLDER/val/CLASS/*.jpg, as ImageNet is usually stored."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset


class Images(Dataset):
    """Pairs (image, 3 x size x size, uint8; number of the class, in the order of the folders' names).

    The random numbers are torch's, so that a resume draws the same ones.
    """

    def __init__(self, folder: Path, size: int, *, training: bool) -> None:
        self.size, self.training = size, training
        self.classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
        self.files = [
            (path, number) for number, name in enumerate(self.classes) for path in sorted((folder / name).iterdir())
        ]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, number = self.files[index]
        with Image.open(path) as file:
            image = file.convert("RGB")
        box = random_box(*image.size) if self.training else central_box(*image.size)
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        return pixels.flip(2) if self.training and torch.rand(()) < 0.5 else pixels, number


def random_box(width: int, height: int) -> tuple[float, float, float, float]:
    """Return a part of 8 to 100 % of an image with a ratio of 3:4 to 4:3 (Szegedy et al., 2014)."""
    share, ratio, left, top = torch.rand(4).tolist()
    area, ratio = (0.08 + 0.92 * share) * width * height, (4 / 3) ** (2 * ratio - 1)
    part = min((area * ratio) ** 0.5, width), min((area / ratio) ** 0.5, height)
    left, top = left * (width - part[0]), top * (height - part[1])
    return left, top, left + part[0], top + part[1]


def central_box(width: int, height: int) -> tuple[float, float, float, float]:
    """Return the square in the middle, with 7/8 of the shorter side."""
    side = min(width, height) * 7 / 8
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side
