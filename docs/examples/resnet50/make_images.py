"""python make_images.py FOLDER: write 96 small JPEG files of three classes, for a test of the example."""

import sys
from pathlib import Path

import numpy as np
from PIL import Image


def main(folder: Path) -> None:
    draws = np.random.default_rng(1)
    for part, number in (("train", 24), ("val", 8)):
        for colour, name in enumerate(["blue", "green", "red"]):
            (folder / part / name).mkdir(parents=True)
            for image in range(number):
                pixels = draws.integers(0, 128, (40, 48, 3), dtype=np.uint8)
                pixels[:, :, 2 - colour] += 127
                Image.fromarray(pixels).save(folder / part / name / f"{image}.jpg")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
