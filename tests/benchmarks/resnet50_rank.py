"""A rank of resnet50's torchrun: a module of its own, so that what is pickled there has one name."""

from __future__ import annotations

import sys

from tests.benchmarks.resnet50 import train_under_torchrun

if __name__ == "__main__":
    train_under_torchrun(sys.argv[1])
