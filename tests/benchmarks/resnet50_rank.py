"""A rank of resnet50's torchrun, in a separate module, so that its pickled classes have the same name on both sides."""

from __future__ import annotations

import sys

from tests.benchmarks.resnet50 import train_under_torchrun

if __name__ == "__main__":
    train_under_torchrun(sys.argv[1])
