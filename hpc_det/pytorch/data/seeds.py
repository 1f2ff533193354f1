"""Seeds for what has to come out the same after a resume, and the global generators under them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def mixed_seed(*key: int | str) -> int:
    """64 bits to which every part of `key` contributes; the same on every machine and with every version."""
    text = repr([str(part) for part in key])  # a number of numpy's is no other than Python's
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def seed_generators(seed: int) -> None:
    """Python's, numpy's and torch's CPU generator. `seed`: 64 bits, of which torch's takes the lower half."""
    random.seed(seed)
    # All three are the Mersenne Twister; without one more word numpy's numbers would be the same as Python's.
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32, 1])
    torch.default_generator.manual_seed(seed)  # torch.manual_seed looks after GPUs too, at a hundred times the cost


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Those generators, seeded for the time of the block and put back after it."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed_generators(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
